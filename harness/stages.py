"""The middle stages as problems: inputs by case, the reference, a recipe's neighbours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from moe_parity.harness.checks.layer import mutants_of as layer_mutants
from moe_parity.harness.inputs import aimed_pool
from moe_parity.harness.layer_inputs import routing
from moe_parity.kernels.stage_call import (
    ExpertRows,
    GateUpRows,
    GroupedRows,
    RoutedRows,
    StageInputs,
)
from moe_parity.references import aims_layer, quant
from moe_parity.references import combine as combining
from moe_parity.references import layer as ref
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import (
    E4M3_NAN,
    bits_of,
    f32_to_bf16,
    from_bits,
    ue8m0_decode,
)
from moe_parity.references.language import (
    Case,
    Gate,
    Recipe,
    ScaleFormat,
    Stage,
    Values,
    neighbours,
)
from moe_parity.references.layer import Experts, local_experts
from moe_parity.references.swiglu import swiglu

MIDDLE = (
    Stage.ALIGN, Stage.PERMUTE, Stage.FC1, Stage.SWIGLU, Stage.SWIGLU_QUANT, Stage.FC2,
    Stage.COMBINE,
)  # fmt: skip
"""The stages between the first quantization and the layer's end."""

BIG_GATE = 32.0
"""SiLU of 32 is 32 exactly, in every form: up = y / 32 makes the product y."""


def stage_inputs(stage: Stage, case: Case, device: str = "cpu") -> StageInputs:
    """Return the inputs of a middle stage, the same bits on a CPU and a GPU."""
    if stage in (Stage.FC1, Stage.FC2):
        return grouped_rows(stage, case, device)
    if stage in (Stage.SWIGLU, Stage.SWIGLU_QUANT):
        return gate_up_rows(case, device)
    return expert_rows(case, device) if stage is Stage.COMBINE else routed_rows(case, device)


def expert_map(case: Case, device: str) -> Tensor | None:
    """Return the local expert of every global one, or None without expert parallelism."""
    if case.ep_size == 1:
        return None
    count = case.e // case.ep_size
    local = torch.arange(case.e, dtype=torch.int32) - case.ep_rank * count
    return torch.where((local >= 0) & (local < count), local, -1).to(device)


