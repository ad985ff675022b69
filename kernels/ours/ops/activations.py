"""The gated activation as ops: SwiGLU alone, and with the quantization of its result."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.kernels.ours import activation
from moe_parity.kernels.ours.activation import Activation
from moe_parity.kernels.ours.arguments import word
from moe_parity.kernels.ours.ops import checks
from moe_parity.kernels.ours.quant import GROUPS
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout
from moe_parity.references.errors import ParityError

CLAMPS = ("none", "before", "after")


@torch.library.custom_op("moe_parity::swiglu", mutates_args=())
def swiglu(
    rows: Tensor, ids: Tensor | None, first: int, experts: int,
    clamp: str, limit: float, limits: Tensor | None, alpha: float, beta: float,
    form: str = "ours",
) -> Tensor:  # fmt: skip
    """Return bf16 [P, I] of bf16 rows [P, 2 * I], the gate's columns first, contiguous.

    ``ids`` hold P global expert ids: rows of experts other than first .. first + experts are not
    written; None makes every row live.  ``clamp`` is "none", "before" or "after" SiLU, by ``limit``
    or by ``limits``, fp32 [experts].  ``form`` "torch" has the bits of ``silu(gate) * up`` in
    torch's own ops on a GPU.  See ``activation.swiglu``.
    """
    _check("swiglu", rows, ids, first, experts, clamp, limit, limits)
    how = _how(clamp, limit, limits, alpha, beta, form)
    return activation.swiglu(rows, ids, first, experts, how)


@torch.library.custom_op("moe_parity::swiglu_quant", mutates_args=())
def swiglu_quant(
    rows: Tensor, ids: Tensor | None, first: int, experts: int,
    clamp: str, limit: float, limits: Tensor | None, alpha: float, beta: float,
    group: int, scale: str, layout: str, form: str = "ours",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return codes uint8 [P, I] and scales: ``act_quant`` of what ``swiglu`` returns, same bits."""
    _stored(rows, ids, first, experts, clamp, limit, limits, group, scale, layout)
    how = _how(clamp, limit, limits, alpha, beta, form)
    return activation.swiglu_quant(
        rows, ids, first, experts, how, group=group, scale=ScaleFormat(scale),
        layout=ScaleLayout(layout),
    )  # fmt: skip


@torch.library.custom_op("moe_parity::swiglu_quant_out", mutates_args=("codes", "scales"))
def swiglu_quant_out(
    rows: Tensor, ids: Tensor | None, first: int, experts: int,
    clamp: str, limit: float, limits: Tensor | None, alpha: float, beta: float,
    group: int, scale: str, layout: str, codes: Tensor, scales: Tensor, form: str = "ours",
) -> None:  # fmt: skip
    """Write into ``codes``, row-major, and ``scales``, which lie as ``layout`` says."""
    _check_out(
        rows, ids, first, experts, clamp, limit, limits, group, scale, layout, codes, scales
    )  # fmt: skip
    outs = {"codes": codes, "scales": scales}
    checks.demand_apart("swiglu_quant", outs, {"rows": rows, "ids": ids, "limits": limits})
    how = _how(clamp, limit, limits, alpha, beta, form)
    activation.swiglu_quant(
        rows, ids, first, experts, how, group=group, scale=ScaleFormat(scale),
        layout=ScaleLayout(layout), codes=codes, scales=scales,
    )  # fmt: skip


def _how(
    clamp: str, limit: float, limits: Tensor | None, alpha: float, beta: float, form: str
) -> Activation:  # fmt: skip
    """Return what is asked; raise ParityError for what a form has not, as the fakes do too."""
    return Activation(
        clamp=clamp, limit=limit, limits=limits, alpha=alpha, beta=beta, form=form
    )  # fmt: skip


