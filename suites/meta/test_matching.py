"""``assert_matches`` on tensors of one's own: every stage green and red, records, the page."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity import harness
from moe_parity.harness import assert_matches, matching
from moe_parity.harness.session.recorder import Recorder
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, InputDtype, Recipe, ScaleFormat
from moe_parity.references.language.case import Routing
from moe_parity.references.recipes import ALL
from moe_parity.references.recipes.ours import NO_ROUNDING, OURS
from moe_parity.references.stages import STAGES
from moe_parity.reports.records import Record
from moe_parity.suites.meta.test_dump import SMALL, named

EIGHT = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _red_is_wanted_here() -> Iterator[None]:
    """Keep records of differences that a test asks for out of this run's."""
    recorder = Recorder(device="cpu", seed=None, sink=lambda _: None)
    recorder.start("tests/test_mine.py::test_it", {})
    yield
    recorder.finish()


def made(stage: str, recipe: Recipe, case: Case | None = None) -> dict[str, Tensor]:
    """Return the outputs of a recipe on the small case of a stage."""
    owner, case = STAGES[stage], case or SMALL[stage]
    return owner.reference(case, owner.inputs(case), recipe)


def with_option(stage: str, label: str) -> Recipe:
    """Return our recipe with one decision changed."""
    return dict(STAGES[stage].neighbours(OURS))[label]


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_recipe_gives_matches_it(stage: str):
    """Codes in bytes and in torch's type; the sequence of recipes needs one that holds."""
    recipe = OURS if STAGES[stage].acting else NO_ROUNDING
    outputs = made(stage, recipe)
    assert_matches(stage, named(stage, SMALL[stage]), outputs, recipe=recipe)
    typed = {n: t.view(EIGHT) if t.dtype is torch.uint8 else t for n, t in outputs.items()}
    assert_matches(stage, named(stage, SMALL[stage]), typed, recipe=recipe.name)


# --- red -----------------------------------------------------------------------------------------

