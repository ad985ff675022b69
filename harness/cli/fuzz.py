"""`parity fuzz`: draws cases for one kernel until the time is up, and keeps what fails."""

from __future__ import annotations

import secrets
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from moe_parity.harness.cli.check import suites, terminated_is_interrupted
from moe_parity.harness.cli.commands import FAILED, INCOMPLETE, OK
from moe_parity.harness.fuzz import corpus
from moe_parity.harness.fuzz.loop import Fuzzer, Limits
from moe_parity.harness.fuzz.team import Team
from moe_parity.harness.fuzz.telling import Telling
from moe_parity.harness.fuzz.worker import in_a_process
from moe_parity.harness.plugin import choose_device
from moe_parity.harness.session.profiles import PROFILES
from moe_parity.harness.session.progress import Ticker
from moe_parity.harness.session.watch import ON_CPU, ON_GPU, Watch, current, install
from moe_parity.kernels import Kernel, find, load_file
from moe_parity.kernels.registry import builtin
from moe_parity.references.errors import ParityError
from moe_parity.reports.records import count


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `parity fuzz`."""

    target: str
    minutes: float | None = None
    cases: int | None = None
    workers: int = 1
    seed: int | None = None
    corpus: Path | None = None
    device: str | None = None
    timeout: float | None = None


def chosen(target: str) -> tuple[Kernel, str | None]:
    """Return the kernel of ``NAME``, ``FILE.py`` or ``FILE.py:NAME``, and its file.

    Raises ParityError for one that is not there, and for a file of several without a name.
    """
    file, _, name = target.rpartition(":") if ".py:" in target else (target, "", "")
    if not file.endswith(".py"):
        return find(target), None
    path = str(Path(file).resolve())
    loaded = {kernel.name: kernel for kernel in load_file(file)}
    known = ", ".join(sorted(loaded))
    if name and name not in loaded:
        raise ParityError(f"{file} registers no kernel {name!r}; it has {known}.")
    if not name and len(loaded) > 1:
        raise ParityError(f"{file} registers several kernels, {known}: say {file}:NAME.")
    return loaded[name or known], path


def run(request: Request) -> int:
    """Fuzz a kernel; return the exit status. Raises ParityError for bad input."""
    device = choose_device(request.device or "auto")
    kernel, file = chosen(request.target)
    absent = kernel.unavailable()
    if absent is not None:
        raise ParityError(f"{kernel.name} cannot run here: {absent}")
    if kernel.needs_gpu and device != "cuda":
        raise ParityError(f"{kernel.name} needs a GPU, and the device is {device}.")
    seed = secrets.randbits(32) if request.seed is None else request.seed
    folder = request.corpus or corpus.home(builtin(kernel), suites())
    lock = threading.Lock()

    def say(text: str) -> None:
        with lock:
            print(text, flush=True)
            ticker.said()

    telling = Telling(kernel=kernel, folder=folder, say=say)
    ticker = Ticker(lambda: print(telling.progress, flush=True))
    entries = corpus.files(folder, kernel.name)
    interrupted = False
    with ticker, terminated_is_interrupted():
        say(_start(request, kernel, device, seed))
        if entries:
            say(f"{count(len(entries), 'entry').replace('entrys', 'entries')} of {folder} first")
        try:
            _fuzz(request, telling, file, device, seed, entries)
        except KeyboardInterrupt:
            interrupted = True
        telling.close()
    return _conclude(telling, seed, interrupted=interrupted)


def _limits(request: Request) -> Limits:
    """Return how long to fuzz: as many cases as the profile has where nothing is said."""
    if request.minutes is None and request.cases is None:
        return Limits(cases=PROFILES["fuzz"][0])
    seconds = None if request.minutes is None else request.minutes * 60.0
    return Limits(cases=request.cases, seconds=seconds)


def _start(request: Request, kernel: Kernel, device: str, seed: int) -> str:
    limits = _limits(request)
    until = [] if limits.cases is None else [count(limits.cases, "case")]
    until += [] if request.minutes is None else [f"{request.minutes:g} minutes"]
    return (
        f"fuzzing {kernel.name} ({kernel.stage}) on {kernel.runs_on(device)}, "
        f"{' or '.join(until)}, seed {seed}"
    )


def _fuzz(
    request: Request,
    telling: Telling,
    file: str | None,
    device: str,
    seed: int,
    entries: list[Path],
) -> None:
    limits, kernel = _limits(request), telling.kernel
    timeout = request.timeout
    if timeout is None:
        timeout = ON_CPU if device == "cpu" else ON_GPU
    with tempfile.TemporaryDirectory(prefix="moe-parity-fuzz-") as name:
        if request.workers:
            Team(
                telling=telling, file=file, device=device, seed=seed, workers=request.workers,
                cases=limits.cases, seconds=limits.seconds, timeout=timeout, folder=Path(name),
            ).run(entries)  # fmt: skip
            return
        before = current()
        install(Watch(timeout))
        try:
            fuzzer = Fuzzer(
                kernel=kernel, device=device, seed=seed, limits=limits, send=telling.hear,
                alone=in_a_process(kernel, device, timeout),
            )  # fmt: skip
            fuzzer.replay(entries)
            fuzzer.run()
        finally:
            install(before)


def _conclude(telling: Telling, seed: int, *, interrupted: bool) -> int:
    reasons = len(telling.found) + len(telling.replayed)
    print(telling.progress)
    if reasons:
        kept = f", {len(telling.replayed)} of them in the corpus before" if telling.replayed else ""
        text = f"✗ failed: {count(reasons, 'failure')}{kept}; {count(telling.judged, 'case')}"
        print(f"{text} drawn with seed {seed}{', interrupted' if interrupted else ''}")
        return FAILED
    if interrupted:
        print(f"! incomplete: interrupted after {count(telling.judged, 'case')} with seed {seed}")
        return INCOMPLETE
    if not telling.judged:
        print(f"! nothing ran: no case that was drawn runs here; seed {seed}")
        return INCOMPLETE
    print(f"✓ passed: {count(telling.judged, 'case')} drawn with seed {seed}")
    sys.stdout.flush()
    return OK
