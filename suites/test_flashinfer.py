"""FlashInfer's block-FP8 GEMM for Hopper, as it is shipped and built without ``-use_fast_math``.

With a Hopper GPU each build has the bits of its own recipe and not of the other's.  Without one the
adapter is judged by a stand-in that reads what it was handed, and its sentences are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from moe_parity.harness.calling.run import run
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim, needs
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.kernels import Kernel, find
from moe_parity.kernels.vendors.flashinfer import gemms, package
from moe_parity.kernels.vendors.flashinfer.package import Build
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Hazard, Recipe, ScaleFormat, Values
from moe_parity.references.recipes import recipe_named
from moe_parity.references.stages import QUANT_GEMM
from moe_parity.references.stages.quant_gemm.inputs import QuantGemmInputs

SHIPPED, EXACT = "flashinfer_blockscale_gemm", "flashinfer_blockscale_gemm_exact"
RECIPES = {SHIPPED: "flashinfer_cutlass", EXACT: "trtllm_fused"}
OTHERS = {SHIPPED: "trtllm_fused", EXACT: "flashinfer_cutlass"}
SMALL = Case(m=16, h=512, i=128, values=Values.AIMED)
SHAPES = (
    (1, 512, 512), (16, 512, 512), (31, 512, 1024), (32, 512, 1024), (33, 512, 1024),
    (128, 512, 2048), (4, 4096, 7168), (128, 256, 7168), (33, 320, 1024),
)  # fmt: skip
"""(M, N, K): up to 31 rows the operands change places; 320 columns end in half a tile."""


# --- its bits, on a GPU ---------------------------------------------------------------------------


def probed() -> Iterator[ParameterSet]:
    for name in RECIPES:
        for m, n, k in SHAPES:
            for values in (Values.NORMAL, Values.AIMED):
                # the one aimed row of seed 7 tells nothing
                case = Case(m=m, i=n, h=k, values=values, seed=1 if m == 1 else 7)
                yield pytest.param(name, case, id=f"{name}-{values}-m{m}-n{n}-k{k}")


@pytest.mark.parametrize(("name", "case"), list(probed()))
def test_each_build_has_the_bits_of_its_recipe_and_not_of_the_other(
    name: str, case: Case, parity_device: str, parity_recorder: Recorder
):
    """The record counts the outputs in which the two recipes differ: all of them are seen."""
    needs(find(name), case, parity_device)
    inputs = QUANT_GEMM.inputs(case, parity_device)
    own, other = (
        comparable(QUANT_GEMM.reference(case, inputs, recipe_named(recipe))["rows"])
        for recipe in (RECIPES[name], OTHERS[name])
    )
    tell = int((own != other).sum())
    assert tell or case.values is Values.NORMAL, "inputs that tell nothing"
    got = comparable(run(find(name), case, inputs).outputs["rows"])
    differing, past = int((got != own).sum()), int((got != other).sum())
    shape = QUANT_GEMM.size_words(case)
    print(f"{name} {shape} {case.values}: {differing} of {got.numel()} differ from "
          f"{RECIPES[name]}, {past} from {OTHERS[name]} (the recipes: {tell})")  # fmt: skip
    fault = f"{name} {shape}: {differing} outputs differ from {RECIPES[name]}." if differing else ""
    claim(
        parity_recorder, "build", fault, kernel=name, stage="quant_gemm", recipe=RECIPES[name],
        shape=f"{case.values} {shape}", device=parity_device, compared=got.numel(),
        differing=differing, could_show=tell,
    )  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("m", [16, 33])
def test_the_recipe_of_the_other_build_is_refuted_by_what_fast_math_decides(
    name: str, m: int, parity_device: str, parity_recorder: Recorder
):
    case = dataclasses.replace(SMALL, m=m)
    needs(find(name), case, parity_device)
    verdict = next(check(stating(find(name), OTHERS[name]), case, parity_device))
    print(f"{name}: {verdict.message}")
    refuted = names_the_flag(verdict, RECIPES[name])
    fault = "" if refuted else f"{name} as {OTHERS[name]}: {verdict.message or 'green'}"
    claim(
        parity_recorder, "refuted", fault, kernel=name, stage="quant_gemm", recipe=OTHERS[name],
        shape=QUANT_GEMM.size_words(case), device=parity_device, compared=case.m * case.i,
    )  # fmt: skip


def stating(kernel: Kernel, recipe: str) -> Kernel:
    """Return a kernel that states another recipe."""
    return dataclasses.replace(kernel, recipes=lambda case, device: (recipe_named(recipe),))


def names_the_flag(verdict: Verdict, recipe: str) -> bool:
    """Whether a verdict is red by the recipe that was met, and by what the flag decides in it."""
    shipped = recipe == "flashinfer_cutlass"
    fast, lane = ("_fast", "first_lane") if shipped else ("", "largest")
    decisions = (
        f"quant.subnormal_amax={lane}, quant.scale_form=recip_of_multiplier{fast}, "
        f"quant.apply=mul_multiplier{fast}"
    )
    return verdict.failed and verdict.causes == (recipe,) and f"({decisions})" in verdict.message


# --- the adapter, on a stand-in -------------------------------------------------------------------


class Fake(SimpleNamespace):
    """``flashinfer.gemm.gemm_base`` in which a runner is the recipe of its build."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.get_fp8_blockscale_gemm_runner_sm90 = lambda: recipe_named("flashinfer_cutlass")

    def fp8_blockscale_gemm_sm90(
        self, x: Tensor, w: Tensor, x_scale: None, w_scale: Tensor, out: Tensor
    ) -> Tensor:
        """Read the operands as the op does: pointers, sizes and types."""
        assert x_scale is None
        assert (x.dtype, w.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
        assert w_scale.dtype is torch.float32
        assert all(t.is_contiguous() for t in (x, w, w_scale, out))
        recipe: Recipe = self.get_fp8_blockscale_gemm_runner_sm90()
        self.seen.append(recipe.name)
        given = QuantGemmInputs(x=x, w=w.view(torch.uint8), w_scale=w_scale)
        case = Case(m=x.shape[0], h=x.shape[1], i=w.shape[0])
        return out.copy_(QUANT_GEMM.reference(case, given, recipe)["rows"])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a stand-in in FlashInfer's place."""
    made = Fake()
    monkeypatch.setattr(package, "base", lambda: made)
    monkeypatch.setattr(package, "exact_runner", lambda: recipe_named("trtllm_fused"))
    return made


def test_the_other_runner_is_there_while_a_call_lasts(fake: Fake):
    """Also after one that raises."""
    shipped = fake.get_fp8_blockscale_gemm_runner_sm90
    for build, runs in ((Build.SHIPPED, shipped), (Build.EXACT, package.exact_runner)):
        with package.built_as(build) as function:
            assert fake.get_fp8_blockscale_gemm_runner_sm90 is runs
            assert function == fake.fp8_blockscale_gemm_sm90
        assert fake.get_fp8_blockscale_gemm_runner_sm90 is shipped
    with pytest.raises(ZeroDivisionError), package.built_as(Build.EXACT):
        _ = 1 // 0
    assert fake.get_fp8_blockscale_gemm_runner_sm90 is shipped


def here(name: str) -> Kernel:
    """Return the adapter as a kernel of a CPU."""
    return dataclasses.replace(find(name), needs_gpu=False, unavailable=lambda: None)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("m", [1, 9])
def test_the_adapter_hands_over_every_operand(name: str, m: int, fake: Fake):
    """Every promise of a kernel, green on the recipe of its build."""
    case = dataclasses.replace(SMALL, m=m, i=192, h=256)
    assert not {v.check: v.message for v in check(here(name), case, "cpu") if v.failed}
    assert set(fake.seen) == {RECIPES[name]}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("m", [16, 33])
def test_the_other_build_under_a_kernels_name_is_red_and_named(name: str, m: int, fake: Fake):
    case = dataclasses.replace(SMALL, m=m)
    verdict = next(check(stating(here(name), OTHERS[name]), case, "cpu"))
    assert names_the_flag(verdict, RECIPES[name]), verdict.message


@pytest.mark.parametrize(
    "hazard", [Hazard.STRIDED, Hazard.TRANSPOSED, Hazard.GAPS, Hazard.OFFSET2, Hazard.OFFSET8]
)
def test_inputs_that_it_would_read_wrong_are_refused(hazard: Hazard, fake: Fake):
    case = dataclasses.replace(SMALL, m=3, h=256, hazard=hazard)
    verdict = next(check(here(SHIPPED), case, "cpu"))
    assert verdict.verdict == "skip", verdict.message
    assert verdict.reason.startswith("refused: FlashInfer: ")
    assert not fake.seen


def operands() -> dict[str, Tensor]:
    given = QUANT_GEMM.inputs(Case(m=4, h=256, i=192))
    return dict(vars(given)) | {"out": torch.zeros(4, 192, dtype=torch.bfloat16)}


def test_operands_that_fit_are_taken():
    gemms.check_operands(**operands())


def moved(tensor: Tensor) -> Tensor:
    """Return a copy that starts one element past an aligned place."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "x_type": (lambda o: {"x": o["x"].float()}, "x must be torch.bfloat16 [4, 256], got torch.f"),
    "w_type": (
        lambda o: {"w": o["w"].view(torch.float8_e4m3fn)}, "w must be torch.uint8 [192, 256], got"
    ),
    "w_width": (lambda o: {"w": o["w"][:, :128]}, "w must be torch.uint8 [192, 256], got"),
    "scales": (
        lambda o: {"w_scale": o["w_scale"][:1]},
        "w_scale must be torch.float32 [2, 2], got torch.float32 [1, 2].",
    ),
    "scales_of_rows": (
        lambda o: {"w_scale": torch.ones(192, 2)},
        "w_scale must be torch.float32 [2, 2], got torch.float32 [192, 2].",
    ),
    "out": (lambda o: {"out": o["out"][:3]}, "out must be torch.bfloat16 [4, 192], got"),
    "out_type": (lambda o: {"out": o["out"].half()}, "out must be torch.bfloat16 [4, 192], got"),
    "strides": (lambda o: {"x": o["x"].t().contiguous().t()}, "x takes contiguous input, got"),
    "scale_strides": (
        lambda o: {"w_scale": o["w_scale"].t().contiguous().t()}, "w_scale takes contiguous input"
    ),
    "n": (
        lambda o: {"w": o["w"][:160], "out": torch.zeros(4, 160, dtype=torch.bfloat16)},
        "K = 256 must be a multiple of 128 and N = 160 one of 64.",
    ),
    "x_start": (lambda o: {"x": moved(o["x"])}, "x takes input that starts at a multiple of 4 "),
    "w_start": (lambda o: {"w": moved(o["w"])}, "w takes input that starts at a multiple of 16 "),
    "out_start": (lambda o: {"out": moved(o["out"])}, "out takes input that starts at a multiple"),
    "m": (lambda o: {"x": o["x"][:0], "out": o["out"][:0]}, "it refuses a batch of no rows."),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_operands_that_do_not_fit_are_refused_in_a_sentence(what: str):
    change, sentence = WRONG[what]
    given = operands()
    with pytest.raises(ParityError, match=rf"^FlashInfer: {re.escape(sentence)}"):
        gemms.check_operands(**(given | change(given)))


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_kernel_declines_is_said(name: str):
    kernel = find(name)
    for words, sentence in (
        ({"i": 160}, "K = 512 must be a multiple of 128 and N = 160 one of 64."),
        ({"m": 0}, "it refuses a batch of no rows."),
        ({"scale": ScaleFormat.UE8M0}, "it quantizes with fp32 scales, not with powers of two."),
    ):
        assert str(kernel.declines(dataclasses.replace(SMALL, **words), "cuda")) == sentence
    assert kernel.declines(SMALL, "cuda") is None
    assert str(kernel.declines(SMALL, "cpu")) == "it needs a GPU."


def test_compiling_asks_for_the_runner_of_the_build(fake: Fake, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(fake, package.RUNNER, lambda: asked.append("shipped"))
    monkeypatch.setattr(package, "exact_runner", lambda: asked.append("exact"))
    package.compile_now(Build.EXACT)
    package.compile_now(Build.SHIPPED)
    assert asked == ["exact", "shipped"]
