"""The whole layer: which rank owns which pair, the stages one after the other, and two yardsticks.

Rows of every stage between the two quantizations are in canonical (token, k) order, P = M * k of
them.  A pair that this rank does not own has no row: its entries are left as zeros and nothing may
read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.references import combine as combining
from moe_parity.references import gemm as gemms
from moe_parity.references import quant
from moe_parity.references.arithmetic.formats import e4m3_decode, f32_to_bf16, to_f32
from moe_parity.references.arithmetic.rounding import add_rn
from moe_parity.references.language.layer_decisions import BiasAt, DotUnit
from moe_parity.references.language.recipe import GemmRecipe, Recipe
from moe_parity.references.language.stage import Stage
from moe_parity.references.language.trace import QuantOutput, Trace
from moe_parity.references.swiglu import swiglu


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of one rank: E4M3 codes (uint8) and fp32 scales of 128 x 128 tiles."""

    w13: Tensor
    """[E, 2 * I, H], the gate's rows first."""
    w13_scale: Tensor
    """[E, ceil(2 * I / 128), H / 128]."""
    w2: Tensor
    """[E, H, I]."""
    w2_scale: Tensor
    """[E, ceil(H / 128), I / 128]."""
    first: int = 0
    """The global id of expert 0 of this rank."""
    bias13: Tensor | None = None
    """fp32 [E, 2 * I]."""
    bias2: Tensor | None = None
    """fp32 [E, H]."""


@dataclass(frozen=True, kw_only=True)
class Routed:
    """A batch: activations, expert ids, routing weights."""

    x: Tensor
    """[M, H], bf16."""
    ids: Tensor
    """Global expert ids [M, k], int32 or int64; ids that this rank does not own are dropped."""
    weights: Tensor | None
    """fp32 [M, k]; None means ones."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What else the caller asks for."""

    ue8m0: bool = False
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    dtype: torch.dtype = torch.bfloat16


def local_experts(ids: Tensor, experts: Experts) -> Tensor:
    """Return the local expert of each pair, int64 [P]; -1 where this rank does not own it."""
    local = ids.flatten().long() - experts.first
    owned = (ids.flatten() >= 0) & (local >= 0) & (local < experts.w13.shape[0])
    return torch.where(owned, local, -1)


def hit(expert: Tensor) -> list[int]:
    """Return the local experts that some pair takes, ascending."""
    return sorted(set(expert[expert >= 0].flatten().tolist()))


def grouped(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, expert: Tensor, recipe: GemmRecipe
) -> Tensor:
    """Return the fp32 accumulators [P, N] of rows [P, K], each with its own expert's [N, K].

    Rows of expert -1 stay zero.  On a GPU the whole chain is one Triton kernel; it equals the loop
    over experts and intervals, which is what runs on a CPU and for an exact unit.
    """
    if a.is_cuda and recipe.unit is not DotUnit.EXACT:
        from moe_parity.references import gemm_gpu

        return gemm_gpu.grouped(a, a_scale, w, w_scale, expert, recipe)
    return grouped_plain(a, a_scale, w, w_scale, expert, recipe)


def grouped_plain(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, expert: Tensor, recipe: GemmRecipe
) -> Tensor:
    """Return :func:`grouped` as a loop over the experts that are hit."""
    out = torch.zeros((a.shape[0], w.shape[1]), dtype=torch.float32, device=a.device)
    for index in hit(expert):
        rows = (expert == index).nonzero()[:, 0]
        out[rows] = gemms.gemm(a[rows], a_scale[rows], w[index], w_scale[index], recipe)
    return out


def _biased(rows: Tensor, bias: Tensor | None, expert: Tensor, recipe: GemmRecipe) -> Tensor:
    if bias is None:
        return f32_to_bf16(rows)
    own = bias[expert.clamp(min=0)]
    if recipe.bias_at is BiasAt.BEFORE_ROUNDING:
        return f32_to_bf16(add_rn(rows, own))
    return f32_to_bf16(add_rn(to_f32(f32_to_bf16(rows)), own))


def fc1(act: QuantOutput, batch: Routed, experts: Experts, recipe: Recipe) -> Tensor:
    """Return bf16 [P, 2 * I] from quantized activations [M, H]."""
    part = recipe.layer[0]
    expert = local_experts(batch.ids, experts)
    k = batch.ids.shape[1]
    codes = act.codes.repeat_interleave(k, 0)
    scales = act.scales.repeat_interleave(k, 0)
    rows = grouped(codes, scales, experts.w13, experts.w13_scale, expert, part)
    return _owned(_biased(rows, experts.bias13, expert, part), expert)