ROUNDED = {
    "weight_quant": "quant.scale_form=div_448",
    "act_quant": "quant.floor=none",
    "fc1": "gemm.scale_order=a_then_b",
    "swiglu": "swiglu.shift=always",
    "swiglu_quant": "quant.floor=none",
    "fc2": "gemm.scale_order=b_then_a",
    "combine": "combine.order=descending",
    "quant_gemm": "quant.floor=amax_1e-4",
}
"""Stage -> one decision that is made another way."""
FORMS = {torch.uint8: "code 0x{:02x}", torch.bfloat16: "0x{:04x}", torch.float32: "0x{:08x}"}
WORDS = {torch.uint8: torch.uint8, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def said_of(got: Tensor, want: Tensor) -> list[str]:
    """Return what a sentence has to say of two tensors: bits of the first mismatch, how many."""
    bits = [t.contiguous().view(WORDS[t.dtype]) for t in (got, want)]
    bad = bits[0] != bits[1]
    first = tuple(bad.nonzero()[0].tolist())
    size = (1 << 8 * got.element_size()) - 1
    one, two = (FORMS[got.dtype].format(int(b[first]) & size) for b in bits)
    return [f"got {one} (", f"expected {two} (", f"{int(bad.sum())} of {got.numel()} "]


@pytest.mark.parametrize("stage", ROUNDED)
def test_a_rounding_that_differs_is_named(stage: str):
    """The decision first, then the place with its bits, then how many outputs differ."""
    label = ROUNDED[stage]
    want, got = made(stage, OURS), made(stage, with_option(stage, label))
    with pytest.raises(AssertionError) as caught:
        assert_matches(stage, named(stage, SMALL[stage]), got, recipe="ours")
    message = str(caught.value)
    assert message.startswith(f"{label} instead of ")
    assert f" in {stage} of the given tensors: at " in message
    assert " by recipe ours; " in message
    assert "\n" not in message
    names = sorted(got, key=lambda name: name != "scales")
    first = next(n for n in names if not torch.equal(got[n], want[n]))
    for words in said_of(got[first], want[first]):
        assert words in message


def moved(stage: str) -> tuple[str, dict[str, Tensor]]:
    """Return words of a sentence, and integers or copies with the mistake that it says."""
    outputs = {name: tensor.clone() for name, tensor in made(stage, NO_ROUNDING).items()}
    if stage == "align":
        outputs["slots"] = outputs["slots"].roll(1)
        return "^Every slot one too far in align of the given tensors: slot 0 of block 0", outputs
    outputs["counts"][2] += 1
    return "permute of the given tensors: expert 2 is said to have", outputs


@pytest.mark.parametrize("stage", ["align", "permute"])
def test_integers_and_copies_that_differ_are_said(stage: str):
    words, outputs = moved(stage)
    with pytest.raises(AssertionError, match=words):
        assert_matches(stage, named(stage, SMALL[stage]), outputs, recipe="no_rounding")


def test_a_mistake_is_named():
    """Gate and up swapped: no rounding explains it."""
    case = SMALL["swiglu"]
    given = named("swiglu", case)
    swapped = {**given, "rows": given["rows"].roll(case.i, 1)}
    rows = STAGES["swiglu"].reference(*STAGES["swiglu"].given(case, swapped), OURS)["rows"]
    with pytest.raises(AssertionError, match=r"^Gate and up swapped in swiglu of the given"):
        assert_matches("swiglu", given, {"rows": rows}, recipe="ours")


# --- a layer -------------------------------------------------------------------------------------


def test_a_layer_may_show_its_output_alone():
    given, outputs = named("layer", SMALL["layer"]), made("layer", OURS)
    assert_matches("layer", given, {"out": outputs["out"]}, recipe="ours")
    other = made("layer", with_option("layer", "combine.order=descending"))
    with pytest.raises(AssertionError, match=r"combine\.order=descending instead of ascending"):
        assert_matches("layer", given, {"out": other["out"]}, recipe="ours")


def test_what_a_layer_shows_inside_is_judged_where_it_starts():
    """On its own upstream tensors: the second GEMM is right for what it was given."""
    given = named("layer", SMALL["layer"])
    outputs = made(
        "layer", with_option("layer", "swiglu_quant: quant.scale_form=mul_recip_448_bf16")
    )
    with pytest.raises(AssertionError, match=r"^quant\.scale_form=.* in swiglu_quant of"):
        assert_matches("layer", given, outputs, recipe="ours")


def test_one_recipe_has_to_hold_throughout():
    """Each of two recipes explains one half of a layer, neither of them all of it."""
    given = named("layer", SMALL["layer"])
    first = with_option("layer", "act_quant: quant.apply=mul_recip_bf16")
    second = with_option("layer", "combine.order=descending")
    both = first.with_parts(combine=second.parts["combine"])
    outputs = made("layer", both)
    named_ = [dataclasses.replace(r, name=n) for n, r in (("one", first), ("two", second))]
    with pytest.raises(AssertionError, match=r"mul_recip_bf16 instead of .* by recipe two"):
        assert_matches("layer", given, outputs, recipe=named_)
    assert_matches("layer", given, outputs, recipe=[*named_, both])


# --- recipes and words ---------------------------------------------------------------------------


def test_any_of_several_recipes_is_enough_and_the_nearest_speaks():
    case = SMALL["act_quant"]
    given, outputs = named("act_quant", case), made("act_quant", ALL["vllm_cuda"])
    assert_matches("act_quant", given, outputs, recipe=("ours", ALL["vllm_cuda"]))
    outputs["scales"][5, 2] *= 2
    with pytest.raises(AssertionError, match=r"by recipe vllm_cuda; 1 of 96 scales"):
        assert_matches("act_quant", given, outputs, recipe=["ours", "vllm_cuda", "deepgemm"])


CASES = [
    ("act_quant", "ue8m0", dataclasses.replace(SMALL["act_quant"], scale=ScaleFormat.UE8M0)),
    ("act_quant", "g64", dataclasses.replace(SMALL["act_quant"], group=64)),
    ("swiglu", "c7", dataclasses.replace(SMALL["swiglu"], clamp=7.0)),
    ("fc1", "ep1of2", dataclasses.replace(SMALL["fc1"], ep_size=2, ep_rank=1)),
    ("align", "holes-e5", dataclasses.replace(SMALL["align"], routing=Routing.HOLES)),
    ("combine", "fp16", dataclasses.replace(SMALL["combine"], dtype=InputDtype.FP16)),
]


@pytest.mark.parametrize(("stage", "words", "case"), CASES, ids=[words for _, words, _ in CASES])
def test_the_words_of_a_case_say_what_tensors_do_not(stage: str, words: str, case: Case):
    """With the words it is green; without them red or refused."""
    recipe = OURS if STAGES[stage].acting else NO_ROUNDING
    given, outputs = named(stage, case), made(stage, recipe, case)
    given.pop("expert_map", None)
    assert_matches(stage, given, outputs, recipe=recipe, case=words)
    with pytest.raises((AssertionError, ParityError)):
        assert_matches(stage, given, outputs, recipe=recipe)


def test_scales_have_the_layout_that_the_case_asks_for():
    given, outputs = named("act_quant", SMALL["act_quant"]), made("act_quant", OURS)
    outputs["scales"] = outputs["scales"].t().contiguous().t()
    assert_matches("act_quant", given, outputs, recipe="ours", case="col")
    with pytest.raises(ParityError, match=r"act_quant got scales with strides \(1, 24\), expected"):
        assert_matches("act_quant", given, outputs, recipe="ours")


# --- records -------------------------------------------------------------------------------------


@pytest.fixture
def records() -> Iterator[tuple[Recorder, list[Record]]]:
    """Run a test of a session of its own around the test."""
    found: list[Record] = []
    recorder = Recorder(device="cpu", seed=None, sink=found.append)
    recorder.start("tests/test_mine.py::test_it", {})
    yield recorder, found
    recorder.finish()


def test_a_match_in_a_running_test_leaves_a_record(records: Any):
    recorder, found = records
    outputs = made("act_quant", OURS)
    assert_matches("act_quant", named("act_quant", SMALL["act_quant"]), outputs, recipe="ours")
    other = made("combine", with_option("combine", "combine.order=descending"))
    with pytest.raises(AssertionError) as caught:
        assert_matches("combine", named("combine", SMALL["combine"]), other, recipe="ours")
    recorder.finish()
    green, red, own = found
    assert (green.check, green.verdict, green.stage) == ("exact_act_quant", "pass", "act_quant")
    assert (green.recipe, green.shape, green.scale) == ("ours", "m24-h512", "fp32")
    assert (green.compared, green.differing) == (24 * 512 + 24 * 4, 0)
    want = made("combine", OURS)["out"]
    differing = int((other["out"].view(torch.int16) != want.view(torch.int16)).sum())
    assert (red.check, red.verdict, red.stage) == ("exact_combine", "fail", "combine")
    assert (red.cause_kind, red.cause) == ("decision", "combine.order=descending")
    assert (red.compared, red.differing) == (want.numel(), differing)
    assert red.message == str(caught.value)
    assert (own.verdict, own.message) == ("fail", f"the test passed although a check failed: "
                                          f"{red.message}")  # fmt: skip


def test_each_stage_inside_a_layer_has_a_record(records: Any):
    recorder, found = records
    given, outputs = named("layer", SMALL["layer"]), made("layer", OURS)
    assert_matches("layer", given, outputs, recipe="ours")
    recorder.finish()
    stages = ["act_quant", "fc1", "swiglu_quant", "fc2", "combine", "layer"]
    assert [r.stage for r in found[:-1]] == stages
    assert {r.check for r in found[:-1]} == {f"exact_{stage}" for stage in stages}
    assert sum(r.compared for r in found[:-2]) == sum(t.numel() for t in outputs.values())


def test_the_name_of_the_kernel_is_the_markers(records: Any):
    recorder, _ = records
    recorder.item.labels = {"kernel": "my_sum"}
    outputs = {"out": torch.zeros_like(made("combine", OURS)["out"])}
    with pytest.raises(AssertionError, match="in combine of my_sum: at token 0"):
        assert_matches("combine", named("combine", SMALL["combine"]), outputs, recipe="ours")


def test_a_test_inside_a_test_records_for_itself(records: Any):
    """As where somebody tests a plugin of pytest's: afterwards the outer one goes on."""
    outer, _ = records
    inner = Recorder(device="cpu", seed=None, sink=lambda record: None)
    inner.start("inner", {})
    assert matching.recorder.running() is inner
    inner.finish()
    assert matching.recorder.running() is outer


# --- the page ------------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "assert-matches.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
SENTENCE = " ".join(re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1].split())


