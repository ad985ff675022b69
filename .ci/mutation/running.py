"""Copies of the tree with one change in each, and runs of pytest in them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutation.changes import Change, Refusal, apply
from mutation.settings import ROOT, Config, Session

PACKAGES = ("references", "kernels", "harness", "suites", "reports")
COPIED = (*PACKAGES, "examples", "docs")
PYTEST = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no")


def copy_tree(at: Path) -> None:
    """Copy what tests need to ``at``, where `moe_parity` is the copy and not an installed one."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache", ".hypothesis")
    (at / "moe_parity").mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, at / name, ignore=ignored)
    for name in PACKAGES:
        (at / "moe_parity" / name).symlink_to(f"../{name}")
    for file in ROOT.iterdir():
        if file.suffix in (".toml", ".py", ".md", ".txt") and file.is_file():
            shutil.copy2(file, at)
    # From elsewhere, as the children of a test may.
    find = "import importlib.util as u; print(u.find_spec('moe_parity.references').origin)"
    origin = subprocess.run(
        [sys.executable, "-c", find], env=environment(at), cwd="/", text=True, capture_output=True
    )
    if not origin.stdout.startswith(f"{at}/"):
        raise Refusal(
            f"`import moe_parity` finds {(origin.stdout or origin.stderr).strip()} instead of the "
            f"copy in {at}; install this project with -e, or not at all, and no other copy of it."
        )


def environment(at: Path, *, bytecode: bool = False) -> dict[str, str]:
    """Return the environment of tests in a copy: one core, no GPU, the same cases every time."""
    own = {
        "PYTHONPATH": str(at), "MOE_PARITY_PROFILE": "ci", "MOE_PARITY_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
    }  # fmt: skip
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "MOE_PARITY_"))}
    return {**kept, **own, **({} if bytecode else {"PYTHONDONTWRITEBYTECODE": "1"})}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run of tests ended, by which test, and after how many seconds."""

    outcome: str
    by: str
    seconds: float


class Tests:
    """Runs of pytest that end together with this process."""

    def __init__(self, memory: int) -> None:
        self.memory, self.stopped = memory, threading.Event()
        self.alive: set[subprocess.Popen[str]] = set()

    def run(
        self, at: Path, tests: Sequence[str], limit: float, *, bytecode: bool = False
    ) -> Outcome:
        """Run a selection of tests in a copy for at most ``limit`` seconds."""
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *PYTEST, *tests], cwd=at, text=True, errors="replace",
            env=environment(at, bytecode=bytecode), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.alive.add(process)
        if self.stopped.is_set():
            kill(process)
        # A mutant that asks for all memory is refused it, and takes no neighbour with it.
        resource.prlimit(process.pid, resource.RLIMIT_AS, (self.memory, self.memory))
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            kill(process)
            output, _ = process.communicate()
            return Outcome("timeout", "", time.monotonic() - started)
        finally:
            self.alive.discard(process)
        return Outcome(*read(process.returncode, output), time.monotonic() - started)

    def stop(self) -> None:
        """End every run."""
        self.stopped.set()
        for process in tuple(self.alive):
            kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """End a process with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read(status: int, output: str) -> tuple[str, str]:
    """Return the outcome that pytest's exit status and last lines say, and the failed test."""
    lines = output.strip().split("\n")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", output, re.MULTILINE)
    if status == 0:
        return "survived", ""
    if status == 5:
        return "no tests", lines[-1]
    if status < 0:
        return "crashed", f"signal {-status}"
    return ("killed", failed[0]) if failed else ("does not import", lines[-1])


def baselines(
    config: Config, groups: Sequence[tuple[str, ...]], at: Path, tests: Tests, workers: int
) -> dict[tuple[str, ...], float]:
    """Run every selection on the code as it is; return the seconds that each may take."""

    def one(group: tuple[str, ...]) -> Outcome:
        # What is compiled here is compiled for every copy.
        return tests.run(at, group, 900, bytecode=True)

    limits = {}
    with ThreadPoolExecutor(workers) as pool:
        for group, found in zip(groups, pool.map(one, groups), strict=True):
            if tests.stopped.is_set():
                return {}
            if found.outcome != "survived":
                raise Refusal(
                    f"the tests of a selection are not green on the code as it is ({found.outcome}"
                    f"{': ' if found.by else ''}{found.by}); run: pytest {' '.join(group)}."
                )
            limits[group] = max(config.at_least, config.factor * found.seconds)
            of = ", ".join(m for m, own in config.selections.items() if own == group)
            print(f"baseline {found.seconds:6.1f} s  {of}", flush=True)
    return limits


def run_all(
    config: Config, session: Session, left: Sequence[int], tests: Tests, workers: int
) -> None:
    """Run these mutants, each worker in a copy of its own, until they are done or stopped."""
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    groups = sorted({config.selections[session.mutants[number].module] for number in left})
    lock = threading.Lock()

    def one(number: int) -> None:
        if tests.stopped.is_set():
            return
        made, tree = session.mutants[number], trees.get()
        group = config.selections[made.module]
        try:
            outcome = mutated(made, tree, lambda: tests.run(tree, group, limits[group]))
        finally:
            trees.put(tree)
        with lock:
            # What was ended from outside says nothing about the mutant.
            if not tests.stopped.is_set():
                session.add(stream, number, dataclasses.asdict(outcome))
                print(said(len(session.results), len(session.mutants), made, outcome), flush=True)

    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, session.open() as stream:
        first = Path(folder).resolve() / "0"
        copy_tree(first)
        limits = baselines(config, groups, first, tests, workers)
        trees.put(first)
        for number in range(1, min(workers, len(left))):
            trees.put(Path(shutil.copytree(first, first.with_name(str(number)), symlinks=True)))
        with ThreadPoolExecutor(workers) as pool:
            try:
                for future in [pool.submit(one, number) for number in left]:
                    future.result()
            except BaseException:
                tests.stop()
                raise


def mutated(made: Change, tree: Path, test: Callable[[], Outcome]) -> Outcome:
    """Test a copy with one change in it, and take the change back."""
    path = tree / made.module
    source, stamp = path.read_bytes(), path.stat()
    try:
        path.write_text(apply(made, source.decode())[0])
        # Another time than the original's: bytecode and Numba's cache are known by it.
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 10**10))
        return test()
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def said(count: int, of: int, made: Change, outcome: Outcome) -> str:
    """Return the line of a run about one mutant."""
    old, new = (" ".join(text.split()) for text in (made.line, made.becomes))
    where = f"{made.module}: {old} -> {new}"
    return f"{count}/{of} {outcome.outcome} {outcome.seconds:.1f} s  {where}  {outcome.by}".rstrip()
