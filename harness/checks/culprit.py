"""Which earlier call makes a call wrong: smaller sequences, each played in a state of its own.

What a kernel keeps between calls lies in its module, its library or its driver; a process that has
not called it yet has none of it.  One child imports the kernel once and divides itself for every
sequence that is tried, or, where a GPU forbids that, plays each in a new child.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

from moe_parity.harness.calling.isolate import run_python
from moe_parity.harness.calling.own import OwnMemory
from moe_parity.harness.calling.poison import POISONS
from moe_parity.harness.checks.calls import Player
from moe_parity.kernels import Kernel, find, load_file
from moe_parity.kernels.registry import all_kernels
from moe_parity.references.language import Case, parse_id

Fresh = Callable[[Sequence[Sequence[Case]]], list[int]]
"""Sequences of cases -> the number of the first bad call in each, 0 where none is."""

TRIED = 24
"""Earlier calls that are tried as the only culprit, the nearest first."""
FIRST = 3
"""How many of them before all others."""
LONGEST = 64
"""Sequences that are tried to make one smaller that no single call explains."""
SECONDS = 120.0
CRASHED = 255
"""The status of a child that could not say which call was bad."""


def smallest(fresh: Fresh, cases: Sequence[Case]) -> list[int]:
    """Return which of the calls, counted from 0, make the last one bad, with the last one.

    The last one alone where it needs none of them; empty where all of them together do not.
    """
    last = len(cases) - 1
    pairs = [[n, last] for n in _nearest(cases)[:TRIED]]
    every = list(range(last + 1))
    # mostly it is one of the nearest: a process for each sequence takes its time on a GPU
    for tried in ([[last], *pairs[:FIRST]], [*pairs[FIRST:], every]):
        bad = fresh([[cases[n] for n in numbers] for numbers in tried])
        for numbers, number in zip(tried, bad, strict=True):
            if numbers is every:
                return _reduced(fresh, cases, every[:number]) if number else []
            if number == len(numbers):
                return numbers
    return []


def _nearest(cases: Sequence[Case]) -> list[int]:
    """Return the earlier calls, the nearest first, one for each case."""
    found: dict[Case, int] = {}
    for number in reversed(range(len(cases) - 1)):
        found.setdefault(cases[number], number)
    return list(found.values())


def _reduced(fresh: Fresh, cases: Sequence[Case], kept: list[int]) -> list[int]:
    """Return fewer calls, of which the last one stays bad: leave out halves, quarters, each."""
    size, spent = max((len(kept) - 1) // 2, 1), 0
    while spent < LONGEST:
        tried = [
            kept[:start] + kept[min(start + size, len(kept) - 1) :]
            for start in range(0, len(kept) - 1, size)
        ]
        spent += len(tried)
        bad = fresh([[cases[n] for n in numbers] for numbers in tried])
        better = next((t for t, b in zip(tried, bad, strict=True) if b == len(t)), None)
        if better is not None:
            kept = better
            size = max(min(size, (len(kept) - 1) // 2), 1)
        elif size == 1:
            break
        else:
            size //= 2
    return kept


def fresh_of(kernel: Kernel, device: str) -> Fresh:
    """Return what plays sequences of a kernel in a state that no call has touched.

    A kernel that no other process can find or import is called in this one.
    """
    known = any(kernel is one for one in all_kernels())

    def play(every: Sequence[Sequence[Case]]) -> list[int]:
        # a GPU's context does not outlive a fork
        parts = [every] if device == "cpu" else [[cases] for cases in every]
        found: list[int] = []
        for part in parts:
            numbers = _in_child(kernel, device, part) if known else None
            if numbers is None:
                numbers = [Player(kernel, device).play(cases) for cases in part]
            found += numbers
        return found

    return play


def _in_child(kernel: Kernel, device: str, every: Sequence[Sequence[Case]]) -> list[int] | None:
    """Return the numbers of the bad calls, or None where the child could not say them."""
    calls = [[f"{kernel.name}-{case.id}@{case.seed}" for case in cases] for cases in every]
    file = str(kernel.source)
    asked = json.dumps({"name": kernel.name, "file": file, "device": device, "every": calls})
    outcome = run_python(f"from {__name__} import main; main({asked!r})", seconds=SECONDS)
    try:
        numbers = json.loads(outcome.output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return numbers if isinstance(numbers, list) and len(numbers) == len(every) else None


def main(asked: str) -> None:
    """Play the sequences that ``asked`` lists, as JSON, and print the list of what they gave."""
    request = json.loads(asked)
    name, device = request["name"], request["device"]
    if all(kernel.name != name for kernel in all_kernels()):
        load_file(request["file"])
    with OwnMemory(POISONS[0]):  # what it imports, seconds long, is imported once
        kernel, numbers = find(name), []
    for calls in request["every"]:
        cases = [parse_id(call)[1] for call in calls]
        play = _divided if device == "cpu" else _played
        numbers.append(play(kernel, device, cases))
    print(json.dumps(numbers))


def _played(kernel: Kernel, device: str, cases: Sequence[Case]) -> int:
    return Player(kernel, device).play(cases)


def _divided(kernel: Kernel, device: str, cases: Sequence[Case]) -> int:
    """Return the number of the first bad call, played in a copy of this process."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = CRASHED
        try:
            status = _played(kernel, device, cases)
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # a call that takes its process down is bad; which one it was is not known
    return len(cases) if status < 0 or status == CRASHED else status