def _check(
    op: str, rows: Tensor, ids: Tensor | None, first: int, experts: int,
    clamp: str, limit: float, limits: Tensor | None,
) -> tuple[int, int]:  # fmt: skip
    """Return P and I."""
    checks.demand_rank(op, "rows", rows, "[P, 2 * I]")
    pairs, double = rows.shape
    checks.demand(op, "rows", rows, (pairs, double), torch.bfloat16)
    if double % 2 or not double:
        raise ParityError(f"{op}: rows must have 2 * I columns, gate and up, got {double}.")
    checks.demand_row_major(op, rows=rows, ids=ids, limits=limits)
    if ids is not None and ids.numel() != pairs:
        raise ParityError(f"{op}: ids must name {pairs} experts, a row each, got {ids.numel()}.")
    if ids is not None:
        checks.demand(op, "ids", ids, ids.shape, *checks.IDS)
    if first < 0 or experts < 1:
        raise ParityError(
            f"{op}: first must be a global expert id and experts positive, got {first} and "
            f"{experts}."
        )
    if clamp not in CLAMPS:
        raise ParityError(f"{op}: clamp must be 'none', 'before' or 'after' SiLU, got {clamp!r}.")
    if limits is not None:
        if ids is None or clamp == "none":
            raise ParityError(f"{op}: limits of experts need ids and a clamp.")
        checks.demand(op, "limits", limits, (experts,), torch.float32)
    elif clamp != "none" and not limit > 0:
        raise ParityError(f"{op}: limit must be positive, got {limit}.")
    checks.demand_device(op, "rows", rows.device, ids=ids, limits=limits)
    return pairs, double // 2


def _stored(
    rows: Tensor, ids: Tensor | None, first: int, experts: int,
    clamp: str, limit: float, limits: Tensor | None, group: int, scale: str, layout: str,
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], torch.dtype]:  # fmt: skip
    """Return the shape of codes, and shape, strides and dtype of scales."""
    op = "swiglu_quant"
    pairs, width = _check(op, rows, ids, first, experts, clamp, limit, limits)
    form, lies = (
        word(ScaleFormat, scale, f"{op}: scale"),
        word(ScaleLayout, layout, f"{op}: layout"),
    )
    if group not in GROUPS:
        raise ParityError(f"{op}: group must be 64 or 128, got {group}.")
    if width % group:
        raise ParityError(f"{op}: I = {width} is not a multiple of group {group}.")
    return ((pairs, width), *form.stored(pairs, width // group, lies))


def _check_out(
    rows: Tensor, ids: Tensor | None, first: int, experts: int,
    clamp: str, limit: float, limits: Tensor | None, group: int, scale: str, layout: str,
    codes: Tensor, scales: Tensor,
) -> None:  # fmt: skip
    op = "swiglu_quant"
    whole, shape, strides, dtype = _stored(
        rows, ids, first, experts, clamp, limit, limits, group, scale, layout
    )  # fmt: skip
    checks.demand(op, "codes", codes, whole, torch.uint8)
    checks.demand(op, "scales", scales, shape, dtype)
    checks.demand_row_major(op, codes=codes)
    met = zip(scales.stride(), strides, shape, strict=True)
    if any(size > 1 and got != wanted for got, wanted, size in met):
        raise ParityError(
            f"{op}: scales in layout {layout!r} have strides {strides}, got {scales.stride()}."
        )
    checks.demand_device(op, "rows", rows.device, codes=codes, scales=scales)


@swiglu.register_fake
def _(
    rows: Tensor, ids: Tensor | None, first: int, experts: int,
    clamp: str, limit: float, limits: Tensor | None, alpha: float, beta: float,
    form: str = "ours",
) -> Tensor:  # fmt: skip
    pairs, width = _check("swiglu", rows, ids, first, experts, clamp, limit, limits)
    _how(clamp, limit, limits, alpha, beta, form)
    return torch.empty((pairs, width), dtype=torch.bfloat16, device=rows.device)


@swiglu_quant.register_fake
def _(
    rows: Tensor, ids: Tensor | None, first: int, experts: int,
    clamp: str, limit: float, limits: Tensor | None, alpha: float, beta: float,
    group: int, scale: str, layout: str, form: str = "ours",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    whole, shape, strides, dtype = _stored(
        rows, ids, first, experts, clamp, limit, limits, group, scale, layout
    )  # fmt: skip
    _how(clamp, limit, limits, alpha, beta, form)
    codes = torch.empty(whole, dtype=torch.uint8, device=rows.device)
    return codes, torch.empty_strided(shape, strides, dtype=dtype, device=rows.device)


@swiglu_quant_out.register_fake
def _(
    rows: Tensor, ids: Tensor | None, first: int, experts: int,
    clamp: str, limit: float, limits: Tensor | None, alpha: float, beta: float,
    group: int, scale: str, layout: str, codes: Tensor, scales: Tensor, form: str = "ours",
) -> None:  # fmt: skip
    _check_out(
        rows, ids, first, experts, clamp, limit, limits, group, scale, layout, codes, scales
    )  # fmt: skip
    _how(clamp, limit, limits, alpha, beta, form)