def swiglu_quant(
    rows: Tensor, batch: Routed, experts: Experts, recipe: Recipe, asked: Asked
) -> QuantOutput:
    """Return codes [P, I] and scales [P, I / 128] from FC1's bf16 rows [P, 2 * I]."""
    y = swiglu(rows, recipe.layer[1], limit=asked.limit, alpha=asked.alpha, beta=asked.beta)
    out = quant.act_quant(y, recipe.of(Stage.SWIGLU_QUANT), ue8m0=asked.ue8m0)
    expert = local_experts(batch.ids, experts)
    return QuantOutput(codes=_owned(out.codes, expert), scales=_owned(out.scales, expert))


def fc2(mid: QuantOutput, batch: Routed, experts: Experts, recipe: Recipe) -> Tensor:
    """Return bf16 [P, H] from quantized rows [P, I]."""
    gemm, _, combine = recipe.layer
    expert = local_experts(batch.ids, experts)
    rows = grouped(mid.codes, mid.scales, experts.w2, experts.w2_scale, expert, gemm)
    weights = None if batch.weights is None else batch.weights.flatten()
    rows = combining.weighted(rows, weights, combine)
    return _owned(_biased(rows, experts.bias2, expert, gemm), expert)


def combine(rows: Tensor, batch: Routed, experts: Experts, recipe: Recipe, asked: Asked) -> Tensor:
    """Return [M, H] from FC2's bf16 rows [P, H]."""
    tokens, k = batch.ids.shape
    owned = (local_experts(batch.ids, experts) >= 0).view(tokens, k)
    shaped = rows.view(tokens, k, rows.shape[1])
    return combining.combine(shaped, batch.weights, owned, recipe.layer[2], asked.dtype)


def layer(batch: Routed, experts: Experts, recipe: Recipe, asked: Asked) -> Trace:
    """Run every stage of a recipe, each on the one before."""
    act = quant.act_quant(batch.x, recipe.of(Stage.ACT_QUANT), ue8m0=asked.ue8m0)
    first = fc1(act, batch, experts, recipe)
    mid = swiglu_quant(first, batch, experts, recipe, asked)
    second = fc2(mid, batch, experts, recipe)
    out = combine(second, batch, experts, recipe, asked)
    return Trace(act=act, fc1=first, mid=mid, fc2=second, out=out)


def _owned(rows: Tensor, expert: Tensor) -> Tensor:
    return torch.where((expert >= 0)[:, None], rows, torch.zeros_like(rows))


def layer_float64(
    batch: Routed, experts: Experts, asked: Asked, *, through_bf16: bool = False
) -> Tensor:
    """Return float64 [M, H] with the dequantized weights and nothing else quantized.

    The yardstick of a PR's "relative error"; ``through_bf16`` rounds FC1, SwiGLU and FC2 to BF16,
    as an unquantized BF16 layer does.
    """

    def step(value: Tensor) -> Tensor:
        return to_f32(f32_to_bf16(value.float())).double() if through_bf16 else value

    expert = local_experts(batch.ids, experts).view(batch.ids.shape)
    x = to_f32(batch.x).double()
    out = torch.zeros_like(x)
    for index in hit(expert):
        token, slot = (expert == index).nonzero(as_tuple=True)
        w13 = _dequantized(experts.w13[index], experts.w13_scale[index])
        w2 = _dequantized(experts.w2[index], experts.w2_scale[index])
        gate, up = step(x[token] @ w13.t()).chunk(2, dim=1)
        if asked.limit is not None:
            gate, up = gate.clamp(max=asked.limit), up.clamp(-asked.limit, asked.limit)
        y = step(gate * torch.sigmoid(asked.alpha * gate) * (up + asked.beta))
        rows = step(y @ w2.t())
        if batch.weights is not None:
            rows = rows * batch.weights[token, slot, None].double()
        out.index_add_(0, token, rows)
    return out


def _dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    wide = scales.double().repeat_interleave(128, 0)[: codes.shape[0]]
    return e4m3_decode(codes).double() * wide.repeat_interleave(128, 1)[:, : codes.shape[1]]
