"""The layer as an op: ``moe`` returns its output, ``moe_out`` writes into the caller's."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.kernels.ours import moe as layer
from moe_parity.kernels.ours.arguments import check_call
from moe_parity.kernels.ours.ops import checks
from moe_parity.references.errors import ParityError
from moe_parity.references.stages.layer.operands import Experts


@torch.library.custom_op("moe_parity::moe", mutates_args=())
def moe(
    x: Tensor, ids: Tensor, weights: Tensor | None,
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    bias13: Tensor | None, bias2: Tensor | None, first: int, x_scale: Tensor | None,
    limit: float | None, limits: Tensor | None, clamp: str, alpha: float, beta: float,
    power_of_two: bool, mid_power_of_two: bool | None, path: str | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the layer's output [M, H].  ``limits`` stands for a ``limit`` that is a tensor.

    See ``moe_parity.kernels.ours.moe.run_moe``.
    """
    experts = _experts(w13, w13_scale, w2, w2_scale, bias13, bias2, first)
    return layer.run_moe(
        x, ids, weights, experts, x_scale=x_scale, limit=_limit(limit, limits), clamp=clamp,
        alpha=alpha, beta=beta, power_of_two=power_of_two, mid_power_of_two=mid_power_of_two,
        out_dtype=out_dtype, path=path,
    )  # fmt: skip


@torch.library.custom_op("moe_parity::moe_out", mutates_args=("out",))
def moe_out(
    x: Tensor, ids: Tensor, weights: Tensor | None,
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    bias13: Tensor | None, bias2: Tensor | None, first: int, x_scale: Tensor | None,
    limit: float | None, limits: Tensor | None, clamp: str, alpha: float, beta: float,
    power_of_two: bool, mid_power_of_two: bool | None, path: str | None, out: Tensor,
) -> None:  # fmt: skip
    """Write the layer's output into ``out``; its dtype is that of the output.

    ``out`` shares no memory with anything that the layer reads.
    """
    experts = _experts(w13, w13_scale, w2, w2_scale, bias13, bias2, first)
    _check(x, ids, weights, experts, x_scale, limit, limits, clamp, alpha, beta, path, out)
    inputs = {
        "x": x, "x_scale": x_scale, "ids": ids, "weights": weights, "w13": w13,
        "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale, "bias13": bias13, "bias2": bias2,
        "limits": limits,
    }  # fmt: skip
    checks.demand_apart("moe", {"out": out}, inputs)
    layer.run_moe(
        x, ids, weights, experts, x_scale=x_scale, limit=_limit(limit, limits), clamp=clamp,
        alpha=alpha, beta=beta, power_of_two=power_of_two, mid_power_of_two=mid_power_of_two,
        out=out, out_dtype=out.dtype, path=path,
    )  # fmt: skip


def _experts(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    bias13: Tensor | None, bias2: Tensor | None, first: int,
) -> Experts:  # fmt: skip
    return Experts(
        w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale, first=first, bias13=bias13,
        bias2=bias2,
    )  # fmt: skip


def _limit(limit: float | None, limits: Tensor | None) -> float | Tensor | None:
    if limit is not None and limits is not None:
        raise ParityError("moe: give limit or limits, not both.")
    return limit if limits is None else limits


def _check(
    x: Tensor, ids: Tensor, weights: Tensor | None, experts: Experts, x_scale: Tensor | None,
    limit: float | None, limits: Tensor | None, clamp: str, alpha: float, beta: float,
    path: str | None, out: Tensor | torch.dtype,
) -> None:  # fmt: skip
    """Refuse what ``run_moe`` refuses."""
    given = out if isinstance(out, Tensor) else None
    dtype = out.dtype if isinstance(out, Tensor) else out
    # No number of tokens is refused, and to look at it would compile the graph again at 33.
    none = x[:0] if x.dim() == 2 else x
    layer.plan(
        none, experts, x_scale=x_scale, limit=_limit(limit, limits), alpha=alpha, beta=beta,
        out=given, path=path,
    )  # fmt: skip
    check_call(x, x_scale, ids, weights, experts, _limit(limit, limits), clamp, given, dtype)


@moe.register_fake
def _(
    x: Tensor, ids: Tensor, weights: Tensor | None,
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    bias13: Tensor | None, bias2: Tensor | None, first: int, x_scale: Tensor | None,
    limit: float | None, limits: Tensor | None, clamp: str, alpha: float, beta: float,
    power_of_two: bool, mid_power_of_two: bool | None,  # noqa: ARG001
    path: str | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    experts = _experts(w13, w13_scale, w2, w2_scale, bias13, bias2, first)
    _check(x, ids, weights, experts, x_scale, limit, limits, clamp, alpha, beta, path, out_dtype)
    return torch.empty(x.shape, dtype=out_dtype, device=x.device)


@moe_out.register_fake
def _(
    x: Tensor, ids: Tensor, weights: Tensor | None,
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    bias13: Tensor | None, bias2: Tensor | None, first: int, x_scale: Tensor | None,
    limit: float | None, limits: Tensor | None, clamp: str, alpha: float, beta: float,
    power_of_two: bool, mid_power_of_two: bool | None,  # noqa: ARG001
    path: str | None, out: Tensor,
) -> None:  # fmt: skip
    experts = _experts(w13, w13_scale, w2, w2_scale, bias13, bias2, first)
    _check(x, ids, weights, experts, x_scale, limit, limits, clamp, alpha, beta, path, out)
