"""Faults of memory in kernels of several stages, judged by the flow that judges every kernel.

Orders of programs that the harness chooses, and one case many times.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux only")
import torch

from moe_parity.harness.calling.run import other_order
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.repeat import repeat
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.cli.commands import main
from moe_parity.kernels import Kernel
from moe_parity.kernels import virtual_gpu as vg
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.references.stages import STAGES
from moe_parity.suites import racing
from moe_parity.suites.planted import CASES, following, kernel_of

# --- kernels of a stage, judged ------------------------------------------------------------------


QUANT = Case(m=8, h=256)


def judged(kernel: Kernel) -> list[Verdict]:
    stage = kernel.stage.name
    case = QUANT if stage == "act_quant" else CASES[stage]
    return [v for v in check(kernel, case, "cpu") if v.failed]


def test_the_kernels_without_a_fault_are_green() -> None:
    assert not judged(racing.quantizer())
    assert not judged(racing.counter(zeroed=True))


@pytest.mark.parametrize(
    ("kernel", "cause", "words"),
    [
        (
            racing.quantizer("rows overlap"), "race",
            r"Race in act_quant of faulty on \S+: programs \(0, 0, 0\) and \(1, 0, 0\) of quantize "
            r"\(line \d+ of racing\.py\) both store element \[1, 1?\d?\d\] of codes_ptr",
        ),
        (
            racing.quantizer("one scale"), "race",
            r"program \(0, 0, 0\) of quantize \(line \d+ of racing\.py\) stores different values "
            r"to element \[0, 0\] of scales_ptr \(float32 \[8, 2\]\) from several lanes",
        ),
        (
            racing.accumulator(), "race",
            r"Race in combine of faulty on \S+: program \(1, 0, 0\) of add_pairs \(line \d+ of "
            r"racing\.py\) loads element \[0, 0\] of out_ptr \(bfloat16 \[24, 256\]\), which "
            r"program \(0, 0, 0\) \(line \d+ of racing\.py\) stores",
        ),
        (
            racing.counter(zeroed=False), "unwritten_read",
            r"Unwritten read in align of faulty on \S+: count_pairs \(line \d+ of racing\.py\), "
            r"program \(0, 0, 0\): element \[\d\] of counts_ptr \(int32 \[5\]\) is read, and nobod",
        ),
        (
            racing.handed_over(), "unwritten_read",
            r"Unwritten read in swiglu of faulty on \S+: halves \(line \d+ of racing\.py\), "
            r"program \(0, 0, 0\): element \[0, 255\] of half_ptr \(bfloat16 \[64, 256\]\) is read",
        ),
        (
            racing.quantizer("past the end"), "out_of_bounds",
            r"Out of bounds in act_quant of faulty on \S+: quantize \(line \d+ of racing\.py\), "
            r"program \(3, 0, 0\): a store of 4 bytes is outside the tensors .* scales_ptr",
        ),
    ],
    ids=["rows-overlap", "one-scale", "load-add-store", "counts", "handed-over", "past-the-end"],
)  # fmt: skip
def test_a_fault_of_memory_is_the_cause(kernel: Kernel, cause: str, words: str) -> None:
    (verdict,) = judged(kernel)
    assert (verdict.cause_kind, verdict.cause) == ("memory", cause)
    assert re.search(words, verdict.message), verdict.message


# --- orders ---------------------------------------------------------------------------------------


def test_the_harness_runs_a_case_backwards_or_shuffled() -> None:
    kernel, seen = racing.counter(zeroed=True), []
    for m in range(1, 9):
        count, out = (torch.zeros(n, dtype=torch.int32) for n in (1, 16))
        with other_order(kernel, Case(m=m, e=5, k=3), "cpu"):
            vg.dispatch(racing.ranks, (4,), count, out)
        seen.append(out.tolist())
    backwards = [order == list(range(15, -1, -1)) for order in seen]
    assert any(backwards)
    assert not all(backwards)
    assert list(range(16)) not in seen


# --- one case many times -------------------------------------------------------------------------


def sometimes(stage: str, places: dict[int, list[tuple[int, int]]]) -> Kernel:
    """Return a kernel that in some of its calls, counted from 0, changes a few elements."""
    calls = iter(range(100))

    def run(call):
        ((name, out),) = following()(call).items()
        for place in places.get(next(calls), []):
            out[place] += 64
        return {name: out}

    return kernel_of(stage, run)


def test_repeated_runs_say_rows_and_tiles_that_differ() -> None:
    places = {2: [(3, 130), (3, 255)], 4: [(3, 129)], 5: [(9, 0)]}
    verdict = repeat(sometimes("combine", places), CASES["combine"], "cpu", 8)
    assert verdict.failed
    assert (verdict.cause_kind, verdict.cause) == ("memory", "not_repeatable")
    assert "3 of 7 runs differ from the first: " in verdict.message
    first, second = verdict.message.partition("first: ")[2].split("; ")
    assert first == "out at token 3, columns 128 to 255 (3 elements in 2 runs)"
    assert second == "out at token 9, columns 0 to 127 (1 elements in 1 runs)."
    assert (verdict.compared, verdict.differing) == (7 * 24 * 256, 4)


def test_rows_that_are_nobodys_may_differ_between_runs() -> None:
    case = Case(m=4, e=4, k=2, ep_size=2)
    inputs = STAGES["fc1"].inputs(case, "cpu")
    live = next(iter(STAGES["fc1"].live(case, inputs).values()))
    for row, red in ((int((~live).nonzero()[0]), False), (int(live.nonzero()[0]), True)):
        kernel = sometimes("fc1", {1: [(row, 0)]})
        assert repeat(kernel, case, "cpu", 2).failed is red


def test_a_case_that_is_repeated_needs_two_runs_and_equal_ones_are_green() -> None:
    assert not repeat(sometimes("combine", {}), CASES["combine"], "cpu", 3).failed
    with pytest.raises(ParityError, match="at least 2 times, got 1"):
        repeat(sometimes("combine", {}), CASES["combine"], "cpu", 1)


def test_the_command_repeats_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    id_ = "ours_act_quant-fp32-m2-h128"
    assert main(["repro", id_, "--repeat", "3"]) == 0
    # codes and a scale for each of two rows, twice
    assert capsys.readouterr().out.split() == (
        f"pass repeat 3 runs, {2 * 2 * 129} outputs compared with those of the first".split()
    )
    assert main(["repro", id_, "--repeat", "1"]) == 2
    assert "at least 2 times, got 1" in capsys.readouterr().err
    assert main(["repro", "ours_act_quant-fp32-m2-h128-e3", "--repeat", "2"]) == 2
