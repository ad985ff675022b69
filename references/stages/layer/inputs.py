"""Inputs of a layer case: activations, routing, and one rank's experts.

``aimed`` values mirror K: the second half of every weight row is the first one negated, its scales
moved by a few 2^-20, and activations repeat, so that both GEMMs end in small differences of large
sums, where every rounding on the way shows.  Experts come in pairs whose outputs cancel, and a
token takes both, far apart in k, with weights a few 2^-20 apart, so that the top-k sum does too.
Experts that no pair of this rank may touch hold NaN codes and NaN scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import BLOCK, ScaleFormat, f32_to_bf16
from moe_parity.references.language.case import Arrival, Case, Hazard, Values
from moe_parity.references.stages.gemm.aims import codes, nudged
from moe_parity.references.stages.gemm.reference import hit
from moe_parity.references.stages.hazards import embed, surround
from moe_parity.references.stages.layer.operands import Arrived, Asked, Experts, LayerInputs, Routed
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import act_quant
from moe_parity.references.stages.routing import draw_ids, local_expert, pairs_experts
from moe_parity.references.stages.sparse import room

ORDINARY_SCALE = 2.0**-6
AIMED_SCALE = 2.0**14
"""Weight scales that keep FC1's outputs near 1, also where sums cancel."""


def layer_inputs(case: Case, device: str = "cpu", *, spoil: bool = True) -> LayerInputs:
    """Return the inputs of a case; raises ParityError where E is not a multiple of the ranks.

    ``spoil`` fills the experts that no owned pair takes with NaN, or leaves their codes at zero in
    weights of ``sparse.LARGE`` elements and more.
    """
    batch = batch_of(case, device)
    taken = None
    if spoil:
        taken = hit(local_expert(batch.ids, case.first_expert, case.local_experts))
    experts = experts_of(case, device, taken)
    made = LayerInputs(batch=batch, experts=experts, asked=asked_of(case))
    return surround(made, case.hazard)


def asked_of(case: Case) -> Asked:
    """Return what the case asks of the layer besides sizes."""
    alpha, beta = case.gate.alpha_beta
    return Asked(
        scale=case.scale, mid=case.mid, form=case.codes, limit=case.clamp, alpha=alpha, beta=beta
    )


def batch_of(case: Case, device: str) -> Routed:
    """Return activations, ids and routing weights."""
    x = _activations(case, case.values is Values.AIMED, device)
    ids, weights = draw_ids(case, device), _routing_weights(case, device)
    if case.arrives is Arrival.PLAIN:
        return Routed(x=embed(x, case.hazard), ids=ids, weights=weights)
    # by a sender of its own: what the kernel's quantizer decides does not show in its inputs
    act = act_quant(x, QuantRecipe(), scale=case.scale, form=case.codes)
    return Arrived(x=embed(act.codes, case.hazard), x_scale=act.scales, ids=ids, weights=weights)


def experts_of(case: Case, device: str, taken: Sequence[int] | None = None) -> Experts:
    """Return the experts of the case's rank; those not ``taken`` hold NaN, by default none does."""
    taken = range(case.local_experts) if taken is None else taken
    aimed = case.values is Values.AIMED
    return Experts(
        w13=_weight(case, "w13", taken, 2 * case.i, case.h, aimed, device),
        w13_scale=_scales(case, "w13", taken, 2 * case.i, case.h, aimed, device),
        w2=_weight(case, "w2", taken, case.h, case.i, aimed, device),
        w2_scale=_scales(case, "w2", taken, case.h, case.i, aimed, device),
        first=case.first_expert,
    )


