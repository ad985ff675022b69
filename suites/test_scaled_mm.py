"""torch's own block-scaled product, 1 x 128 by 128 x 128: what it is handed, and what it computes.

Without a Hopper GPU its layouts are judged by torch's own check of shapes, and the adapter by a
stand-in that reads what it was handed; with one, its bits, and which chain was met at which shape.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling.run import run
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim, needs
from moe_parity.harness.checks.flow import check
from moe_parity.kernels import Kernel, find
from moe_parity.kernels.vendors.torch_ops import scaled_mm as adapter
from moe_parity.references.arithmetic.formats import f32_to_bf16
from moe_parity.references.language import Case, Recipe, Values, Why
from moe_parity.references.recipes.deepgemm import DEEPGEMM_GEMM
from moe_parity.references.recipes.pytorch import SCALED_MM_HALVES
from moe_parity.references.stages import FC1
from moe_parity.references.stages.gemm import reference as gemm
from moe_parity.references.stages.gemm.decisions import GemmRecipe

NAME = "torch_scaled_mm"
DENSE = Case(m=8, e=1, k=1, h=640, i=128, values=Values.NORMAL)
"""Five blocks of K, which are padded to eight."""
PROBED = (
    *itertools.product(((256, 256), (16, 128), (8, 4608)), (512, 1024, 2048, 6144, 7168)),
    ((2048, 4096), 7168),
)
"""((M, N), K) at which the chain was looked at by hand: docs/findings.md."""
CALLS = 3
"""Calls of a shape: the heuristic need not choose alike twice."""


# --- which chain, on a GPU ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(m=m, e=1, k=1, h=k, i=n // 2, values=Values.AIMED), id=f"m{m}-n{n}-k{k}")
        for (m, n), k in PROBED
    ],
)
def test_which_chain_at_which_shape(case: Case, parity_device: str, parity_recorder: Recorder):
    """Each call is one chain or two halves, bit for bit; the record says which were met."""
    kernel = find(NAME)
    needs(kernel, case, parity_device)
    inputs = FC1.inputs(case, parity_device)
    known = {
        recipe.name: comparable(FC1.reference(case, inputs, recipe)["rows"])
        for recipe in (DEEPGEMM_GEMM, SCALED_MM_HALVES)
    }
    one, two = known.values()
    assert not torch.equal(one, two), "inputs that tell nothing"
    met, other = set(), 0
    for _ in range(CALLS):
        got = comparable(run(kernel, case, inputs).outputs["rows"])
        fits = [name for name, want in known.items() if torch.equal(got, want)]
        met |= set(fits)
        other += not fits
    stated = {recipe.name for recipe in kernel.recipes(case, parity_device)}
    shape = f"M={case.m} N={2 * case.i} K={case.h}"
    print(f"{NAME} {shape}: {', '.join(sorted(met)) or 'neither chain'}")
    fault = ""
    if other:
        fault = f"{other} of {CALLS} calls of {shape} are neither one chain nor two halves."
    elif not met <= stated:
        fault = f"{shape} is {', '.join(sorted(met))}, states {', '.join(sorted(stated))}."
    claim(
        parity_recorder, "chain", fault, kernel=NAME, stage="fc1", recipe=" ".join(sorted(met)),
        shape=FC1.size_words(case), device=parity_device, compared=CALLS * one.numel(),
        could_show=int((one != two).sum()),
    )  # fmt: skip


# --- where it runs, what it states --------------------------------------------------------------


def test_why_it_cannot_run_is_one_line(monkeypatch: pytest.MonkeyPatch):
    """Without a GPU, on another chip, under a torch that lacks it."""
    hopper = "torch's block-scaled scaled_mm needs a Hopper GPU."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = adapter.unavailable()
    assert found is not None
    assert (found.why, str(found)) == (Why.NEEDS_GPU, hopper)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for major, why in ((8, Why.NEEDS_CHIP), (10, Why.NEEDS_CHIP), (9, None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda n=major: (n, 0))
        found = adapter.unavailable()
        assert (found and (found.why, str(found))) == (why and (why, hopper))
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    found = adapter.unavailable()
    assert found is not None
    assert found.why is Why.ABSENT
    assert "has no torch.nn.functional.scaled_mm" in str(found)


@pytest.mark.parametrize(
    ("k", "names"),
    [
        (512, {"deepgemm_gemm"}), (2048, {"deepgemm_gemm"}), (4096, {"deepgemm_gemm"}),
        (6144, {"deepgemm_gemm", "torch_scaled_mm_halves"}),
        (7168, {"deepgemm_gemm", "torch_scaled_mm_halves"}), (6272, {"deepgemm_gemm"}),
    ],
)  # fmt: skip
def test_halves_are_stated_where_they_may_be_met(k: int, names: set[str]):
    """From 6144 on, of an even number of blocks: 49 blocks have no halves."""
    case = dataclasses.replace(DENSE, h=k)
    assert {recipe.name for recipe in find(NAME).recipes(case, "cuda")} == names


def test_what_it_declines_is_said():
    kernel = find(NAME)
    for words, sentence in (
        ({"e": 2}, "one expert and one choice: a dense product."),
        ({"h": 336}, "K = 336 must be a multiple of 128 and N = 256 one of 16."),
        ({"i": 65}, "K = 640 must be a multiple of 128 and N = 130 one of 16."),
    ):
        assert str(kernel.declines(dataclasses.replace(DENSE, **words), "cuda")) == sentence
    assert kernel.declines(DENSE, "cuda") is None
    assert str(kernel.declines(DENSE, "cpu")) == "it needs a GPU."


# --- what it is handed --------------------------------------------------------------------------

CHECKED = pytest.mark.skipif(
    not hasattr(torch._meta_registrations, "meta_scaled_mm_v2"),
    reason="this torch checks no layouts on the meta device",
)


@CHECKED
@pytest.mark.parametrize("m", [1, 8, 130])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (256, 512), (256, 640), (384, 1024)])
def test_torch_takes_the_layouts(m: int, n: int, k: int):
    """By its own check, on the meta device: one row, one tile, blocks that are padded or not."""
    codes, w = torch.zeros(m, k, device="meta").byte(), torch.zeros(n, k, device="meta").byte()
    a_scale, w_scale = torch.ones(m, k // 128), torch.ones(n // 128, k // 128)
    made = adapter.scaled_mm(codes, a_scale.to("meta"), w, w_scale.to("meta"))
    assert made.shape == (m, n)
    assert made.dtype is torch.bfloat16


@CHECKED
@pytest.mark.parametrize("what", ["scales_of_rows", "scales_of_tiles"])
def test_torch_refuses_scales_as_they_come(what: str, monkeypatch: pytest.MonkeyPatch):
    """Row-major scales of the activations, weights' scales without their padding."""
    monkeypatch.setattr(adapter, what, lambda scales: scales.t() if "tiles" in what else scales)
    codes, w = (
        torch.zeros(8, 640, device="meta").byte(),
        torch.zeros(256, 640, device="meta").byte(),
    )
    with pytest.raises(RuntimeError, match="1x128 x 128x128 blockwise scaling"):
        adapter.scaled_mm(
            codes, torch.ones(8, 5, device="meta"), w, torch.ones(2, 5, device="meta")
        )


