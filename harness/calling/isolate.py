"""A child process with a time limit: a vendor that crashes or hangs ends it, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

SECONDS = 300.0
"""How long one vendor kernel may take, compilation at its first call included."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a child ended."""

    ok: bool
    what: str
    """In words: exited with 1, killed by SIGSEGV, ran longer than 300 s."""
    output: str
    """What it printed."""
    error: str
    """The last line of its standard error."""


def run_python(
    code: str, *, seconds: float = SECONDS, variables: Mapping[str, str] | None = None
) -> Outcome:
    """Run ``code`` in a new interpreter; it and its children are killed when the time is up.

    ``variables`` are added to the environment.  Never raises for what the child does.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env={**os.environ, **(variables or {})}, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = child.communicate(timeout=seconds)
        what = _ending(child.returncode)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, errors = child.communicate()
        what = f"ran longer than {seconds:g} s"
    lines = [line for line in errors.splitlines() if line.strip()]
    ok = child.returncode == 0
    return Outcome(ok=ok, what=what, output=output, error=lines[-1].strip() if lines else "")


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
