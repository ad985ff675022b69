"""pytest with our plugin, run in a process of its own on a folder of planted tests."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from moe_parity.reports.results import Run, read

OURS = ("MOE_PARITY_", "PYTEST_", "PYTHON", "CUDA_VISIBLE_DEVICES", "CI", "GITHUB_")


def clean(**extra: str) -> dict[str, str]:
    """Return an environment without our variables, without CI and without a GPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return kept | {"CUDA_VISIBLE_DEVICES": ""} | extra


def command(folder: Path, *args: str) -> list[str]:
    options = [f"--config-file={os.devnull}", f"--rootdir={folder}", "-pno:cacheprovider"]
    plugin = "-pmoe_parity.harness.plugin"
    strict = ["-Werror", "--import-mode=importlib", "--strict-markers"]
    return [sys.executable, "-m", "pytest", *options, plugin, *strict, *args]


class Suite:
    """A folder with one test module, which the plugin takes for our own suites."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "suites").mkdir(parents=True, exist_ok=True)
        (folder / "harness").mkdir(exist_ok=True)
        (folder / "harness" / "plugin.py").touch()

    def write(self, text: str, name: str = "test_it.py") -> None:
        """Write a module whose imports are there already."""
        head = "import os, signal, time, pytest\nfrom hypothesis import given, strategies as st\n"
        (self.folder / name).write_text(head + textwrap.dedent(text))

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run it; pytest must neither break nor show one of our tracebacks."""
        done = subprocess.run(
            command(self.folder, *args),
            cwd=self.folder,
            env=clean(**variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert "INTERNALERROR" not in done.stdout + done.stderr, done.stdout
        return done

    def results(self, name: str = "out") -> Run:
        """Read what it wrote."""
        return read(self.folder / name / "results.jsonl")


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something is so, at most so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not true():
        time.sleep(0.02)
