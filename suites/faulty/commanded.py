"""Hold planted kernels to the command itself: `parity check`, a process for several of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_parity.reports.records import ITEM_CHECK, Record
from moe_parity.reports.results import FILE_NAME, read
from moe_parity.suites.faulty.measuring import Found
from moe_parity.suites.faulty.planting import REGISTERED, Fault

LIMIT = 1800
"""Seconds after which a command is given up."""


def arguments(
    faults: Sequence[Fault], seed: int | None, tests: Sequence[str], workers: int | None
) -> list[str]:
    """Return what follows `parity`; without a seed the profile is ci, with one the default."""
    names = " or ".join(fault.name for fault in faults)
    chosen = f"({names}) and ({' or '.join(tests)})" if tests else names
    drawn = ["--profile", "ci"] if seed is None else ["--seed", str(seed)]
    spread = [] if workers is None else ["-n", str(workers)]
    return ["check", "--kernel", str(REGISTERED), "-k", chosen, "--device", "cpu", *drawn, *spread]


def ran(args: Sequence[str]) -> list[Record]:
    """Run the command and return its records; raises OSError where it wrote none."""
    with tempfile.TemporaryDirectory() as out:
        # what another seed has found is not to be tried first, and no variable is to choose
        kept = {name: word for name, word in os.environ.items()
                if name != "CI" and not name.startswith("MOE_PARITY_")}  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "moe_parity.harness", *args, "--out", out],
            env=kept | {"HYPOTHESIS_STORAGE_DIRECTORY": f"{out}/hypothesis"},
            capture_output=True, text=True, check=False, timeout=LIMIT,
        )  # fmt: skip
        if not Path(out, FILE_NAME).exists():
            raise OSError(f"parity check wrote no results: {done.stdout}{done.stderr}")
        return list(read(Path(out, FILE_NAME)).records)


def told(fault: Fault, records: Iterable[Record]) -> tuple[Found, list[str]]:
    """Return what the records of a fault say, and the tests that were red."""
    found, red = Found(), []
    for record in records:
        if record.kernel != fault.name:
            continue
        found.cases += record.check != ITEM_CHECK
        if record.verdict in ("pass", "skip"):
            continue
        if record.nodeid not in red:
            red.append(record.nodeid)
        if record.check != ITEM_CHECK:
            suite = f"test_{record.suite}"
            cause = record.cause if record.cause_kind else ""
            found.see(fault, suite, cause, tuple(record.alternatives))
    return found, red


def commanded(
    faults: Sequence[Fault], seed: int | None, tests: Sequence[str], workers: int | None = None
) -> Iterator[dict[str, Any]]:
    """Run the command on some faults at once; yield a line of what it said of each.

    ``records`` counts those of checks; ``seconds`` are the process's, shared by ``together``.
    """
    began = time.monotonic()
    records = ran(arguments(faults, seed, tests, workers))
    seconds = round(time.monotonic() - began, 1)
    for fault in faults:
        found, red = told(fault, records)
        yield {
            "name": fault.name, "stage": fault.stage, "seed": seed, "suite": found.suite,
            "named": found.named, "causes": found.causes, "way": "command",
            "tests": " ".join(tests), "red": len(red), "records": found.cases,
            "suites": sorted({test.partition("::")[0].rpartition("/")[2] for test in red}),
            "seconds": seconds, "together": len(faults),
        }  # fmt: skip