def grouped_rows(stage: Stage, case: Case, device: str) -> GroupedRows:
    """Return operands of N = 2 * I, K = H for ``fc1`` and N = H, K = I for ``fc2``.

    Aimed: the second half of K is the first one negated and its scales are moved by a few 2^-20.
    Experts without a row hold NaN codes and scales.
    """
    first = stage is Stage.FC1
    n, k = (2 * case.i, case.h) if first else (case.h, case.i)
    count, tokens = case.e // case.ep_size, case.m if first else case.m * case.k
    ids = routing(case, device)
    experts = Experts(
        w13=torch.empty(count, 1, 1), w13_scale=torch.empty(0), w2=torch.empty(0),
        w2_scale=torch.empty(0), first=case.ep_rank * count,
    )  # fmt: skip
    expert = local_experts(ids, experts)
    a, a_scale = _operand(case, f"{stage}/a", tokens, k, 1, device)
    w = torch.full((count, n, k), E4M3_NAN, dtype=torch.uint8, device=device)
    w_scale = torch.full((count, -(-n // 128), -(-k // 128)), float("nan"), device=device)
    for index in ref.hit(expert):
        name = f"{stage}/w/{experts.first + index}"
        w[index], w_scale[index] = _operand(case, name, n, k, 128, device, negate=True)
    weights = 0.5 + 0.5 * random_bits.uniform(case.seed, "weights", case.m, case.k, device=device)
    return GroupedRows(
        a=a, a_scale=a_scale, w=w, w_scale=w_scale, ids=ids, expert=expert, weights=weights,
        first=experts.first,
    )  # fmt: skip


def _operand(
    case: Case, name: str, rows: int, k: int, tall: int, device: str, negate: bool = False
) -> tuple[Tensor, Tensor]:
    """Return codes [rows, k] and scales [ceil(rows / tall), ceil(k / 128)]."""
    aimed = case.values is Values.AIMED and k % 256 == 0
    half = k // 2 if aimed else k
    down, across = -(-rows // tall), -(-half // 128)
    made = aims_layer.codes(case.seed, name, rows, half, device=device)
    scale = 1.0 + random_bits.uniform(case.seed, f"{name}/scale", down, across, device=device)
    if case.scale.is_power_of_two:
        scale = torch.exp2((4.0 * (scale - 1.0)).floor())
    if not aimed:
        return made, scale
    moved = scale
    if not case.scale.is_power_of_two:
        nudge = aims_layer.nudged(case.seed, f"{name}/move", down, across, device=device)
        moved = scale * nudge
    mirrored = made ^ 0x80 if negate else made
    return torch.cat([made, mirrored], 1), torch.cat([scale, moved], 1)


def gate_up_rows(case: Case, device: str) -> GateUpRows:
    """Return bf16 rows [m, 2 * i] split among the experts, some of which have none.

    Aimed: the pairs that tell SiLU's forms, gates at the limit, special values, and the groups
    of every quantization decision behind a gate of 32.
    """
    alpha, beta = case.gate.alpha_beta
    aimed = case.values in (Values.AIMED, Values.SPECIAL)
    rows = _gate_up(case) if aimed else _ordinary(case)
    counts = torch.zeros(case.e, dtype=torch.int32)
    if case.m:
        owner = random_bits.integers(case.seed, "counts", case.m, 1, below=max(1, case.e - 1))
        counts = torch.bincount(owner.flatten(), minlength=case.e).int()
    return GateUpRows(
        rows=rows.to(device), counts=counts.to(device), limit=case.clamp, alpha=alpha, beta=beta
    )


def _ordinary(case: Case) -> Tensor:
    return f32_to_bf16(4.0 * random_bits.normal(case.seed, "gate_up", case.m, 2 * case.i))


def gate_up_pool(case: Case) -> Tensor:
    """Return the aimed groups fp32 [G, 256], gate then up, interleaved.

    Special ones are zeros, infinities and NaN of both; among aimed ones there is no NaN, since what
    a clamp makes of it depends on the compiler.
    """
    if case.values is Values.SPECIAL:
        return _special_gates()
    finite = torch.nan_to_num(_special_gates(), nan=1.0, posinf=64.0, neginf=-64.0)
    parts = [aims_layer.every_gate_of_pool_1(case.seed), finite]
    if case.clamp is not None:
        parts += [aims_layer.gates_at_the_limit(case.seed)]
        parts += [torch.nan_to_num(aims_layer.gates_past_an_odd_limit(case.seed), nan=9.0)]
    if case.clamp is None and case.gate is Gate.SILU:
        groups = aimed_pool(case.seed, case.pool)
        parts.append(torch.cat([torch.full_like(groups, BIG_GATE), groups / BIG_GATE], 1))
    pool = torch.cat(parts)
    return pool[random_bits.words(case.seed, "pool", 1, pool.shape[0])[0].argsort()]


def _special_gates() -> Tensor:
    words = (
        0, -0x80000000, 0x40E00000, -0x3F200000, 0x7149F2CA, 0x7F800000, -0x00800000, 0x7FC00000,
    )  # fmt: skip
    value = from_bits(torch.tensor(words, dtype=torch.int64).int())
    gate, up = value.repeat_interleave(8), value.repeat(8)
    return torch.cat([gate.repeat(2), up.repeat(2)])[None]


def _gate_up(case: Case) -> Tensor:
    pool = gate_up_pool(case)
    groups = -(-case.m * case.i // 128)
    taken = pool[torch.arange(groups) % pool.shape[0]]
    gate, up = (part.reshape(-1)[: case.m * case.i] for part in taken.chunk(2, dim=1))
    return f32_to_bf16(torch.cat([gate.view(case.m, case.i), up.view(case.m, case.i)], 1))


def expert_rows(case: Case, device: str) -> ExpertRows:
    """Return rows [m, k, h]: aimed ones cancel far apart in k; foreign ones hold NaN."""
    rows = random_bits.normal(case.seed, "rows", case.m * case.k, case.h, device=device)
    rows = rows.view(case.m, case.k, case.h)
    weights = 0.5 + 0.5 * random_bits.uniform(case.seed, "weights", case.m, case.k, device=device)
    if case.values is Values.AIMED and case.k > 2:
        rows[:, 0] *= 2.0**16
        rows[:, -1] = -rows[:, 0]
        weights[:, -1] = from_bits(bits_of(weights[:, 0].contiguous()) + 1)
    ids, mapped = routing(case, device), expert_map(case, device)
    made = f32_to_bf16(rows)
    made[~owned(ids, mapped, case.e)] = float("nan")
    return ExpertRows(rows=made, weights=weights, ids=ids, expert_map=mapped)


def owned(ids: Tensor, mapped: Tensor | None, experts: int) -> Tensor:
    """Return bool [m, k]: the pairs whose expert this rank has."""
    known = (ids >= 0) & (ids < experts)
    if mapped is None:
        return known
    return known & (mapped[ids.clamp(0, experts - 1).long()] >= 0)


def routed_rows(case: Case, device: str) -> RoutedRows:
    """Return quantized rows [m, h] and their routing."""
    codes, scales = _operand(case, "a", case.m, case.h, 1, device)
    return RoutedRows(
        codes=codes, scales=scales, ids=routing(case, device),
        expert_map=expert_map(case, device), experts=case.e // case.ep_size,
    )  # fmt: skip


# --- references ---------------------------------------------------------------------------------


def reference(stage: Stage, case: Case, inputs: StageInputs, recipe: Recipe) -> dict[str, Tensor]:
    """Return what the recipe gives, as the canonical tensors of the stage."""
    if isinstance(inputs, GroupedRows):
        return {"rows": _grouped(stage, inputs, recipe)}
    if isinstance(inputs, GateUpRows):
        return _activated(stage, case, inputs, recipe)
    if isinstance(inputs, ExpertRows):
        assert recipe.combine is not None
        mine = owned(inputs.ids, inputs.expert_map, case.e)
        weights = inputs.weights
        return {"out": combining.combine(inputs.rows, weights, mine, recipe.combine)}
    return _aligned(inputs, case) if stage is Stage.ALIGN else _permuted(inputs, case)


def _grouped(stage: Stage, inputs: GroupedRows, recipe: Recipe) -> Tensor:
    assert recipe.gemm is not None
    source = inputs.source
    rows = ref.grouped(
        inputs.a[source], inputs.a_scale[source], inputs.w, inputs.w_scale, inputs.expert,
        recipe.gemm,
    )  # fmt: skip
    if stage is Stage.FC2 and recipe.combine is not None:
        rows = combining.weighted(rows, inputs.weights.flatten(), recipe.combine)
    rows = f32_to_bf16(rows)
    return torch.where((inputs.expert >= 0)[:, None], rows, torch.zeros_like(rows))


def _activated(stage: Stage, case: Case, inputs: GateUpRows, recipe: Recipe) -> dict[str, Tensor]:
    assert recipe.swiglu is not None
    y = swiglu(inputs.rows, recipe.swiglu, limit=inputs.limit, alpha=inputs.alpha, beta=inputs.beta)
    if stage is Stage.SWIGLU:
        return {"rows": f32_to_bf16(y)}
    part = recipe.of(Stage.SWIGLU_QUANT)
    out = quant.act_quant(y, part, group=case.group, ue8m0=case.scale.is_power_of_two)
    scales = out.scales
    if case.scale is ScaleFormat.UE8M0_PACKED:
        scales = ue8m0_decode((bits_of(scales) >> 23).to(torch.uint8))
    return {"codes": out.codes, "scales": scales}


def block_of(case: Case) -> int:
    """Return the rows of a block: vLLM's default for the number of tokens."""
    return 16 if case.m <= 64 else 64


def _aligned(inputs: RoutedRows, case: Case) -> dict[str, Tensor]:
    """Return the expert of each block and each expert's pairs, ascending and padded."""
    ids, mapped = inputs.ids.cpu(), None if inputs.expert_map is None else inputs.expert_map.cpu()
    mine = owned(ids, mapped, case.e).flatten()
    flat, block, pairs = ids.flatten().long(), block_of(case), ids.numel()
    experts, slots = [], []
    for expert in range(case.e):
        own = (mine & (flat == expert)).nonzero()[:, 0].tolist()
        blocks = -(-len(own) // block)
        experts += [expert if mapped is None else int(mapped[expert])] * blocks
        slots += own + [pairs] * (blocks * block - len(own))
    return {
        "experts": torch.tensor(experts, dtype=torch.int32),
        "slots": torch.tensor(slots, dtype=torch.int32),
    }


def _permuted(inputs: RoutedRows, case: Case) -> dict[str, Tensor]:
    """Return each owned pair's row and scales, and how many rows every expert has."""
    mine = owned(inputs.ids, inputs.expert_map, case.e).flatten()
    local = inputs.ids.flatten().long()
    if inputs.expert_map is not None:
        local = inputs.expert_map[local.clamp(0, case.e - 1)].long()
    token = torch.arange(local.numel(), device=local.device) // inputs.ids.shape[1]
    return {
        "codes": torch.where(mine[:, None], inputs.codes[token], 0),
        "scales": torch.where(mine[:, None], inputs.scales[token], 0.0),
        "counts": torch.bincount(local[mine], minlength=inputs.experts).int(),
    }


def mutants_of(stage: Stage, recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield (decision=option, recipe) for each decision that acts in a stage."""
    if stage in (Stage.ALIGN, Stage.PERMUTE):
        return
    if stage is Stage.SWIGLU and recipe.swiglu is not None:
        for decision, option, part in neighbours(recipe.swiglu):
            yield f"{decision.name}={option}", dataclasses.replace(recipe, swiglu=part)
        return
    if None not in (recipe.gemm, recipe.swiglu, recipe.combine):
        yield from layer_mutants(stage, recipe)
    elif recipe.gemm is not None:
        for decision, option, gemm in neighbours(recipe.gemm):
            yield f"{decision.name}={option}", dataclasses.replace(recipe, gemm=gemm)
