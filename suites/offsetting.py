"""Kernels that count offsets in 32 bits, in plain torch and in Triton, and the same in 64."""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_parity.kernels import Call, Kernel
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.recipes import recipe_named
from moe_parity.suites.planted import kernel_of


def short(tensor: Tensor, rows: list[int], unit: int = 1) -> Tensor:
    """Return some rows, each read at an int32 number of elements, or of bytes: ``unit`` is 2."""
    far = torch.tensor(rows) * tensor.stride(0) * unit
    shape, strides, start = tensor.shape[1:], tensor.stride()[1:], tensor.storage_offset()
    places = [start + place // unit for place in far.to(torch.int32).tolist()]
    return torch.stack([tensor.as_strided(shape, strides, place) for place in places])


@triton.jit
def quantize(x_ptr, codes_ptr, scales_ptr, x_row, columns, groups, WIDE: tl.constexpr):
    """Quantize one group of one row, deepgemm's recipe; grid (rows, groups)."""
    row, group = tl.program_id(0), tl.program_id(1)
    lane = group * 128 + tl.arange(0, 128)
    start = row.to(tl.int64) * x_row if WIDE else row * x_row
    x = tl.load(x_ptr + start + lane).to(tl.float32)
    scale = tl.math.div_rn(tl.maximum(tl.max(tl.abs(x), 0), 1e-4), 448.0)
    code = (x * tl.math.div_rn(1.0, scale)).to(tl.float8e4nv)
    tl.store(codes_ptr + row * columns + lane, code.to(tl.uint8, bitcast=True))
    tl.store(scales_ptr + row * groups + group, scale)


@triton.jit
def weigh(
    rows_ptr, weights_ptr, out_ptr, rows_row, columns, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):
    """Give the one row of a token times its weight; grid (tokens,)."""
    token, column = tl.program_id(0), tl.arange(0, COLUMNS)
    start = token.to(tl.int64) * rows_row if WIDE else token * rows_row
    row = tl.load(rows_ptr + start + column).to(tl.float32)
    weight = tl.load(weights_ptr + token)
    tl.store(out_ptr + token * columns + column, (weight * row).to(tl.bfloat16))


def quantizer(*, wide: bool) -> Kernel:
    """Return a quantizer in Triton."""

    def run(call: Call) -> Any:
        x, codes, scales = call.inputs.x, call.new("codes"), call.new("scales")
        grid = (x.shape[0], x.shape[1] // 128)
        dispatch(
            quantize, grid, x, codes.view(torch.uint8), scales, x.stride(0), x.shape[1], grid[1],
            WIDE=wide,
        )  # fmt: skip
        return codes, scales

    made = kernel_of("act_quant", run, recipe_named("deepgemm"))
    return dataclasses.replace(made, triton=True)


def weighing(*, wide: bool) -> Kernel:
    """Return a top-k sum of one row in Triton."""

    def run(call: Call) -> Any:
        rows, out = call.inputs.rows, call.new("out")
        dispatch(
            weigh, (out.shape[0],), rows, call.inputs.weights, out, rows.stride(0), out.shape[1],
            COLUMNS=out.shape[1], WIDE=wide,
        )  # fmt: skip
        return out

    return dataclasses.replace(kernel_of("combine", run), triton=True)
