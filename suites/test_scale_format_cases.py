"""Cases of a layer's two scale formats: quantized arrivals, both defaults, exchanged formats."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_parity.harness.cases.strategies import cases
from moe_parity.harness.checks.expect import Recorder, expect
from moe_parity.harness.checks.flow import check
from moe_parity.harness.fuzz.draw import Enough, draw
from moe_parity.harness.session import environment
from moe_parity.kernels import Call, all_kernels, find
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Arrival, Case, Hazard, ScaleFormat, Values, parse_id
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import LAYER
from moe_parity.suites.planted import kernel_of
from moe_parity.suites.scale_formats import setting_default

scale_format = pytest.importorskip("moe_parity.kernels.ours.scale_format", reason="needs Triton")
pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")


default = pytest.fixture(setting_default)


# --- as cases of the harness ---------------------------------------------------------------------

ARRIVES = [
    Case(m=3, e=4, k=2, h=256, i=256, values=Values.AIMED, arrives=Arrival.QUANTIZED, **words)
    for words in (
        {},
        {"scale": ScaleFormat.UE8M0, "mid_scale": ScaleFormat.FP32},
        {"hazard": Hazard.GAPS},
    )
]


@pytest.mark.parametrize("case", ARRIVES, ids=lambda case: case.id)
def test_a_layer_whose_activations_arrive_quantized(
    case: Case, parity_device: str, parity_recorder: Recorder
):
    """Every stage but the first quantization, which somebody else has done."""
    expect(find("ours_large"), case, parity_device, parity_recorder, power=True)
    assert parse_id(f"ours_large-{case.id}")[1] == case


def test_a_kernel_takes_quantized_activations_only_if_it_says_so():
    takes = {k.name for k in all_kernels(LAYER) if k.takes_quantized}
    assert takes == {"ours_large", "ours_prefix_sum"}
    for kernel in all_kernels(LAYER):
        if kernel.name not in takes and not kernel.needs_gpu:
            declined = str(kernel.declines(ARRIVES[0], "cpu"))
            assert declined == "it quantizes the activations itself."


def test_cases_whose_activations_arrive_quantized_are_drawn():
    found = []
    draw(cases(find("ours_large"), "cpu"), 1, lambda case: _few(found, case))
    assert {case.arrives for case in found} == set(Arrival)


def _few(found: list[Case], case: Case) -> None:
    found.append(case)
    if len(found) == 40:
        raise Enough


def test_a_sender_s_own_tensors_are_taken():
    """The inputs of a file: codes and scales where the case says so, and both are needed."""
    case = ARRIVES[0]
    inputs = LAYER.inputs(case)
    given = {name: getattr(inputs.batch, name) for name in ("x", "x_scale", "ids", "weights")}
    given |= {n: getattr(inputs.experts, n) for n in ("w13", "w13_scale", "w2", "w2_scale")}
    taken, own = LAYER.given(Case(arrives=Arrival.QUANTIZED), given)
    assert (taken.m, taken.h, taken.arrives) == (case.m, case.h, Arrival.QUANTIZED)
    assert torch.equal(own.x_scale, inputs.x_scale)
    with pytest.raises(ParityError, match="the input x is"):
        LAYER.given(Case(), given)
    del given["x_scale"]
    with pytest.raises(ParityError, match="x_scale"):
        LAYER.given(Case(arrives=Arrival.QUANTIZED), given)


# --- both defaults -------------------------------------------------------------------------------

SWEPT = [
    ("ours_decode", Case(m=2, e=2, k=1, values=Values.AIMED)),
    ("ours_large", Case(m=2, e=2, k=1, scale=ScaleFormat.UE8M0, mid_scale=ScaleFormat.FP32)),
    ("ours_act_quant", Case(m=2, h=256, values=Values.AIMED)),
    ("ours_swiglu_quant", Case(m=4, e=2, i=128, values=Values.AIMED)),
]


def test_the_variable_of_the_default_is_known_to_the_harness():
    """Else a session would say that it has no effect."""
    assert not environment.misspelt({scale_format.DEFAULT: "1"})
    assert environment.misspelt({f"{scale_format.DEFAULT}X": "1"})


def test_the_records_of_the_suites_are_the_same_under_both_defaults(default):
    """Kernels of the suites say their formats, so that a process's default is nothing to them."""
    found = []
    for word in ("0", "1"):
        default(word)
        made = [v for name, case in SWEPT for v in check(find(name), case, "cpu")]
        found.append([(v.check, v.verdict, v.message) for v in made])
    assert found[0] == found[1]
    assert {verdict for _, verdict, _ in found[0]} <= {"pass", "skip"}


# --- planted faults ------------------------------------------------------------------------------

BOTH = Case(
    m=3, e=4, k=2, h=256, i=256, values=Values.AIMED, mid_scale=ScaleFormat.UE8M0,
)  # fmt: skip


def exchanged(call: Call) -> dict[str, torch.Tensor]:
    """Follow the recipe with the two formats of the layer exchanged."""
    asked = call.inputs.asked
    wrong = dataclasses.replace(asked, scale=asked.mid, mid=asked.scale)
    inputs = dataclasses.replace(call.inputs, asked=wrong)
    return call.stage.reference(call.case, inputs, OURS)


@pytest.mark.parametrize("alone", [False, True], ids=["trace", "output_alone"])
@pytest.mark.parametrize("swapped", [False, True], ids=["fp32_first", "ue8m0_first"])
def test_exchanged_formats_are_named(alone: bool, swapped: bool):
    """By each quantization where a kernel shows them, as one mistake where it shows its output."""
    case = BOTH
    if swapped:
        case = dataclasses.replace(BOTH, scale=BOTH.mid, mid_scale=BOTH.scale)

    def fault(call: Call) -> dict[str, torch.Tensor]:
        made = exchanged(call)
        return {"out": made["out"]} if alone else made

    found = [v for v in check(kernel_of("layer", fault), case, "cpu") if v.failed]
    causes = {(v.check, v.cause) for v in found if v.check.startswith("exact")}
    if alone:
        assert {cause for _, cause in causes} == {"formats_exchanged"}
    else:
        first, second = ("power_lost", "power_unasked")[:: 1 if swapped else -1]
        assert ("exact_act_quant", first) in causes
        assert ("exact_swiglu_quant", second) in causes