def _routing_weights(case: Case, device: str) -> Tensor:
    weights = random_bits.uniform(case.seed, "routing/weight", case.m, case.k, device=device)
    if not pairs_experts(case):
        return weights
    half = 0.5 + 0.5 * weights[:, : case.k // 2]
    moved = half * nudged(case.seed, "routing/move", case.m, case.k // 2, device=device)
    return torch.cat([half, moved], 1)


def _activations(case: Case, aimed: bool, device: str) -> Tensor:
    columns = case.h // 2 if aimed else case.h
    x = random_bits.normal(case.seed, "x", case.m, columns, device=device)
    return f32_to_bf16(torch.cat([x, x], 1) if aimed else x)


def _mirrors_rows(case: Case, name: str) -> bool:
    """Whether FC1's output repeats, so that FC2 can cancel: both halves must be whole blocks."""
    return name == "w13" and case.i % (2 * BLOCK) == 0


def _mirrors_columns(case: Case, name: str, columns: int) -> bool:
    return columns % (2 * BLOCK) == 0 and (name == "w13" or _mirrors_rows(case, "w13"))


def _weight(
    case: Case, name: str, taken: Sequence[int], rows: int, columns: int, aimed: bool, device: str
) -> Tensor:
    """Return codes [E, rows, columns]; expert e keeps its bits whatever E is."""
    first = case.first_expert
    out = room(
        (case.local_experts, rows, columns), case.codes.nan, device, dtype=torch.uint8,
        far=case.hazard is Hazard.FAR,
    )  # fmt: skip
    half = columns // 2 if aimed and _mirrors_columns(case, name, columns) else columns
    for expert in taken:
        number = first + expert
        source = number // 2 * 2 if aimed else number
        made = codes(case.seed, f"{name}/{source}", rows, half, device=device)
        if number != source and name == "w2":
            made = made ^ 0x80
        if half != columns:
            made = torch.cat([made, made ^ 0x80], 1)
        if aimed and _mirrors_rows(case, name):
            made = made.view(4, rows // 4, columns)[[0, 0, 2, 2]].reshape(rows, columns)
        out[expert] = made
    return out


def _scales(
    case: Case, name: str, taken: Sequence[int], rows: int, columns: int, aimed: bool, device: str
) -> Tensor:
    first = case.first_expert
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    shape = (case.local_experts, down, across)
    out = torch.full(shape, float("nan"), dtype=torch.float32, device=device)
    mirrored = aimed and _mirrors_columns(case, name, columns)
    for expert in taken:
        number = first + expert
        key = f"{name}/scale/{number // 2 * 2 if aimed else number}"
        half = across // 2 if mirrored else across
        made = 1.0 + random_bits.uniform(case.seed, key, down, half, device=device)
        form: ScaleFormat = case.scale if name == "w13" else case.mid
        if form.is_power_of_two:
            made = torch.exp2(made.floor())
        if case.values is Values.SCALES:
            made *= _powers(number, down, across, device)
        if mirrored:
            move = nudged(case.seed, f"{key}/move", down, half, device=device)
            made = torch.cat([made, made * move], 1)
        if aimed and _mirrors_rows(case, name):
            made = made.view(4, down // 4, across)[[0, 0, 2, 2]].reshape(down, across)
        out[expert] = made * (AIMED_SCALE if mirrored else ORDINARY_SCALE)
    return out


def _powers(number: int, down: int, across: int, device: str) -> Tensor:
    """Return powers of two, another one for each tile and expert: no two neighbours are alike."""
    n = torch.arange(down, device=device)[:, None]
    k = torch.arange(across, device=device)[None]
    return torch.exp2(((5 * k + 3 * n + 7 * number) % 11 - 5).float())


def poison(batch: Routed, experts: Experts, nan: int) -> None:
    """Fill every expert that no pair takes with NaN codes and scales."""
    local = local_expert(batch.ids, experts.first, experts.count)
    untouched = torch.ones(experts.count, dtype=torch.bool, device=local.device)
    untouched[local[local >= 0]] = False
    experts.w13[untouched] = nan
    experts.w2[untouched] = nan
    experts.w13_scale[untouched] = float("nan")
    experts.w2_scale[untouched] = float("nan")
