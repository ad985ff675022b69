"""A dense block-FP8 linear: quantization and one GEMM, the layer's own kernels without routing.

The bits of a row depend on nothing but the row, whatever the batch: recipe ``ours``.  Only metadata
is looked at, so a call never waits for the GPU and may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.kernels.ours import layer_kernels, quant
from moe_parity.kernels.ours.arguments import are_apart
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.errors import ParityError

FEW_ROWS = 32
"""Rows up to which a program takes 16 of them; past it, 64."""


def linear(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    *,
    power_of_two: bool = False,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return bf16 [M, N]: ``x`` [M, K] times the transpose of ``w``, plus ``bias`` if any.

    ``w`` is E4M3 codes, uint8 [N, K] with contiguous rows, ``w_scale`` fp32 [ceil(N / 128),
    K / 128] of any strides; M and N are any, K is a multiple of 128.  ``x`` is bf16, fp16 or fp32
    and is quantized in groups of 128, with ``power_of_two`` to such scales; or it is codes, uint8,
    with their scales ``x_scale``, fp32 [M, K / 128], which are taken as they are.  ``bias`` is fp32
    [N], added before the rounding to BF16.  ``out`` is contiguous memory of the caller's.  Raises
    ParityError, in a sentence, for anything else.
    """
    if x_scale is None:
        if x.dtype is torch.uint8:
            raise ParityError("linear: x is codes (uint8) without x_scale; give fp32 [M, K / 128].")
        check_weight(w, w_scale)
        _check_x(x, w)
        codes, scales = quant.act_quant(x, scale="ue8m0" if power_of_two else "fp32")
    else:
        codes, scales = x, x_scale
    if out is None:
        check_operands(codes, scales, w, w_scale, bias)
        out = torch.empty((x.shape[0], w.shape[0]), dtype=torch.bfloat16, device=x.device)
    linear_out(codes, scales, w, w_scale, bias, out)
    return out


@torch.library.custom_op("moe_parity::linear_out", mutates_args=("out",))
def linear_out(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Multiply quantized operands into a given output.  See :func:`linear`."""
    check_operands(a, a_scale, w, w_scale, bias)
    _check_out(a, w, out)
    _check_memory(a, a_scale, w, w_scale, bias, out)
    (rows, k), n = a.shape, w.shape[0]
    if not rows or not n:
        return
    block = 16 if rows <= FEW_ROWS else 64
    tile = 64 if block == 16 else 128
    dispatch(
        layer_kernels.gemm_kernel, (-(-rows // block), -(-n // tile)),
        w, w_scale, a, a_scale, w_scale if bias is None else bias, out, a, a, rows,
        a.stride(0), *a_scale.stride(), 0, w.stride(0), 0, *w_scale.stride(),
        N=n, K=k, SHARED=1, HAS_BIAS=bias is not None,
        BLOCK_N=tile, BLOCK=block, DENSE=True, num_warps=4, num_stages=4 if tile == 64 else 3,
    )  # fmt: skip


# A call with a tensor on the meta device runs the fake: it must refuse what the real one refuses.


@linear_out.register_fake
def _(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    check_operands(a, a_scale, w, w_scale, bias)
    _check_out(a, w, out)


# --- what is refused ----------------------------------------------------------------------------


def check_weight(w: Tensor, w_scale: Tensor) -> None:
    """Raise ParityError unless a weight and its scales go together."""
    if w.dtype is not torch.uint8 or w.dim() != 2 or (w.shape[1] > 1 and w.stride(1) != 1):
        raise ParityError(
            f"linear: w must be uint8 [N, K] with contiguous rows, got {w.dtype} {list(w.shape)} "
            f"with strides {w.stride()}; view FP8 weights as uint8."
        )
    n, k = w.shape
    if k % BLOCK or not k:
        raise ParityError(f"linear: K = {k} is not a positive multiple of 128, the scale's block.")
    _check_scales("w_scale", w_scale, (-(-n // BLOCK), k // BLOCK), w)


def check_operands(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None
) -> None:
    """Raise ParityError for the first of the quantized operands that does not fit the others."""
    check_weight(w, w_scale)
    _check_x(a, w)
    if a.dtype is not torch.uint8 or a.stride(1) != 1:
        raise ParityError(
            f"linear: quantized x must be uint8 with contiguous rows, got {a.dtype} with strides "
            f"{a.stride()}; leave x_scale out for x that is not quantized."
        )
    _check_scales("x_scale", a_scale, (a.shape[0], a.shape[1] // BLOCK), w)
    if bias is None:
        return
    if bias.dtype is not torch.float32 or bias.shape != w.shape[:1] or not bias.is_contiguous():
        raise ParityError(
            f"linear: bias must be contiguous float32 [{w.shape[0]}], got {bias.dtype} "
            f"{list(bias.shape)} with strides {bias.stride()}."
        )
    _check_device("bias", bias, w)


def _check_x(x: Tensor, w: Tensor) -> None:
    if x.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ParityError(
            f"linear: x must be [M, {w.shape[1]}] as w is {list(w.shape)}, got {list(x.shape)}."
        )
    _check_device("x", x, w)


def _check_scales(name: str, scales: Tensor, shape: tuple[int, int], w: Tensor) -> None:
    if scales.dtype is not torch.float32 or tuple(scales.shape) != shape:
        raise ParityError(
            f"linear: {name} must be float32 {list(shape)}, got {scales.dtype} "
            f"{list(scales.shape)}."
        )
    _check_device(name, scales, w)


def _check_out(a: Tensor, w: Tensor, out: Tensor) -> None:
    shape = (a.shape[0], w.shape[0])
    if out.dtype is not torch.bfloat16 or tuple(out.shape) != shape or not out.is_contiguous():
        raise ParityError(
            f"linear: out must be contiguous bfloat16 {list(shape)}, got {out.dtype} "
            f"{list(out.shape)} with strides {out.stride()}."
        )
    _check_device("out", out, w)


def _check_device(name: str, tensor: Tensor, w: Tensor) -> None:
    if tensor.device != w.device:
        raise ParityError(f"linear: {name} is on {tensor.device}, w on {w.device}; use one device.")


def _check_memory(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Programs read and write in any order, so the output may lie in no operand's memory."""
    operands = {"x": a, "x_scale": a_scale, "w": w, "w_scale": w_scale}
    operands |= {} if bias is None else {"bias": bias[None]}
    for name, operand in operands.items():
        if not are_apart(operand, out):
            raise ParityError(f"linear: out and {name} share memory; give out memory of its own.")
