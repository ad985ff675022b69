"""Quantization to E4M3 as custom ops: ``act_quant``, ``weight_quant``, ``requantize_weight``.

FP8 tensors cross the op boundary as uint8, since torch's op checks have no E4M3.  Only metadata is
looked at, so a call never waits for the GPU and may be captured in a CUDA graph; values are checked
where a caller asks for it (``moe_parity.kernels.ours.validate``).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from moe_parity.kernels.ours import quant_kernels as kernels
from moe_parity.kernels.ours.arguments import are_apart, has_own_elements, word
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.arithmetic.formats import BLOCK, ScaleFormat, ScaleLayout
from moe_parity.references.errors import ParityError

GROUPS = (64, 128)
INPUTS = (torch.bfloat16, torch.float16, torch.float32)


def act_quant(
    x: Tensor,
    *,
    group: int = 128,
    scale: ScaleFormat | str = ScaleFormat.FP32,
    layout: ScaleLayout | str = ScaleLayout.ROW,
) -> tuple[Tensor, Tensor]:
    """Quantize activations ``x`` [M, K] in groups of 1 x ``group``.

    ``x`` is bf16, fp16 or fp32 with any strides; K is a multiple of the group, which is 64 or 128.
    Returns E4M3 codes as uint8 [M, K] and scales: fp32 [M, K / group] in the given layout, or for
    ``ue8m0packed`` int32 [M, ceil(K / group / 4)] in the TMA layout.  Recipe ``ours``.
    Raises ParityError, in a sentence, for anything else.
    """
    scale = word(ScaleFormat, scale, "act_quant: scale")
    layout = word(ScaleLayout, layout, "act_quant: layout")
    check_input("act_quant", x, group)
    rows, columns = x.shape
    shape, strides, dtype = scale.stored(rows, columns // group, layout)
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    scales = torch.empty_strided(shape, strides, dtype=dtype, device=x.device)
    act_quant_out(x, codes, scales, group, scale.is_power_of_two)
    return codes, scales


def weight_quant(w: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize one expert's weight ``w`` [N, K] in 128 x 128 tiles, edges ragged.

    ``w`` is bf16, fp16 or fp32 with any strides.  Returns codes uint8 [N, K] and fp32 scales
    [ceil(N / 128), ceil(K / 128)].  Recipe ``ours``.  Raises ParityError for anything else.
    """
    check_input("weight_quant", w, None)
    rows, columns = w.shape
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=w.device)
    shape = (-(-rows // BLOCK), -(-columns // BLOCK))
    scales = torch.empty(shape, dtype=torch.float32, device=w.device)
    weight_quant_out(w, codes, scales, power_of_two)
    return codes, scales


@torch.library.custom_op("moe_parity::requantize_weight", mutates_args=())
def requantize_weight(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Requantize E4M3 weights, codes uint8 [N, K] and fp32 tile scales, to powers of two.

    ``codes`` may have gaps between rows; the new ones have none.  Raises ParityError for anything
    else.
    """
    shape = _check_weight(codes, scales)
    new_codes, new_scales = _like_weight(codes, scales)
    rows, columns = codes.shape
    if codes.numel():
        dispatch(
            kernels.requantize_kernel, shape,
            codes, scales, new_codes, new_scales, rows, columns,
            codes.stride(0), scales.stride(0), new_codes.stride(0), new_scales.stride(0),
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return new_codes, new_scales


@torch.library.custom_op("moe_parity::act_quant_out", mutates_args=("codes", "scales"))
def act_quant_out(x: Tensor, codes: Tensor, scales: Tensor, group: int, power_of_two: bool) -> None:
    """Quantize into given outputs; int32 scales take packed exponents.  See :func:`act_quant`."""
    rows, groups, width = _check_act_quant(x, codes, scales, group)
    check_memory("act_quant", x, codes, scales)
    if rows == 0:
        return
    tile = min(32, 1 << (rows - 1).bit_length())
    grid = (-(-rows // tile), width)
    strides = (*x.stride(), codes.stride(0), *scales.stride())
    if scales.dtype is torch.int32:
        dispatch(
            kernels.act_quant_packed_kernel, grid, x, codes, scales, rows, groups, *strides,
            G=group, ROWS=tile, num_warps=4,
        )  # fmt: skip
    else:
        dispatch(
            kernels.act_quant_kernel, grid, x, codes, scales, rows, *strides,
            G=group, ROWS=tile, POWER_OF_TWO=power_of_two, num_warps=4,
        )  # fmt: skip


@torch.library.custom_op("moe_parity::weight_quant_out", mutates_args=("codes", "scales"))
def weight_quant_out(w: Tensor, codes: Tensor, scales: Tensor, power_of_two: bool) -> None:
    """Quantize a weight into given outputs.  See :func:`weight_quant`."""
    shape = _check_weight_quant(w, codes, scales)
    check_memory("weight_quant", w, codes, scales)
    if w.numel() == 0:
        return
    dispatch(
        kernels.weight_quant_kernel, shape, w, codes, scales, *w.shape,
        *w.stride(), codes.stride(0), *scales.stride(),
        BLOCK=BLOCK, POWER_OF_TWO=power_of_two, num_warps=8,
    )  # fmt: skip


# A call with a tensor on the meta device runs the fake: it must refuse what the real one refuses.
# torch wants the signature of the op, the arguments that no check reads included.


@act_quant_out.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, group: int, power_of_two: bool) -> None:  # noqa: ARG001
    _check_act_quant(x, codes, scales, group)


@weight_quant_out.register_fake
def _(w: Tensor, codes: Tensor, scales: Tensor, power_of_two: bool) -> None:  # noqa: ARG001
    _check_weight_quant(w, codes, scales)


@requantize_weight.register_fake
def _(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    _check_weight(codes, scales)
    return _like_weight(codes, scales)


def check_input(op: str, x: Tensor, group: int | None) -> None:
    """Raise ParityError where ``x`` cannot be quantized: dtype, rank, group, K."""
    if x.dtype not in INPUTS:
        raise ParityError(f"{op}: x must be bfloat16, float16 or float32, got {x.dtype}.")
    if x.dim() != 2:
        raise ParityError(f"{op}: x must be [rows, columns], got shape {list(x.shape)}.")
    if group is None:
        return
    if type(group) is not int or group not in GROUPS:
        raise ParityError(f"{op}: group must be 64 or 128, got {group}.")
    if x.shape[1] % group or not x.shape[1]:
        raise ParityError(f"{op}: K = {x.shape[1]} is not a positive multiple of group {group}.")


def _check_act_quant(x: Tensor, codes: Tensor, scales: Tensor, group: int) -> tuple[int, int, int]:
    """Return rows, groups of a row, and words or scales of a row."""
    check_input("act_quant", x, group)
    rows, columns = x.shape
    groups = columns // group
    packed = scales.dtype is torch.int32
    width = -(-groups // 4) if packed else groups
    check_output("act_quant", x, "codes", codes, (rows, columns), torch.uint8)
    wanted = torch.int32 if packed else torch.float32
    check_output("act_quant", x, "scales", scales, (rows, width), wanted)
    return rows, groups, width


def _check_weight_quant(w: Tensor, codes: Tensor, scales: Tensor) -> tuple[int, int]:
    """Return the number of tiles down and across."""
    check_input("weight_quant", w, None)
    rows, columns = w.shape
    shape = (-(-rows // BLOCK), -(-columns // BLOCK))
    check_output("weight_quant", w, "codes", codes, (rows, columns), torch.uint8)
    check_output("weight_quant", w, "scales", scales, shape, torch.float32)
    return shape


def check_output(
    op: str, x: Tensor, name: str, out: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Raise ParityError unless an output fits; rows of scales alone need not be contiguous."""
    if out.dtype is not dtype or tuple(out.shape) != shape:
        raise ParityError(
            f"{op}: {name} must be {dtype} {list(shape)}, got {out.dtype} {list(out.shape)}."
        )
    if out.device != x.device:
        raise ParityError(f"{op}: {name} is on {out.device}, x on {x.device}; use one device.")
    if name != "scales" and out.shape[1] > 1 and out.stride(1) != 1:
        raise ParityError(f"{op}: rows of {name} must be contiguous, strides {out.stride()}.")


def check_memory(op: str, x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Raise ParityError where an output lies in another tensor's memory, or in its own.

    Programs read and write in any order.
    """
    for name, out in (("codes", codes), ("scales", scales)):
        if not has_own_elements(out):
            raise ParityError(
                f"{op}: elements of {name} overlap, strides {out.stride()}; give each its own "
                "memory."
            )
    tensors = {"x": x, "codes": codes, "scales": scales}
    for (one, first), (other, second) in itertools.combinations(tensors.items(), 2):
        if not are_apart(first, second):
            raise ParityError(
                f"{op}: {one} and {other} share memory; give {other} memory of its own."
            )


def _check_weight(codes: Tensor, scales: Tensor) -> tuple[int, int]:
    """Return the number of tiles down and across."""
    if codes.dtype is not torch.uint8 or codes.dim() != 2 or codes.stride(1) != 1:
        raise ParityError(
            f"requantize_weight: codes must be uint8 with contiguous rows, got {codes.dtype} "
            f"{list(codes.shape)} with strides {codes.stride()}; view FP8 weights as uint8."
        )
    rows, columns = codes.shape
    shape = (-(-rows // BLOCK), -(-columns // BLOCK))
    if (
        scales.dtype is not torch.float32
        or tuple(scales.shape) != shape
        or not scales.is_contiguous()
    ):
        raise ParityError(
            f"requantize_weight: scales must be contiguous float32 {list(shape)}, got "
            f"{scales.dtype} {list(scales.shape)} with strides {scales.stride()}."
        )
    if scales.device != codes.device:
        raise ParityError(
            f"requantize_weight: scales are on {scales.device}, codes on {codes.device}; use one "
            "device."
        )
    return shape


def _like_weight(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return codes.new_empty(codes.shape), scales.new_empty(scales.shape)