def test_the_padding_of_the_scales_is_zeros():
    tiles = adapter.scales_of_tiles(torch.arange(1.0, 11.0).view(2, 5))
    assert (tuple(tiles.shape), tiles.stride()) == ((8, 2), (1, 8))
    assert tiles.t().tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 0, 0, 0]]
    rows = adapter.scales_of_rows(torch.arange(6.0).view(3, 2))
    assert (rows.tolist(), rows.stride()) == ([[0, 1], [2, 3], [4, 5]], (1, 3))


def stand_in(recipe: GemmRecipe) -> Any:
    """Return what reads its operands as the op does, on a CPU."""

    def scaled_mm(a: Tensor, b: Tensor, s_a: Tensor, how_a: Any, s_b: Tensor, how_b: Any, **words):
        kinds = torch.nn.functional.ScalingType
        assert (how_a, how_b) == (kinds.BlockWise1x128, kinds.BlockWise128x128)
        assert words == {"output_dtype": torch.bfloat16}
        codes, w = a.view(torch.uint8), b.t().view(torch.uint8)
        tiles = s_b.t()[:, : s_a.shape[1]].contiguous()
        return f32_to_bf16(gemm.gemm(codes, s_a.contiguous(), w, tiles, recipe))

    return scaled_mm


def here(patch: pytest.MonkeyPatch, recipe: GemmRecipe) -> Kernel:
    """Return the adapter as a kernel of a CPU, on the stand-in."""
    patch.setattr(torch.nn.functional, "scaled_mm", stand_in(recipe))
    return dataclasses.replace(find(NAME), needs_gpu=False, unavailable=lambda: None)


def verdicts(kernel: Kernel, case: Case) -> dict[str, str]:
    return {v.check: v.message for v in check(kernel, case, "cpu") if v.failed}


@pytest.mark.parametrize("m", [0, 1, 9])
def test_the_adapter_hands_over_every_operand(m: int, monkeypatch: pytest.MonkeyPatch):
    """Every promise of a kernel, green on one chain."""
    kernel = here(monkeypatch, GemmRecipe())
    assert not verdicts(kernel, dataclasses.replace(DENSE, m=m))


def chain_of(recipe: Recipe) -> GemmRecipe:
    return recipe.of("gemm", GemmRecipe)


def test_both_chains_are_taken_where_both_are_stated_and_one_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
):
    """Halves at K = 6144 are a recipe of its own; at K = 512 they are red and named."""
    deep = Case(m=2, e=1, k=1, h=6144, i=8, values=Values.AIMED)
    for recipe in (DEEPGEMM_GEMM, SCALED_MM_HALVES):
        kernel = here(monkeypatch, chain_of(recipe))
        verdict = next(check(kernel, deep, "cpu"))
        assert (verdict.verdict, verdict.recipe) == ("pass", recipe.name)
    verdict = next(check(kernel, dataclasses.replace(deep, m=8, h=512, i=64), "cpu"))
    assert verdict.failed
    assert "gemm.split_k=halves" in verdict.causes


def test_transposed_scales_of_the_adapter_are_red_and_named(monkeypatch: pytest.MonkeyPatch):
    case = Case(m=8, e=1, k=1, h=512, i=256, values=Values.AIMED)
    kernel = here(monkeypatch, GemmRecipe())
    right = adapter.scales_of_tiles
    monkeypatch.setattr(adapter, "scales_of_tiles", lambda scales: right(scales.t()))
    verdict = next(check(kernel, case, "cpu"))
    assert verdict.failed
    assert "transposed_scales" in verdict.causes
