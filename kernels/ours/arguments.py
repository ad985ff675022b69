"""What a call may be given: shapes, dtypes, devices and memory, refused in a sentence.

Only metadata is looked at, so that nothing here waits for the GPU; values are the business of
``moe_parity.kernels.ours.validate``.
"""

from __future__ import annotations

from enum import StrEnum
from numbers import Real
from typing import TypeVar

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.errors import ParityError
from moe_parity.references.stages.layer.operands import Experts

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
"""The types of the layer's output."""

Word = TypeVar("Word", bound=StrEnum)


def word(kind: type[Word], value: str, what: str) -> Word:
    """Return the member of an enumeration that a caller named; ``what`` says which argument."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(str(member)) for member in kind)
        raise ParityError(f"{what} must be one of {known}, got {value!r}.") from None


def number(value: object, what: str) -> float:
    """Return a number, NumPy's included, as a float."""
    if not isinstance(value, Real):
        raise ParityError(f"{what} must be a number, got {value!r}.")
    return float(value)


# --- memory -------------------------------------------------------------------------------------


def has_own_elements(tensor: Tensor) -> bool:
    """Whether no two elements of a tensor share memory, as far as its strides promise it."""
    extent = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step < extent:
            return tensor.numel() == 0
        extent += (size - 1) * step
    return True


