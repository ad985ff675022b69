"""The processes of a comparison: each side is started, heard, and killed where it hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_parity.references.errors import ParityError

ENTRY = "moe_parity.harness.evidence.compare_side"
LOOK = 0.02
"""Seconds between two looks at what a side has told."""

Told = dict[str, Any]


@dataclass(kw_only=True)
class Side:
    """What a side told: its kernels, and what became of its cases."""

    name: str
    """``base`` or ``candidate``."""
    kernels: dict[str, Told] = field(default_factory=dict)
    cases: dict[tuple[str, str], Told] = field(default_factory=dict)
    """(kernel, case) -> what became of it."""
    lost: str = ""
    """How it ended before its time, in words: killed by SIGSEGV at ..."""


def served(
    name: str, request: Mapping[str, Any], folder: Path, *, seconds: float,
    variables: Mapping[str, str],
) -> Side:  # fmt: skip
    """Run one side and return what it told.

    ``seconds`` are what it may take before its first case and for each case, 0 for any; then it
    and its children are killed.  Raises ParityError, in its own sentence, for what a side refuses
    before its first case: a file that does not import, an unknown kernel.
    """
    own = folder / name
    own.mkdir()
    told, errors = own / "told.jsonl", own / "stderr.txt"
    told.touch()
    asked = own / "request.json"
    asked.write_text(json.dumps({**request, "told": str(told), "folder": str(own)}))
    # No bytecode: a file that changes twice within a second would be read as it was before.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    # -P: modules of the working directory are those of neither side
    command = [sys.executable, "-P", "-m", ENTRY, str(asked)]
    with errors.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, env=environ,
            start_new_session=True,
        )  # fmt: skip
        try:
            how = _heard(process, told, seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return _side(name, told, how, errors)


def _heard(process: subprocess.Popen[bytes], told: Path, seconds: float) -> str:
    """Wait for a side; return how it ended, empty for well."""
    size, since = 0, time.monotonic()
    while True:
        try:
            code = process.wait(LOOK)
        except subprocess.TimeoutExpired:
            now = told.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
            if seconds and time.monotonic() - since > seconds:
                return f"ran longer than the limit of {seconds:g} s"
            continue
        if code == 0:
            return ""
        return f"was killed by {_signal(-code)}" if code < 0 else f"exited with {code}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _side(name: str, told: Path, how: str, errors: Path) -> Side:
    side = Side(name=name)
    at = ended = ""
    for line in told.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break  # killed while it wrote
        what = json.loads(line)
        kind = what.pop("kind")
        if kind == "kernel":
            side.kernels[what["kernel"]] = what
        elif kind == "begin":
            at = f"{what['kernel']}-{what['case']}"
        elif kind == "case":
            side.cases[what["kernel"], what["case"]] = what
            at = ""
        elif kind == "error" and not side.cases:
            raise ParityError(f"the {name}: {what['text']}")
        else:
            ended = what.get("text", "") or "well"
    if ended == "well" and not how:
        return side
    where = f"at {at}" if at else "after its cases" if side.cases else "while it was loaded"
    last = _last_line(errors) if not how.startswith("ran longer") else ""
    why = how or "ended before its time"
    side.lost = ended if ended not in ("", "well") else f"it {why} {where}{last}"
    return side


def _last_line(errors: Path) -> str:
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    return f": {lines[-1][:300]}" if lines else ""
