"""Inputs of a layer case: activations, routing, and one rank's experts.

``aimed`` values mirror K: the second half of every weight row is the first one negated, its scales
moved by a few 2^-20, and activations repeat, so that both GEMMs end in small differences of large
sums, where every rounding on the way shows.  Experts come in pairs whose outputs cancel, and a
token takes both, far apart in k, with weights a few 2^-20 apart, so that the top-k sum does too.
Experts that no pair of this rank may touch hold NaN codes and NaN scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.references.aims_layer import codes, nudged
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import E4M3_NAN, f32_to_bf16
from moe_parity.references.language import Case, Routing, Values
from moe_parity.references.layer import Asked, Experts, Routed, local_experts

ORDINARY_SCALE = 2.0**-6
AIMED_SCALE = 2.0**14
"""Weight scales that keep FC1's outputs near 1, also where sums cancel."""


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What a layer is called with."""

    batch: Routed
    experts: Experts
    asked: Asked


def layer_inputs(case: Case, device: str = "cpu", *, spoil: bool = True) -> LayerInputs:
    """Return the inputs of a case; raises ValueError where E is not a multiple of the ranks.

    ``spoil`` fills the experts that no owned pair takes with NaN.
    """
    batch, experts = batch_of(case, device), experts_of(case, device)
    if spoil:
        poison(batch, experts)
    return LayerInputs(batch=batch, experts=experts, asked=asked_of(case))


def asked_of(case: Case) -> Asked:
    """Return what the case asks of the layer besides sizes."""
    return Asked(ue8m0=case.scale.is_power_of_two, limit=case.clamp)


def batch_of(case: Case, device: str) -> Routed:
    """Return activations, ids and routing weights."""
    return Routed(
        x=_activations(case, case.values is Values.AIMED, device),
        ids=routing(case, device),
        weights=_routing_weights(case, device),
    )


def experts_of(case: Case, device: str) -> Experts:
    """Return the experts of the case's rank."""
    if case.e % case.ep_size:
        raise ValueError(f"case: {case.e} experts are not a multiple of {case.ep_size} ranks.")
    count = case.e // case.ep_size
    aimed = case.values is Values.AIMED
    return Experts(
        w13=_weight(case, "w13", count, 2 * case.i, case.h, aimed, device),
        w13_scale=_scales(case, "w13", count, 2 * case.i, case.h, aimed, device),
        w2=_weight(case, "w2", count, case.h, case.i, aimed, device),
        w2_scale=_scales(case, "w2", count, case.h, case.i, aimed, device),
        first=case.ep_rank * count,
    )


def routing(case: Case, device: str) -> Tensor:
    """Return int32 ids [m, k]; a token's first ids do not depend on k of later ones."""
    score = random_bits.uniform(case.seed, "routing/score", case.m, case.e, device=device)
    if case.routing is Routing.ONE:
        owner = case.ep_rank * (case.e // case.ep_size)
        return torch.full((case.m, case.k), owner, dtype=torch.int32, device=device)
    if case.routing is Routing.REPEATED or case.k > case.e:
        drawn = random_bits.integers(
            case.seed, "routing/id", case.m, case.k, below=case.e, device=device
        )
        return drawn.int()
    if _pairs_experts(case):
        pair = score[:, : case.e // 2].argsort(dim=1, stable=True)[:, : case.k // 2]
        ids = torch.cat([2 * pair, 2 * pair + 1], 1).int()
    else:
        ids = score.argsort(dim=1, stable=True)[:, : case.k].int().contiguous()
    if case.routing is Routing.HOLES:
        odd = random_bits.integers(
            case.seed, "routing/hole", case.m, case.k, below=6, device=device
        )
        strange = torch.tensor([-1, case.e, case.e + 7], dtype=torch.int32, device=device)
        ids = torch.where(odd < 3, strange[odd.clamp(max=2)], ids)
    return ids


def _pairs_experts(case: Case) -> bool:
    """Whether a token's experts come in pairs that cancel."""
    return case.values is Values.AIMED and case.k % 2 == 0 and case.e >= case.k


def _routing_weights(case: Case, device: str) -> Tensor:
    weights = random_bits.uniform(case.seed, "routing/weight", case.m, case.k, device=device)
    if not _pairs_experts(case):
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
    return name == "w13" and case.i % 256 == 0


def _mirrors_columns(case: Case, name: str, columns: int) -> bool:
    return columns % 256 == 0 and (name == "w13" or _mirrors_rows(case, "w13"))


def _weight(
    case: Case, name: str, count: int, rows: int, columns: int, aimed: bool, device: str
) -> Tensor:
    """Return codes [count, rows, columns]; expert e keeps its bits whatever ``count`` is."""
    first = case.ep_rank * count
    out = torch.empty((count, rows, columns), dtype=torch.uint8, device=device)
    half = columns // 2 if aimed and _mirrors_columns(case, name, columns) else columns
    for expert in range(count):
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
    case: Case, name: str, count: int, rows: int, columns: int, aimed: bool, device: str
) -> Tensor:
    first = case.ep_rank * count
    down, across = -(-rows // 128), -(-columns // 128)
    out = torch.empty((count, down, across), dtype=torch.float32, device=device)
    mirrored = aimed and _mirrors_columns(case, name, columns)
    for expert in range(count):
        number = first + expert
        key = f"{name}/scale/{number // 2 * 2 if aimed else number}"
        half = across // 2 if mirrored else across
        made = 1.0 + random_bits.uniform(case.seed, key, down, half, device=device)
        if case.scale.is_power_of_two:
            made = torch.exp2(made.floor())
        if mirrored:
            move = nudged(case.seed, f"{key}/move", down, half, device=device)
            made = torch.cat([made, made * move], 1)
        if aimed and _mirrors_rows(case, name):
            made = made.view(4, down // 4, across)[[0, 0, 2, 2]].reshape(down, across)
        out[expert] = made * (AIMED_SCALE if mirrored else ORDINARY_SCALE)
    return out


def poison(batch: Routed, experts: Experts) -> None:
    """Fill every expert that no pair takes with NaN codes and scales."""
    local = local_experts(batch.ids, experts)
    untouched = torch.ones(experts.w13.shape[0], dtype=torch.bool, device=local.device)
    untouched[local[local >= 0]] = False
    experts.w13[untouched] = E4M3_NAN
    experts.w2[untouched] = E4M3_NAN
    experts.w13_scale[untouched] = float("nan")
    experts.w2_scale[untouched] = float("nan")
