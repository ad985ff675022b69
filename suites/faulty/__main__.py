"""Measure every planted fault: ``python -m moe_parity.suites.faulty [NAMES] [--seeds N]``.

By the functions of the suites, or with ``--command`` by `parity check` itself.  A line of JSON for
each kernel and seed, so that a run can be stopped and gone on with.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_parity.kernels import load_file
from moe_parity.suites.faulty.commanded import commanded
from moe_parity.suites.faulty.measuring import measured
from moe_parity.suites.faulty.planting import REGISTERED, Fault
from moe_parity.suites.faulty.table import FAULTS

Line = dict[str, Any]


def _by_functions(faults: list[Fault], seeds: list[int | None], known: list[Line]) -> Iterator[Any]:
    """Yield a line for each fault and seed that is not known."""
    ours = [line for line in known if "way" not in line]
    done = {(line["name"], line["seed"]) for line in ours}
    suites = {line["name"]: line["suite"] for line in ours if line["seed"] is None}
    for seed in seeds:
        for fault in faults:
            if (fault.name, seed) in done:
                continue
            if seed is not None and suites.get(fault.name) != "test_drawn":
                continue  # the command holds those of the other suites to seeds
            yield []
            found = measured(fault, seed, drawn_only=seed is not None)
            if seed is None:
                suites[fault.name] = found.suite
            yield [{
                "name": fault.name, "stage": fault.stage, "seed": seed, "suite": found.suite,
                "named": found.named, "causes": found.causes, "cases": found.cases,
            }]  # fmt: skip


def _by_command(
    faults: list[Fault], seeds: list[int | None], known: list[Line], own: argparse.Namespace
) -> Iterator[Any]:
    """Yield the lines of some faults at a time that are not known."""
    done = {(line["name"], line["seed"], line["tests"]) for line in known if "way" in line}
    for seed in seeds:
        left = [fault for fault in faults if (fault.name, seed, own.tests) not in done]
        for start in range(0, len(left), own.together):
            yield []
            some = left[start : start + own.together]
            yield list(commanded(some, seed, own.tests.split(), own.workers))


def main() -> None:
    """Append what is measured to a file; what stands there already is not measured again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="parts of names of kernels; all by default")
    parser.add_argument("--seeds", type=int, default=0, help="seeds besides the profile ci")
    parser.add_argument("--out", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--command", action="store_true", help="run `parity check` itself")
    parser.add_argument("--tests", default="", help="words of its -k: tests of one of these")
    parser.add_argument("--together", type=int, default=8, help="kernels in one of its processes")
    parser.add_argument("--workers", type=int, help="its -n; its own default without")
    own = parser.parse_args()
    load_file(REGISTERED)  # another process, of a state that no call has touched, finds them there
    known = own.out.read_text().splitlines() if own.out.exists() else []
    lines = [json.loads(line) for line in known]
    chosen = [f for f in FAULTS if not own.names or any(part in f.name for part in own.names)]
    seeds = [None, *range(1, own.seeds + 1)]
    ways = (
        _by_command(chosen, seeds, lines, own)
        if own.command
        else _by_functions(chosen, seeds, lines)
    )
    began = start = time.monotonic()
    for made in ways:
        if not made:  # the next one begins
            start = time.monotonic()
            if start - began > 60 * own.minutes:
                return
            continue
        with own.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in made)
        seconds = time.monotonic() - start
        sys.stdout.writelines(f"{json.dumps(line)} {seconds:.1f} s\n" for line in made)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
