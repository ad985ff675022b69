"""What makes a green session prove less than it seems to, in sentences.

A cause is said once: what was not written, or not chosen, explains what is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pytest

from moe_parity.harness.session.recorder import Named, item_name
from moe_parity.reports.records import ITEM_CHECK, Record, count


@dataclass(frozen=True)
class Complaint:
    """A sentence, empty where records say it already, and the exit status that it is worth."""

    sentence: str
    status: int


def complaints(
    records: Sequence[Record],
    *,
    collected: Collection[str],
    named: Named = item_name,
    kernels: Collection[str],
    expressions: Mapping[str, str],
    stopped: bool,
    passed: bool = False,
) -> list[Complaint]:
    """Return what speaks against a session.

    ``collected`` are the node ids of all tests, ``named`` says how records call them, ``kernels``
    those that were asked for, ``expressions`` what chose among the tests, by option; ``stopped``
    says that results could not be written any more, ``passed`` that pytest found no test red.
    """
    tests = [record for record in records if record.check == ITEM_CHECK]
    broken = any(record.verdict == "error" for record in tests)
    found = []
    lost = sorted(set(collected) - {record.nodeid for record in tests})
    if lost and not stopped:
        text = f"{len(lost):,} of {count(len(collected), 'collected test')} left no record"
        found.append(Complaint(f"{text}, the first is {lost[0]}", 1))
    names = Counter(named(nodeid)[1] for nodeid in collected)
    for name in sorted(name for name, times in names.items() if times > 1):
        found.append(Complaint(f"several tests are called {name}: rename all but one", 1))
    asked = _asked(expressions)
    if not lost and all(record.verdict == "skip" for record in tests):
        whose = f" of {', '.join(sorted(kernels))}" if kernels else ""
        why = f"{count(len(tests), 'test')} chosen, all skipped"
        why = why if tests else f"no test{whose} {asked or 'chosen'}"
        found.append(Complaint(f"nothing ran: {why}", int(pytest.ExitCode.NO_TESTS_COLLECTED)))
    elif not (lost or asked or broken):
        for kernel in sorted(set(kernels) - {record.kernel for record in records}):
            found.append(Complaint(f"no test is about the kernel {kernel}", 1))
    red = [record for record in records if record.verdict in ("fail", "error")]
    if red and passed:
        text = f"{count(len(red), 'record')} of tests that passed are red"
        found.append(Complaint(f"{text}, the first is {red[0].id}: {red[0].message}", 1))
    elif red:
        found.append(Complaint("", 1))
    return found


def _asked(expressions: Mapping[str, str]) -> str:
    """Return in words by which expressions tests were chosen, empty for none."""
    given = [f"{option} {text!r}" for option, text in expressions.items() if text]
    if not given:
        return ""
    return (
        f"matches {' and '.join(given)}; -k takes words of ids, the default ones too, -m the "
        "marker moe (docs/ids.md has both)"
    )
