"""What the one flow of checks could have caught: in every stage, each check has a planted fault.

The kernels here compute what their recipe says and make one mistake each.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.checks.flow import check
from moe_parity.kernels import Call
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Hazard, Recipe, ScaleFormat
from moe_parity.references.recipes.deepgemm import DEEPGEMM_GEMM
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.recipes.vllm import (
    VLLM_BATCHED,
    VLLM_DEEPGEMM,
    VLLM_FUSED_SILU,
    VLLM_TRITON,
)
from moe_parity.references.stages import STAGES
from moe_parity.suites.aimed import aimed, none_shows
from moe_parity.suites.planted import CASES, Run, following, kernel_of, red, right

# --- one fault for each check -------------------------------------------------------------------


def flips_a_sign(call: Call) -> dict[str, Tensor]:
    out = right(call)
    last = list(out.values())[0 if call.stage.name != "layer" else -1]
    flat = last.view(-1) if last.is_contiguous() else last.reshape(-1)
    if last.dtype is torch.uint8:
        index = int((flat & 0x7F != 0).nonzero()[0, 0])
        flat[index] ^= 0x80
    elif last.dtype.is_floating_point:
        flat[int((flat != 0).nonzero()[0, 0])] *= -1
    else:
        flat[0] += 1
    return out


def spoils_its_input(call: Call) -> dict[str, Tensor]:
    out = right(call)
    target = call.stage.handed(call.inputs)[0]
    target.view(-1)[:1] = 1 if target.dtype is torch.uint8 else 3.0
    target.view(-1)[:1] += 1
    return out


def makes_nan(call: Call) -> dict[str, Tensor]:
    out = right(call)
    last = list(out.values())[-1 if call.stage.name in ("layer", "combine") else 0]
    last.view(-1)[0] = 0x7F if last.dtype is torch.uint8 else float("nan")
    return out


def forgets(call: Call) -> dict[str, Tensor]:
    """Leave the last element of what somebody owns as it was."""
    made = {name: value.clone() for name, value in right(call).items()}
    live = call.stage.live(call.case, call.inputs)
    for name, value in made.items():
        out = call.new(name, tuple(value.shape), dtype=value.dtype)
        rows = live.get(name, torch.ones(len(value), dtype=torch.bool)).nonzero()[:, 0]
        keep = out[rows[-1]].clone()
        out.copy_(value)
        out[rows[-1]] = keep
        made[name] = out
    return made


def beside(call: Call) -> dict[str, Tensor]:
    out = right(call)
    first = next(iter(out.values()))
    first.as_strided((1,), (1,), first.storage_offset() + first.numel()).fill_(0)
    return out


def reads_its_output(call: Call) -> dict[str, Tensor]:
    """Let what a row of scratch memory held before the call into the result."""
    out = right(call)
    held = int(call.new("scratch", (16,), dtype=torch.uint8)[0])
    last = list(out.values())[-1]
    if held == 0xFF:
        last.view(-1)[-1] = 3 if not last.dtype.is_floating_point else 3.0
    return out


def knows_the_batch(call: Call) -> dict[str, Tensor]:
    """Compute another number for the first row of a small batch."""
    out = right(call)
    whole = CASES[call.stage.name]
    if (call.case.m, call.case.i) != (whole.m, whole.i):
        last = list(out.values())[-1 if call.stage.name in ("layer", "combine") else 0]
        live = call.stage.live(call.case, call.inputs).get(next(iter(out)))
        row = 0 if live is None else int(live.nonzero()[0, 0])
        last[row, :4] = 7 if not last.dtype.is_floating_point else 7.0
    return out


def refuses(call: Call) -> dict[str, Tensor]:
    raise ParityError(f"takes contiguous rows, not those of {call.stage}.")


def breaks(call: Call) -> dict[str, Tensor]:
    raise RuntimeError(f"CUDA error: an illegal memory access in {call.stage}, contiguous or not")


FAULTS: tuple[tuple[Run, str, str], ...] = (
    (flips_a_sign, "exact", " of faulty"),
    (spoils_its_input, "input_kept", "writes to its input"),
    (makes_nan, "finite", "is not finite at"),
    (forgets, "write_set", "unwritten, which is live"),
    (beside, "write_set", "writes beside"),
    (reads_its_output, "rerun", "reads memory that nobody has written: with other contents"),
    (knows_the_batch, "row_subset", "the rows alone give other bits at"),
    (refuses, "exact", "ParityError: takes contiguous rows"),
    (breaks, "exact", "RuntimeError: CUDA error: an illegal memory access"),
)
NOT_THERE = {
    ("align", "finite"): "integers are finite",
    ("align", "row_subset"): "a block holds the pairs of all tokens",
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("fault", "name", "words"), FAULTS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_fault_turns_its_check_red(
    stage: str, fault: Run, name: str, words: str, parity_recorder: Recorder
):
    if (stage, name) in NOT_THERE:
        pytest.skip(f"{stage} has no {name}: {NOT_THERE[stage, name]}")
    check_name = f"exact_{stage}" if stage == "layer" and name == "exact" else name
    found = red(kernel_of(stage, fault), CASES[stage])
    raised = fault in (refuses, breaks)
    message = found.get("exact" if raised else check_name, "")
    dead = words in message
    claim(
        parity_recorder, "fault_seen", "" if dead else f"{name} of {stage} is not red: {found}",
        stage=stage, nearest_mutant=fault.__name__, device="cpu", compared=1, could_show=int(dead),
    )  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_kernel_without_a_fault_is_green(stage: str):
    verdicts = list(check(kernel_of(stage, right), CASES[stage], "cpu"))
    assert {v.verdict for v in verdicts} <= {"pass", "skip"}, [v.message for v in verdicts]
    assert sum(v.verdict == "pass" for v in verdicts) >= 4


# --- every output, every input ------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_in_any_output_is_red(stage: str):
    """One bit of one output; of a layer the check of the stage that makes it, and of no other."""
    case = CASES[stage]
    inputs = STAGES[stage].inputs(case)
    for name in STAGES[stage].outputs(case, inputs):

        def flips(call: Call, name: str = name) -> dict[str, Tensor]:
            out = right(call)
            live = call.stage.live(call.case, call.inputs).get(name)
            row = 0 if live is None else int(live.nonzero()[0, 0])
            values = out[name][row].view(-1)
            values.view(torch.uint8)[:1] ^= 1
            return out

        found = {check for check in red(kernel_of(stage, flips), case) if check.startswith("exact")}
        if stage != "layer":
            assert found == {"exact"}, name
            continue
        made = following()(Call(case=case, stage=STAGES[stage], inputs=inputs, allocate=_plain))
        makers = {
            f"exact_{inner.stage}"
            for inner in STAGES[stage].inner(case, inputs, made)
            if any(got.data_ptr() == made[name].data_ptr() for got in inner.got.values())
        }
        last = name == list(made)[-1]
        assert found >= (makers | ({"exact_layer"} if last else set())), name
        assert makers or last, name


def _plain(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.mark.parametrize("stage", STAGES)
def test_writing_to_any_input_is_red(stage: str):
    """Whichever tensor it is; what was written is taken back before anything is compared."""
    case = CASES[stage]
    count = len(STAGES[stage].handed(STAGES[stage].inputs(case)))
    for number in range(count):

        def spoils(call: Call, number: int = number) -> dict[str, Tensor]:
            out = right(call)
            target = call.stage.handed(call.inputs)[number]
            if target.numel():
                target.view(-1).view(torch.uint8)[:1] ^= 1
            return out

        assert set(red(kernel_of(stage, spoils), case)) == {"input_kept"}, number


# --- refusals -----------------------------------------------------------------------------------

STRIDED = [name for name in STAGES if STAGES[name].reads.get("hazard", frozenset()) is None]


@pytest.mark.parametrize("stage", STRIDED)
@pytest.mark.parametrize("hazard", [Hazard.STRIDED, Hazard.TRANSPOSED])
def test_what_counts_as_a_refusal(stage: str, hazard: Hazard):
    """A ParityError on input that is not contiguous, and nothing else, whatever its text says."""
    case = dataclasses.replace(CASES[stage], hazard=hazard)
    (verdict,) = check(kernel_of(stage, refuses), case, "cpu")
    assert (verdict.verdict, verdict.check) == ("skip", "exact")
    assert verdict.reason.startswith("refused: takes contiguous rows")
    assert "RuntimeError" in red(kernel_of(stage, breaks), case)["exact"]
    assert not red(kernel_of(stage, right), case)


def reads_the_gaps(call: Call) -> dict[str, Tensor]:
    """Take the rows as if they lay one after the other."""
    x = call.inputs.x
    flat = x.as_strided(x.shape, (x.shape[1], 1))
    return right(dataclasses.replace(call, inputs=dataclasses.replace(call.inputs, x=flat)))


def test_a_kernel_that_reads_the_gaps_is_red():
    case = dataclasses.replace(CASES["act_quant"], hazard=Hazard.STRIDED)
    message = red(kernel_of("act_quant", reads_the_gaps), case)["exact"]
    assert message.startswith("Rows read with their length as the stride in act_quant of faulty: ")


# --- decisions ----------------------------------------------------------------------------------

FOLLOWED = [
    ("fc1", DEEPGEMM_GEMM), ("fc1", VLLM_TRITON), ("fc2", VLLM_TRITON), ("swiglu", VLLM_TRITON),
    ("swiglu_quant", VLLM_FUSED_SILU), ("swiglu_quant", VLLM_BATCHED),
    ("swiglu_quant", VLLM_DEEPGEMM), ("combine", VLLM_DEEPGEMM), ("combine", VLLM_TRITON),
]  # fmt: skip
GROUPS = 256
"""Groups of a part of the pool that are looked at: every change shows in a part of them."""


@pytest.mark.parametrize(("stage", "recipe"), FOLLOWED, ids=lambda v: getattr(v, "name", v))
def test_a_wrong_decision_is_red_and_named(stage: str, recipe: Recipe, parity_recorder: Recorder):
    """One neighbour for every decision: red, and named among those that have the same bits."""
    own = STAGES[stage]
    shown = [n for n in own.neighbours(recipe) if not none_shows(own, recipe, n[1])]
    one_each = {label.partition("=")[0]: (label, changed) for label, changed in shown}
    for name, changed in one_each.values():
        kernel = kernel_of(stage, following(changed), recipe)
        for case, inputs in aimed(own, name.partition("=")[0], GROUPS):
            verdict = next(iter(check(kernel, case, "cpu", inputs=inputs)))
            if verdict.verdict == "fail":
                break
        else:
            pytest.fail(f"{stage} of {recipe.name}: {name} is green on all its aimed inputs")
        assert name in verdict.causes, verdict.message
        claim(
            parity_recorder, "mutant_told", stage=stage, recipe=recipe.name, device="reference",
            compared=verdict.compared, could_show=verdict.differing, nearest_mutant=name,
            mutant_distance=verdict.differing,
        )  # fmt: skip


def test_two_changes_at_once_are_named():
    """Where no single change gives all bits, two do: one for the codes, one for the scales."""
    case = dataclasses.replace(CASES["act_quant"], scale=ScaleFormat.FP32)
    labels = dict(STAGES["act_quant"].neighbours(OURS))

    def mixed(call: Call) -> dict[str, Tensor]:
        one, two = (
            call.stage.reference(call.case, call.inputs, labels[name])
            for name in ("quant.apply=mul_recip", "quant.scale_form=div_448")
        )
        return {"codes": one["codes"], "scales": two["scales"]}

    (verdict,) = [
        v for v in check(kernel_of("act_quant", mixed), case, "cpu") if v.check == "exact"
    ]
    assert "quant.scale_form=div_448 and quant.apply=mul_recip" in verdict.causes