def quantizer(divides: bool) -> Any:
    """Return DeepGEMM's quantizer in plain torch, or one that divides where it multiplies."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        groups = x.float().unflatten(1, (-1, 128))
        scales = groups.abs().amax(2).clamp(1e-4) / torch.tensor(448.0)
        wide = scales[..., None]
        codes = groups / wide if divides else groups * (1 / wide)
        return codes.flatten(1).to(EIGHT), scales

    return run


def test_the_example_of_the_page_runs_and_its_sentence_is_what_is_said():
    x = torch.arange(64 * 512).mul(2654435761).remainder(1 << 16).sub(1 << 15).mul(2.0**-12)
    x = (x.view(64, 512) * torch.linspace(1, 2, 64)[:, None]).bfloat16()
    exec(EXAMPLE, {"my_quantizer": quantizer(divides=False), "x": x})
    with pytest.raises(AssertionError) as caught:
        exec(EXAMPLE, {"my_quantizer": quantizer(divides=True), "x": x})
    assert str(caught.value) == SENTENCE


# --- the import ----------------------------------------------------------------------------------


def test_the_import_is_light():
    """A conftest.py that names it, and a plugin that is loaded beside it, start without torch."""
    code = (
        "import sys, moe_parity.harness as h; print({'torch', 'numba', 'pytest'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    assert harness.__all__
    with pytest.raises(AttributeError, match="has no attribute 'assert_match'"):
        _ = harness.assert_match
