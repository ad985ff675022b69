"""Which calls a sequence has, the smallest one that is bad, and the contract that asks for it."""

from __future__ import annotations

import dataclasses

import pytest

from moe_parity.harness.cases import sequences as drawing
from moe_parity.harness.cases.sequences import base_of, sequences
from moe_parity.harness.checks import culprit
from moe_parity.harness.checks.culprit import smallest
from moe_parity.harness.checks.expect import Recorder, expect_calls
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Check, Contract, parse_id
from moe_parity.suites.planted import kernel_of, right


def test_a_sequence_comes_back_and_changes_one_word_at_a_time():
    """Every word that the stage reads and the kernel takes is changed alone, and changed back."""
    kernel = kernel_of("layer", right)
    base = base_of(kernel, "cpu")
    chosen = sequences(kernel, base, "cpu")
    assert (chosen[0], chosen[-1]) == (base, base)
    assert len(chosen) >= drawing.TEN
    changed: set[str] = set()
    for before, case, after in zip(chosen, chosen[1:], chosen[2:], strict=False):
        words = {word for word in vars(case) if getattr(case, word) != getattr(base, word)}
        if before == after == base and len(words) == 1:
            changed |= words
    wanted = {
        "seed",
        "scale",
        "mid_scale",
        "clamp",
        "h",
        "i",
        "routing",
        "k",
        "e",
        "gate",
        "hazard",
    }
    assert changed >= wanted
    rows = [case.m for case in chosen]
    assert rows.count(33) == rows.count(17) == 2


# --- the smallest sequence ----------------------------------------------------------------------


def fresh_where(bad) -> culprit.Fresh:
    """Return what plays sequences of which the last call is bad where a function says so."""
    return lambda every: [len(cases) if bad([case.m for case in cases]) else 0 for cases in every]


@pytest.mark.parametrize(("bad", "found"), [
    (lambda rows: rows[-1] == 9, [9]),
    (lambda rows: rows[-1] == 9 and 4 in rows, [4, 9]),
    (lambda rows: rows == [4, 9] or len(rows) == 10, [4, 9]),
    (lambda rows: rows[-1] == 9 and {2, 6} <= set(rows), [2, 6, 9]),
    (lambda rows: False, []),
])  # fmt: skip
def test_the_smallest_sequence_is_found(bad, found):
    """One earlier call where one is enough, else as few as all halves and quarters leave."""
    cases = [Case(m=rows) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 8, 9)]
    assert [cases[number].m for number in smallest(fresh_where(bad), cases)] == found


def test_the_number_of_calls_may_be_the_cause():
    cases = [Case(m=rows) for rows in range(1, 10)]
    found = smallest(fresh_where(lambda rows: rows[-1] == 9 and len(rows) > 4), cases)
    assert len(found) == 5
    assert found == sorted(found)


# --- contracts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [Check.SEQUENCE, Check.INVARIANCE])
def test_a_kernel_that_does_not_promise_it_is_skipped(name: Check, parity_recorder: Recorder):
    kernel = dataclasses.replace(kernel_of("act_quant", right), contract=Contract().without(name))
    with pytest.raises(pytest.skip.Exception, match=f"does not promise {name}"):
        expect_calls(kernel, name, "cpu", parity_recorder)


def test_a_repro_line_of_calls_is_read_strictly():
    assert parse_id("ours_align-fp32-m3-h128@7")[1] == Case(m=3, seed=7)
    assert parse_id("ours_align-fp32-m3-h128", 5)[1].seed == 5
    with pytest.raises(ParityError, match="'x' after the @ is no seed"):
        parse_id("ours_align-fp32-m3-h128@x")
