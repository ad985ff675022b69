"""What a red check says: the cause first, one cause once, and nothing that is not so."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.expect import record
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.session.watch import Overrun, current
from moe_parity.kernels import Call, Fate, Produced
from moe_parity.references.language import InputDtype
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import STAGES
from moe_parity.suites.planted import CASES, Run, following, kernel_of, red, right

FLOATS = [name for name in STAGES if name not in ("align",)]


def judged(stage: str, fault: Run) -> dict[str, Verdict]:
    return {v.check: v for v in check(kernel_of(stage, fault), CASES[stage], "cpu")}


def exact_of(stage: str, found: dict[str, str]) -> str:
    return found[f"exact_{stage}" if f"exact_{stage}" in found else "exact"]


def last_of(out: dict[str, Tensor], call: Call) -> Tensor:
    """Return the output that every kernel of the stage returns, as a flat view."""
    return list(out.values())[-1].view(-1)


# --- memory -------------------------------------------------------------------------------------


def reads_its_workspace(call: Call) -> dict[str, Tensor]:
    """Add what scratch memory held, a NaN under the first poison, to the last row."""
    out = right(call)
    last = last_of(out, call)
    held = call.new("workspace", (4,), dtype=torch.float32)
    if last.dtype.is_floating_point:
        last[-3:] += held[0].to(last.dtype)
    else:
        last[-3:] ^= held.view(last.dtype)[0]
    return out


def returns_its_workspace(call: Call) -> dict[str, Tensor]:
    """Copy what scratch memory held."""
    out = right(call)
    last = last_of(out, call)
    last[-3:] = call.new("workspace", (16,), dtype=last.dtype)[:3]
    return out


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", [reads_its_workspace, returns_its_workspace])
def test_a_poisoned_read_is_called_one(stage: str, fault: Run):
    """First of all by the check of bits; nothing was left unwritten, and no decision matters."""
    found = red(kernel_of(stage, fault), CASES[stage])
    message = exact_of(stage, found)
    start = f"{stage} of faulty reads memory that nobody has written: with other contents it gives "
    assert message.startswith(start)
    assert "No recipe" not in message
    assert "The bits match" not in message
    assert "write_set" not in found
    assert found["rerun"].startswith(start)


def leaves_a_row(call: Call) -> dict[str, Tensor]:
    """Leave the last row that somebody owns as it was, in the last output."""
    made = right(call)
    name, value = list(made.items())[-1]
    out = call.new(name, tuple(value.shape), dtype=value.dtype)
    live = call.stage.live(call.case, call.inputs).get(name)
    rows = torch.ones(len(value), dtype=torch.bool) if live is None else live
    keep = int(rows.nonzero()[-1])
    kept = out[keep].clone()
    out.copy_(value)
    out[keep] = kept
    return made | {name: out}


@pytest.mark.parametrize("stage", STAGES)
def test_an_unwritten_row_is_called_one(stage: str):
    """First of all by the check of bits, with its place and how much of it there is."""
    found = red(kernel_of(stage, leaves_a_row), CASES[stage])
    message = exact_of(stage, found)
    assert message.startswith(f"{stage} of faulty leaves ")
    assert " unwritten, which is live; " in message
    assert "No recipe" not in message
    assert found["write_set"].rstrip(".") == message.partition(" Against")[0].rstrip(".")


@pytest.mark.parametrize("stage", STAGES)
def test_a_kernel_that_is_not_repeatable_is_called_one(stage: str):
    """Not memory: the same contents, and other bits at every call."""
    calls = itertools.count(1)

    def counts(call: Call) -> dict[str, Tensor]:
        out = right(call)
        last = last_of(out, call)
        last[-1] = next(calls)
        return out

    message = exact_of(stage, red(kernel_of(stage, counts), CASES[stage]))
    assert "gives other bits when it is called again, on memory with the same contents" in message


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (-3, "writes beside out, 12 bytes before its first row"),
        (2 * 260 + 256, "writes beside out, in the gap behind row 2, 3104 bytes from its start"),
        (23 * 260 + 257, "writes beside out, 4 bytes behind its last row"),
    ],
    ids=["before", "gap", "behind"],
)
def test_what_is_hit_beside_an_output_is_said_by_its_rows(offset: int, words: str):
    """Rows of 256 fp32 numbers with a gap of four behind each."""
    case = dataclasses.replace(CASES["combine"], dtype=InputDtype.FP32)

    def hits(call: Call) -> dict[str, Tensor]:
        out = call.new("out", (24, 256), (260, 1), torch.float32).copy_(right(call)["out"])
        out.as_strided((1,), (1,), out.storage_offset() + offset).fill_(0)
        return {"out": out}

    assert words in red(kernel_of("combine", hits), case)["write_set"]


def test_rows_alone_that_memory_explains_have_its_cause():
    """One cause once: a row that depends on the workspace differs when it is called alone, too."""
    found = {
        v.check: v
        for v in check(kernel_of("combine", reads_its_workspace), CASES["combine"], "cpu")
        if v.failed
    }
    assert found["rerun"].cause == "poison_read"
    assert {v.cause for v in found.values() if v.cause_kind == "memory"} == {"poison_read"}
    assert not any(v.cause_kind == "batch" for v in found.values())


def test_other_memory_in_a_second_call_is_a_fault():
    """What `call.new` gave belongs to its call."""
    kept: list[Tensor] = []

    def keeps(call: Call) -> dict[str, Tensor]:
        if not kept:
            kept.append(call.new("scratch", (4,), dtype=torch.int32))
        return right(call)

    found = red(kernel_of("combine", keeps), CASES["combine"])
    assert "asks for 1 tensors when it is called again, before 2" in found["write_set"]


@pytest.mark.parametrize(
    ("fates", "words"),
    [
        ({"nosuch": Fate.LIVE}, "declares fates of nosuch, which it did not ask for"),
        ({"out": 9}, "declares the fate 9 for a row of out, which is no Fate"),
    ],
)
def test_a_fate_that_means_nothing_is_refused(fates: dict[str, int], words: str):
    def declares(call: Call) -> Produced:
        out = right(call)
        rows = len(out["out"])
        told = {name: torch.full((rows,), int(fate)) for name, fate in fates.items()}
        return Produced(outputs=out, fates=told)

    assert words in red(kernel_of("combine", declares), CASES["combine"])["write_set"]


@pytest.mark.parametrize("fates", [None, [1, 2], {"out": [0, 0]}], ids=["none", "list", "of-lists"])
def test_fates_that_are_no_tensors_are_refused(fates: object):
    """In a sentence, as every other wrong return."""

    def declares(call: Call) -> Produced:
        return Produced(outputs=right(call), fates=fates)

    message = red(kernel_of("combine", declares), CASES["combine"])["exact"]
    assert "expected a mapping from the name of an output to an int8 tensor" in message


def test_what_a_kernel_sets_for_its_process_ends_with_its_call():
    """Otherwise the reference would compute under it, and agree."""

    def flushes(call: Call) -> dict[str, Tensor]:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_flush_denormal(True)
        return right(call)

    def leaves_it_so(call: Call) -> dict[str, Tensor]:
        out = right(call)
        torch.set_flush_denormal(True)
        return out

    message = red(kernel_of("act_quant", flushes), CASES["act_quant"])["exact"]
    assert message.startswith("Unexplained ")
    assert not red(kernel_of("act_quant", leaves_it_so), CASES["act_quant"])
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert float(torch.tensor(2.0**-149) * 1) > 0


def test_a_case_that_takes_too_long_is_a_red_record():
    """With the kernel, the case, and a line that reproduces it; what was found before stays."""
    told: list[dict[str, object]] = []

    class Recorder:
        def add(self, record_fields: dict[str, object]) -> None:
            told.append(record_fields)

    def verdicts():
        yield Verdict(check="finite", verdict="pass")
        raise Overrun

    kernel = kernel_of("combine", right)
    seconds = current().seconds
    with pytest.raises(Overrun, match="combine of faulty ran longer than the limit of"):
        record(kernel, CASES["combine"], "cpu", verdicts(), Recorder())
    assert [(r["check"], r["verdict"]) for r in told] == [("finite", "pass"), ("exact", "fail")]
    case = CASES["combine"].id
    assert f"ran longer than the limit of {seconds:g} s on {case}" in str(told[1]["message"])
    assert str(told[1]["repro"]).startswith(f"parity repro 'faulty-{case}'")


# --- numbers ------------------------------------------------------------------------------------

CODED = ("act_quant", "weight_quant", "swiglu_quant")


def negates(call: Call) -> dict[str, Tensor]:
    out = right(call)
    out["codes"] ^= 0x80
    return out


def negates_zeros(call: Call) -> dict[str, Tensor]:
    out = right(call)
    zeros = out["codes"] & 0x7F == 0
    assert bool(zeros.any())
    out["codes"][zeros] ^= 0x80
    return out


@pytest.mark.parametrize("stage", CODED)
@pytest.mark.parametrize("fault", [negates, negates_zeros])
def test_the_sign_of_a_code_counts(stage: str, fault: Run):
    """Of every code, and of zero alone."""
    verdict = judged(stage, fault)["exact"]
    assert verdict.failed
    if fault is negates:
        assert verdict.differing == verdict.code_flips > 0.99 * verdict.compared * 0.9
    else:
        assert "(signs of zero alone)" in verdict.message


@pytest.mark.parametrize("stage", CODED)
def test_what_is_equal_is_not_called_a_match(stage: str):
    """Only codes differ: no decision is said to fit the scales, and no distance of 0 ulp stands."""

    def one_code(call: Call) -> dict[str, Tensor]:
        out = right(call)
        flat = out["codes"].view(-1)
        flat[int(((flat & 0x7F > 8) & (flat & 0x7F < 0x70)).nonzero()[0])] += 1
        return out

    verdict = judged(stage, one_code)["exact"]
    assert "scales equal, 1 of " in verdict.message
    assert "codes (at most 1 step)" in verdict.message
    assert " of codes: got" not in verdict.message
    assert "scales match with" not in verdict.message
    assert "ulp" not in verdict.message
    assert verdict.max_ulp is None


def test_a_nan_has_no_distance():
    """It is counted, and the distance is that of the others."""

    def spoils(call: Call) -> dict[str, Tensor]:
        out = right(call)
        flat = out["out"].view(-1)
        flat[0] = float("nan")
        flat[1:2].view(torch.int16).add_(2)
        return out

    message = judged("combine", spoils)["exact"].message
    assert "2 of 6144 outputs (1 NaN on one side alone, others at most 2 ulp)" in message
    only = following(OURS)

    def nan_alone(call: Call) -> dict[str, Tensor]:
        out = only(call)
        out["out"].view(-1)[0] = float("nan")
        return out

    assert (
        "1 of 6144 outputs (1 NaN on one side alone)"
        in judged("combine", nan_alone)["exact"].message
    )
