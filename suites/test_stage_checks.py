"""What the checks of the middle stages could have caught: kernels with one fault each turn red."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from moe_parity.harness import stages
from moe_parity.harness.checks.stage import check_stage
from moe_parity.harness.expect import Recorder
from moe_parity.kernels import Kernel, registry
from moe_parity.kernels.stage_call import Fate, GroupedRows, Produced, StageCall
from moe_parity.references.language import Case, Recipe, Stage, Values
from moe_parity.references.language.layer_decisions import ProductRounding
from moe_parity.references.language.recipes import (
    DEEPGEMM_GEMM,
    VLLM_BATCHED,
    VLLM_DEEPGEMM,
    VLLM_FUSED_SILU,
    VLLM_TRITON,
)

CASES = {
    Stage.FC1: Case(m=24, e=4, k=2, h=512, i=128, values=Values.AIMED),
    Stage.FC2: Case(m=24, e=4, k=2, h=256, i=512, values=Values.AIMED),
    Stage.SWIGLU: Case(m=64, i=256, clamp=9.97, values=Values.AIMED),
    Stage.SWIGLU_QUANT: Case(m=128, i=256, values=Values.AIMED),
    Stage.COMBINE: Case(m=24, e=8, k=8, h=256, values=Values.AIMED),
}
FOLLOWED = [
    (Stage.FC1, DEEPGEMM_GEMM), (Stage.FC1, VLLM_TRITON), (Stage.FC2, VLLM_TRITON),
    (Stage.SWIGLU, VLLM_TRITON), (Stage.SWIGLU_QUANT, VLLM_FUSED_SILU),
    (Stage.SWIGLU_QUANT, VLLM_BATCHED), (Stage.SWIGLU_QUANT, VLLM_DEEPGEMM),
    (Stage.COMBINE, VLLM_DEEPGEMM), (Stage.COMBINE, VLLM_TRITON),
]  # fmt: skip
SILENT = {
    "swiglu.clamp_nan", "swiglu.clamp_order", "swiglu.clamp_rounding", "quant.nan_element",
    "quant.nan_amax", "quant.overflow", "quant.zero_group", "quant.power_of_two", "gemm.bias_at",
    "combine.step",
}  # fmt: skip
"""Decisions that these cases need not show: no NaN, no bias, fp32 scales, a limit for one stage."""

HIDDEN = {"swiglu.silu", "swiglu.shift"}
"""Where SiLU and up are rounded to BF16 before the product, few of a thousand gates show these; the
full pool does, on a GPU (``test_production``)."""


def kernel_of(stage: Stage, recipe: Recipe, run: Callable[[StageCall], object]) -> Kernel:
    """Return a kernel that is registered nowhere."""
    registry.register("faulty", stage=stage, recipes=recipe)(run)
    return registry._KERNELS.pop("faulty")


def following(recipe: Recipe) -> Callable[[StageCall], Produced]:
    """Return a kernel function that computes what ``recipe`` says."""

    def run(call: StageCall) -> Produced:
        made = stages.reference(call.stage, call.case, call.inputs, recipe)
        outputs = {}
        for name, value in made.items():
            out = call.new(name, tuple(value.shape), tuple(value.stride()), value.dtype)
            out.copy_(value)
            outputs[name] = out
        return Produced(outputs=outputs)

    return run


@pytest.mark.parametrize(("stage", "recipe"), FOLLOWED, ids=lambda v: getattr(v, "name", v))
def test_a_wrong_decision_is_red_and_named(stage: Stage, recipe: Recipe, parity_recorder: Recorder):
    """One neighbour for every decision: red, and named among those that have the same bits."""
    quiet = []
    one_each = {name.partition("=")[0]: (name, r) for name, r in stages.mutants_of(stage, recipe)}
    for name, changed in one_each.values():
        # Behind a limit there are gates of every kind, without one the groups of the quantizer.
        limited = stage is Stage.SWIGLU_QUANT and name.startswith("swiglu.")
        case = dataclasses.replace(CASES[stage], clamp=9.97) if limited else CASES[stage]
        inputs = stages.stage_inputs(stage, case)
        kernel = kernel_of(stage, recipe, following(changed))
        verdict = next(iter(check_stage(kernel, case, "cpu", inputs=inputs)))
        if verdict.verdict == "pass":
            quiet.append(name)
            continue
        assert name in verdict.decision.split(" or "), verdict.message
        parity_recorder.add(
            {
                "check": "mutant_told", "verdict": "pass", "stage": stage.value,
                "recipe": recipe.name, "device": "reference", "bound": "exact",
                "compared": verdict.compared, "could_show": verdict.differing,
                "nearest_mutant": name, "mutant_distance": verdict.differing,
            }
        )  # fmt: skip
    twice = recipe.swiglu is not None and recipe.swiglu.product_rounding is ProductRounding.TWICE
    allowed = SILENT | (HIDDEN if twice and stage is Stage.SWIGLU_QUANT else set())
    assert {name.partition("=")[0] for name in quiet} <= allowed, quiet
    right = kernel_of(stage, recipe, following(recipe))
    assert all(v.verdict == "pass" for v in check_stage(right, CASES[stage], "cpu"))


def _rows(call: StageCall, extra: int = 0):
    made = stages.reference(call.stage, call.case, call.inputs, DEEPGEMM_GEMM)["rows"]
    count, width = made.shape
    out = call.new("out", (count + extra, width), (width, 1), made.dtype)
    out[:count] = made
    return made, out


def _fates(count: int, extra: int, fate: Fate) -> dict[str, torch.Tensor]:
    fates = torch.full((count + extra,), Fate.LIVE, dtype=torch.int8)
    fates[count:] = fate
    return {"out": fates}


def touches(call: StageCall) -> Produced:
    made, out = _rows(call, 3)
    out[-2, 5] = 1.0
    return Produced(outputs={"rows": made}, fates=_fates(len(made), 3, Fate.UNTOUCHED))


def junk_for_zero(call: StageCall) -> Produced:
    made, out = _rows(call, 3)
    out[len(made) :] = -0.0
    return Produced(outputs={"rows": made}, fates=_fates(len(made), 3, Fate.ZERO))


def forgets(call: StageCall) -> Produced:
    made, _ = _rows(call, 1)
    return Produced(outputs={"rows": made})


def beside(call: StageCall) -> Produced:
    made, out = _rows(call)
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0.0)
    return Produced(outputs={"rows": made})


def miscounts(call: StageCall) -> Produced:
    made, _ = _rows(call)
    return Produced(outputs={"rows": made}, fates=_fates(len(made), 1, Fate.JUNK))


def spoils_its_input(call: StageCall) -> Produced:
    made, _ = _rows(call)
    assert isinstance(call.inputs, GroupedRows)
    call.inputs.a_scale[0, 0] += 1.0
    return Produced(outputs={"rows": made})


def reads_its_output(call: StageCall) -> Produced:
    made, out = _rows(call, 1)
    changed = made.clone()
    changed[0, 0] = out.view(torch.uint8)[-1, 0].to(made.dtype)
    return Produced(outputs={"rows": changed}, fates=_fates(len(made), 1, Fate.UNTOUCHED))


def narrow(call: StageCall) -> Produced:
    made, _ = _rows(call)
    return Produced(outputs={"rows": made[:, :-1]})


def wrong_type(call: StageCall) -> object:
    return _rows(call)[0]


def raises(call: StageCall) -> Produced:
    raise RuntimeError(f"CUDA error: an illegal memory access in {call.stage}")


FAULTS = [
    (touches, "write_set", "writes row 49 of out, declared untouched"),
    (junk_for_zero, "write_set", "does not zero row 48 of out"),
    (forgets, "write_set", "leaves row 48 of out unwritten"),
    (beside, "write_set", "writes beside out"),
    (miscounts, "write_set", "declares 49 fates for 48 rows of out"),
    (spoils_its_input, "input_kept", "writes to its input"),
    (reads_its_output, "rerun", "gives other bits a second time"),
    (narrow, "exact", "returned {'rows': "),
    (wrong_type, "exact", "returned Tensor, expected a Produced"),
    (raises, "exact", "RuntimeError: CUDA error: an illegal memory access in fc1"),
]


@pytest.mark.parametrize(("fault", "check", "words"), FAULTS, ids=lambda v: getattr(v, "__name__", ""))  # fmt: skip  # noqa: E501
def test_a_fault_turns_its_check_red(fault, check: str, words: str):
    kernel = kernel_of(Stage.FC1, DEEPGEMM_GEMM, fault)
    case = dataclasses.replace(CASES[Stage.FC1])
    red = {v.check: v.message for v in check_stage(kernel, case, "cpu") if v.verdict == "fail"}
    assert words in red[check], red
