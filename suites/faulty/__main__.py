"""Measure every planted fault: ``python -m moe_parity.suites.faulty [NAMES] [--seeds N]``.

A line of JSON for each kernel and seed, so that a run can be stopped and gone on with.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from moe_parity.kernels import load_file
from moe_parity.suites.faulty.measuring import measured
from moe_parity.suites.faulty.planting import REGISTERED
from moe_parity.suites.faulty.table import FAULTS


def main() -> None:
    """Append what is measured to a file; what stands there already is not measured again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="parts of names of kernels; all by default")
    parser.add_argument("--seeds", type=int, default=0, help="seeds besides the profile ci")
    parser.add_argument("--out", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--minutes", type=float, default=30)
    own = parser.parse_args()
    load_file(REGISTERED)  # another process, of a state that no call has touched, finds them there
    known = own.out.read_text().splitlines() if own.out.exists() else []
    done = {(line["name"], line["seed"]) for line in map(json.loads, known)}
    suites = {line["name"]: line["suite"] for line in map(json.loads, known)}
    began = time.monotonic()
    for seed in (None, *range(1, own.seeds + 1)):
        for fault in FAULTS:
            chosen = not own.names or any(part in fault.name for part in own.names)
            if not chosen or (fault.name, seed) in done:
                continue
            if seed is not None and suites.get(fault.name) != "test_drawn":
                continue  # the other suites draw nothing
            if time.monotonic() - began > 60 * own.minutes:
                return
            start = time.monotonic()
            found = measured(fault, seed, drawn_only=seed is not None)
            suites[fault.name] = found.suite
            line = {
                "name": fault.name, "stage": fault.stage, "seed": seed, "suite": found.suite,
                "named": found.named, "causes": found.causes, "cases": found.cases,
            }  # fmt: skip
            with own.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            seconds = time.monotonic() - start
            sys.stdout.write(f"{json.dumps(line)} {seconds:.1f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
