"""Failures that were found before: the corpus beside this file, and the caller's own.

A file is the failure of one kernel on one case. Those in suites/corpus are of kernels that come
with the project; those in ./parity-corpus are tried where their kernel is, so that
`parity check --kernel FILE` tries what `parity fuzz FILE` has found.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from moe_parity.harness.checks.expect import Recorder, expect, needs
from moe_parity.harness.checks.flow import check
from moe_parity.harness.fuzz import corpus
from moe_parity.kernels import all_kernels, find
from moe_parity.references.errors import ParityError

OURS = Path(__file__).parent / "corpus"
CALLERS = Path.cwd() / corpus.FOLDER


def entries(ours: Path, callers: Path) -> list[ParameterSet]:
    """Return a parameter for each file: all of ours, and the caller's whose kernels are here."""
    here = {kernel.name for kernel in all_kernels()}
    found = corpus.files(ours)
    found += [path for path in corpus.files(callers) if corpus.kernel_of(path) in here]
    return [
        pytest.param(path, id=path.stem, marks=pytest.mark.moe(kernel=corpus.kernel_of(path)))
        for path in found
    ]


ENTRIES = entries(OURS, CALLERS)


def replayed(path: Path, device: str, recorder: Recorder) -> None:
    """Run what a file is about, after the calls that came before it."""
    try:
        entry = corpus.load(path)
        kernel = find(entry.kernel)
    except ParityError as error:
        pytest.fail(str(error), pytrace=False)
    needs(kernel, entry.case, device)
    for case in entry.failure.after:
        list(check(kernel, case, device))
    expect(kernel, entry.case, device, recorder)


if ENTRIES:  # a parameter without values would be a skip that says nothing

    @pytest.mark.parametrize("path", ENTRIES)
    def test_what_failed_before_passes(path: Path, parity_device: str, parity_recorder: Recorder):
        replayed(path, parity_device, parity_recorder)


def test_no_two_entries_are_one():
    """Each file is named by what is in it, so that a failure is kept once."""
    ours = corpus.files(OURS)
    assert {path.name for path in ours} == {
        corpus.name_of(entry.kernel, entry.failure) for entry in map(corpus.load, ours)
    }