def are_apart(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices share no memory: apart, or side by side in rows of the same pitch."""
    (start, width, pitch, stop), (start2, width2, pitch2, stop2) = _extent(one), _extent(other)
    if not one.numel() or not other.numel() or stop <= start2 or stop2 <= start:
        return True
    behind = (start2 - start) % max(pitch, 1)
    return pitch == pitch2 and width <= behind and behind + width2 <= pitch


def _extent(matrix: Tensor) -> tuple[int, int, int, int]:
    """Return start, bytes of a row, bytes from row to row, and end."""
    (rows, columns), (row, column), size = matrix.shape, matrix.stride(), matrix.element_size()
    width = ((columns - 1) * column + 1) * size
    return matrix.data_ptr(), width, row * size, matrix.data_ptr() + (rows - 1) * row * size + width


# --- the layer ----------------------------------------------------------------------------------


def check_rank(x: Tensor) -> None:
    """Raise ParityError unless ``x`` is a matrix."""
    if x.dim() != 2:
        raise ParityError(f"run_moe: x must be [M, H], got shape {list(x.shape)}.")


def check_experts(experts: Experts) -> None:
    """Raise ParityError unless shapes, dtypes and the device of all weights go together."""
    if experts.w13.dim() != 3 or experts.w2.dim() != 3:
        raise ParityError(
            f"experts: w13 must be [E, 2 I, H] and w2 [E, H, I], got {list(experts.w13.shape)} and "
            f"{list(experts.w2.shape)}."
        )
    count, double, hidden = experts.w13.shape
    width = double // 2
    if experts.first < 0:
        raise ParityError(f"experts: first must be a global expert id, got {experts.first}.")
    if hidden % BLOCK or width % BLOCK or double % 2:
        raise ParityError(
            f"experts: H = {hidden} and 2 I = {double} must be multiples of 128 and 256 (the "
            "scale's block)."
        )
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "w13": ((count, double, hidden), torch.uint8),
        "w13_scale": ((count, double // BLOCK, hidden // BLOCK), torch.float32),
        "w2": ((count, hidden, width), torch.uint8),
        "w2_scale": ((count, hidden // BLOCK, width // BLOCK), torch.float32),
    }
    if experts.bias13 is not None:
        wanted["bias13"] = ((count, double), torch.float32)
    if experts.bias2 is not None:
        wanted["bias2"] = ((count, hidden), torch.float32)
    for name, (shape, dtype) in wanted.items():
        _check(name, getattr(experts, name), shape, dtype, experts.w13.device)


def check_call(
    x: Tensor,
    x_scale: Tensor | None,
    ids: Tensor,
    weights: Tensor | None,
    experts: Experts,
    limit: float | Tensor | None,
    clamp: str,
    out: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    """Raise ParityError for the first argument of ``run_moe`` that does not fit the others."""
    check_experts(experts)
    check_rank(x)
    tokens, hidden = x.shape
    if x.device != experts.w13.device:
        raise ParityError(
            f"run_moe: x is on {x.device}, the experts on {experts.w13.device}; use one device."
        )
    if hidden != experts.w13.shape[2]:
        raise ParityError(f"run_moe: x has H = {hidden}, the experts {experts.w13.shape[2]}.")
    if ids.dim() != 2 or ids.shape[0] != tokens or ids.dtype not in (torch.int32, torch.int64):
        raise ParityError(
            f"run_moe: ids must be int32 or int64 [{tokens}, k], got {ids.dtype} {list(ids.shape)}."
        )
    _check("ids", ids, tuple(ids.shape), ids.dtype, x.device)
    if weights is not None:
        _check("weights", weights, tuple(ids.shape), torch.float32, x.device)
    if x_scale is not None:
        _check_quantized(x, x_scale)
    if clamp not in ("before", "after"):
        raise ParityError(f"run_moe: clamp must be 'before' or 'after' SiLU, got {clamp!r}.")
    if isinstance(limit, Tensor):
        _check("limit", limit, (experts.count,), torch.float32, x.device)
    elif limit is not None and not number(limit, "run_moe: limit") > 0:
        raise ParityError(f"run_moe: limit must be positive, got {limit}.")
    if out_dtype not in OUTPUTS:
        raise ParityError(f"run_moe: the output is bf16, fp16 or fp32, not {out_dtype}.")
    if out is not None:
        _check_output(out, x, out_dtype)


def _check_quantized(x: Tensor, x_scale: Tensor) -> None:
    shape = (x.shape[0], x.shape[1] // BLOCK)
    if x.dtype is not torch.uint8 or x_scale.shape != shape:
        raise ParityError(
            f"run_moe: quantized x must be uint8 with x_scale float32 {list(shape)}, got {x.dtype} "
            f"and {list(x_scale.shape)}."
        )
    if x.stride(1) != 1 or x_scale.dtype is not torch.float32:
        raise ParityError(
            f"run_moe: quantized x needs contiguous rows and float32 scales, got strides "
            f"{x.stride()} and {x_scale.dtype}."
        )
    _check_device("x_scale", x_scale, x.device)


def _check_output(out: Tensor, x: Tensor, dtype: torch.dtype) -> None:
    if out.shape != x.shape or out.dtype is not dtype or out.stride(1) != 1:
        raise ParityError(
            f"run_moe: out must be {dtype} {list(x.shape)} with contiguous rows, got {out.dtype} "
            f"{list(out.shape)} with strides {out.stride()}."
        )
    _check_device("out", out, x.device)
    if not has_own_elements(out):
        raise ParityError(
            f"run_moe: rows of out overlap, strides {out.stride()}; give each its own memory."
        )


def _check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    # the GEMM reads an expert's codes wherever the expert lies
    laid = tensor[:1] if name in ("w13", "w2") and tensor.dim() == 3 else tensor
    if tuple(tensor.shape) != shape or tensor.dtype is not dtype or not laid.is_contiguous():
        raise ParityError(
            f"run_moe: {name} must be contiguous {dtype} {list(shape)}, got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {tensor.stride()}."
        )
    _check_device(name, tensor, device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ParityError(
            f"run_moe: {name} is on {tensor.device}, the rest on {device}; use one device."
        )


def check_like(
    op: str, name: str, tensor: Tensor, rows: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Refuse a tensor of another dtype or shape, or on another device than the op's rows."""
    if tensor.dtype is not dtype or tuple(tensor.shape) != tuple(shape):
        raise ParityError(
            f"{op}: {name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}."
        )
    if tensor.device != rows.device:
        raise ParityError(
            f"{op}: {name} is on {tensor.device}, the rows on {rows.device}; use one device."
        )


def check_laid(
    op: str, name: str, tensor: Tensor, rows: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Refuse the same, and strides that are not those of contiguous memory."""
    check_like(op, name, tensor, rows, dtype, shape)
    if not tensor.is_contiguous():
        raise ParityError(f"{op}: {name} must be contiguous, strides {tensor.stride()}.")
