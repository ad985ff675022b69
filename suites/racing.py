"""Triton kernels of several stages, right or with a fault of memory planted by its name."""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from moe_parity.kernels import Call, Kernel
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.recipes import recipe_named
from moe_parity.suites.planted import following, kernel_of


@triton.jit
def quantize(
    x_ptr, codes_ptr, scales_ptr, columns, groups, ROWS: tl.constexpr, FAULT: tl.constexpr
):
    """Quantize ROWS rows of one group, deepgemm's recipe; grid (rows / ROWS, groups)."""
    step = ROWS - 1 if FAULT == "rows overlap" else ROWS
    row = tl.program_id(0) * step + tl.arange(0, ROWS)
    group = tl.program_id(1)
    at = row[:, None] * columns + group * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(x), 1), 1e-4)
    if FAULT == "rows overlap":
        amax = tl.zeros_like(amax) + tl.max(amax, 0)
    scale = tl.math.div_rn(amax, 448.0)
    code = (x * tl.math.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv)
    tl.store(codes_ptr + at, code.to(tl.uint8, bitcast=True))
    if FAULT == "one scale":
        tl.store(scales_ptr + row // ROWS * ROWS * groups + group, scale)
    elif FAULT == "past the end":
        tl.store(scales_ptr + (row + 1) * groups + group, scale)
    else:
        tl.store(scales_ptr + row * groups + group, scale)


@triton.jit
def add_pairs(rows_ptr, out_ptr, pairs, columns, COLUMNS: tl.constexpr):
    """Add each pair's row to its token's, by load and store; grid (pairs,)."""
    column = tl.arange(0, COLUMNS)
    pair = tl.program_id(0)
    place = out_ptr + pair // pairs * columns + column
    row = tl.load(rows_ptr + pair * columns + column).to(tl.float32)
    tl.store(place, (tl.load(place).to(tl.float32) + row).to(tl.bfloat16))


@triton.jit
def count_pairs(ids_ptr, counts_ptr):
    """Count the pairs of each expert; grid (pairs,)."""
    tl.atomic_add(counts_ptr + tl.load(ids_ptr + tl.program_id(0)), 1)


@triton.jit
def halves(x_ptr, half_ptr, out_ptr, columns, COLUMNS: tl.constexpr, HANDED: tl.constexpr):
    """Copy gate rows to memory of the kernel's own, or take them from there; grid (rows,)."""
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    mine = half_ptr + row * columns + column
    if HANDED:
        tl.store(out_ptr + row * columns + column, tl.load(mine))
    else:
        # the last column is forgotten
        tl.store(mine, tl.load(x_ptr + row * 2 * columns + column), mask=column < columns - 1)


@triton.jit
def ranks(count_ptr, o_ptr):
    """Each lane of each program stores the number at which it came."""
    lane = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(o_ptr + lane, tl.atomic_add(count_ptr + 0 * lane, 1))


def quantizer(fault: str = "") -> Kernel:
    """Return a quantizer of two rows a program."""

    def run(call: Call) -> Any:
        x, rows = call.inputs.x, 2
        codes, scales = call.new("codes"), call.new("scales")
        grid = (x.shape[0] // rows, x.shape[1] // 128)
        dispatch(
            quantize, grid, x, codes.view(torch.uint8), scales, x.shape[1], grid[1], ROWS=rows,
            FAULT=fault,
        )  # fmt: skip
        return codes, scales

    return _on_virtual_gpu("act_quant", run)


def accumulator() -> Kernel:
    """Return a combine whose programs, one for each pair, add without an atomic."""

    def run(call: Call) -> Any:
        rows, out = call.inputs.rows, call.new("out")
        out.zero_()
        columns = rows.shape[-1]
        dispatch(
            add_pairs, (out.shape[0] * call.case.k,), rows, out, call.case.k, columns,
            COLUMNS=triton.next_power_of_2(columns),
        )  # fmt: skip
        return out

    return _on_virtual_gpu("combine", run)


def counter(*, zeroed: bool) -> Kernel:
    """Return an align that counts by atomics, in memory that it zeroed before or not."""

    def run(call: Call) -> Any:
        counts = call.new("counts", (call.case.e,), dtype=torch.int32)
        if zeroed:
            counts.zero_()
        ids = call.inputs.ids.reshape(-1)
        dispatch(count_pairs, (ids.numel(),), ids, counts)
        assert counts.sum() == ids.numel()
        return following()(call)

    return _on_virtual_gpu("align", run)


def handed_over() -> Kernel:
    """Return a swiglu of two launches, the first of which forgets a column for the second."""

    def run(call: Call) -> Any:
        x, out = call.inputs.rows, call.new("rows")
        rows, columns = out.shape
        half = call.new("half", (rows, columns), dtype=x.dtype)
        for handed in (False, True):
            dispatch(halves, (rows,), x, half, out, columns, COLUMNS=columns, HANDED=handed)
        return out

    return _on_virtual_gpu("swiglu", run)


def _on_virtual_gpu(stage: str, run: Any) -> Kernel:
    recipe = recipe_named("deepgemm") if stage == "act_quant" else None
    return dataclasses.replace(kernel_of(stage, run, recipe), triton=True)
