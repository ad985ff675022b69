"""The GPU form of the GEMM reference on a CPU, in Triton's own interpreter, beside the plain loop.

The virtual GPU has no float64, in which that kernel adds; a GPU runs it in ``test_layer_gpu.py``.
The interpreter rounds a ``tl.fma`` twice, so what is compared is ``mul_add``.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import E4M3, bits_of
from moe_parity.references.language import Case, Values, neighbours
from moe_parity.references.stages import FC1
from moe_parity.references.stages.gemm import reference
from moe_parity.references.stages.gemm.decisions import Accumulate, DotUnit, GemmRecipe, ScaleOrder
from moe_parity.suites.interpreted import needs_interpreter

BASE = GemmRecipe(accumulate=Accumulate.MUL_ADD)
WIDE, DEEP, SMALL = (24, 130, 40, 2), (5, 9, 136, 1), (5, 9, 40, 1)
"""Rows, columns, depth, experts: many blocks of rows and of columns, two of scales, all ragged."""
DEPTHS = {"gemm.interval": DEEP, "gemm.split_k": (5, 9, 256, 1)}


def recipes() -> Iterator[tuple[GemmRecipe, tuple[int, int, int, int]]]:
    for decision, _, changed in neighbours(BASE):
        if decision.name not in ("gemm.accumulate", "gemm.bias_at"):
            yield changed, DEPTHS.get(decision.name, SMALL)
    yield BASE, WIDE


def compare() -> int:
    """Return how many outputs were compared, with and without NaN among the codes."""
    compared = 0
    for number, (recipe, (rows, columns, depth, experts)) in enumerate(recipes()):
        if recipe.unit is DotUnit.EXACT:
            continue
        from moe_parity.references.stages.gemm import chain_triton

        a = random_bits.integers(number, "a", rows, depth, below=256).to(torch.uint8)
        w = random_bits.integers(number, "w", experts * columns, depth, below=256).to(torch.uint8)
        a, w = (torch.where(E4M3.is_nan(x), 0x2A, x).to(torch.uint8) for x in (a, w))
        w = w.unflatten(0, (experts, columns))
        a[0, : depth // 2] = 0
        blocks = -(-depth // 128)
        s_a = random_bits.normal(number, "s_a", rows, blocks).abs()
        s_w = random_bits.normal(number, "s_w", experts * -(-columns // 128), blocks).abs()
        s_w = s_w.unflatten(0, (experts, -1))
        expert = torch.arange(rows) % (experts + 1) - 1
        expert[rows // 2 :] = experts - 1
        for nan in (False, True) if number == 0 else (False,):
            a[-1, 3] = w[experts - 1, 5, 7] = E4M3.nan if nan else 1
            got = chain_triton.grouped(a, s_a, w, s_w, expert, recipe)
            want = reference.grouped_plain(a, s_a, w, s_w, expert, recipe)
            wrong = int((bits_of(got) != bits_of(want)).sum())
            assert not wrong, f"{wrong} of {got.numel()} outputs differ with {recipe}, NaN: {nan}"
            assert bool(torch.isnan(got).any()) == nan
            compared += got.numel()
    return compared + on_every_scale()


def on_every_scale() -> int:
    """Compare on subnormal and huge scales, zeros and NaN: products that overflow, 0 times Inf."""
    from moe_parity.references.stages.gemm import chain_triton

    compared = 0
    made = FC1.inputs(Case(m=14, e=2, k=1, h=256, i=64, values=Values.SCALES))
    w, s_w = made.w[:, ::16].contiguous(), made.w_scale
    for order in ScaleOrder:
        recipe = dataclasses.replace(BASE, scale_order=order)
        got = chain_triton.grouped(made.a, made.a_scale, w, s_w, made.expert, recipe)
        want = reference.grouped_plain(made.a, made.a_scale, w, s_w, made.expert, recipe)
        nan = torch.isnan(want)
        assert bool(nan.any() and torch.isinf(want).any())
        assert torch.equal(torch.isnan(got), nan), f"other NaN with {recipe}"
        wrong = int((bits_of(got) != bits_of(want))[~nan].sum())
        assert not wrong, f"{wrong} of {got.numel()} outputs differ with {recipe}"
        compared += got.numel()
    return compared


def test_the_gpu_form_of_the_reference_is_the_plain_one_in_the_interpreter():
    """In a process of its own: Triton decides at its import whether it interprets."""
    needs_interpreter()
    child = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], text=True, capture_output=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    assert int(child.stdout) == 24 * 130 + 5 * 9 * 7 + 3 * 14 * 8


if __name__ == "__main__":
    print(compare())
