"""`parity check`: runs the suites through pytest and writes everything a reviewer asks for.

pytest runs in this process with our plugin and a configuration of our own, so that neither an
ini file above the installed package nor one of the user's changes what is checked. Its output goes
to pytest.log; the terminal shows progress, what fails as it fails, and the verdict.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

import pytest
from _pytest.mark.expression import Expression
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moe_parity.harness import plugin
from moe_parity.harness.cli.commands import FAILED, INCOMPLETE, OK
from moe_parity.harness.session.progress import Ticker
from moe_parity.harness.session.selection import SHARD, Shapes, Shard
from moe_parity.references.errors import ParityError
from moe_parity.reports.parts import FOLDER, prepare
from moe_parity.reports.records import Judgement, count, judge
from moe_parity.reports.results import FILE_NAME, read

CAPTURED = "captured.py"
"""The suite of ``--case-from``, which is collected only by its name."""
NOT_CHECKS = ("meta", "perf")
"""Folders of the suites that test the harness or its speed, not a kernel."""

_WORDS = {"pass": "✓ passed", "fail": "✗ failed", "incomplete": "! incomplete"}
_STYLES = {"pass": "bold green", "fail": "bold red", "incomplete": "bold yellow"}
_STATUS = {"pass": OK, "fail": FAILED, "incomplete": INCOMPLETE}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `parity check`."""

    out: Path
    kernels: tuple[str, ...] = ()
    device: str | None = None
    require_gpu: bool = False
    expression: str | None = None
    markers: str | None = None
    workers: int = 0
    timeout: float | None = None
    profile: str | None = None
    seed: int | None = None
    shapes: str | None = None
    shard: str | None = None
    last_failed: bool = False
    durations: int = 0
    case_from: Path | None = None
    """Captured tensors, on which alone kernels are checked."""


def suites() -> Path:
    """Return the folder of the suites: the checkout's when run in one, else the installed."""
    here = Path.cwd()
    with contextlib.suppress(OSError):
        if (here / "suites").is_dir() and '"moe-parity"' in (here / "pyproject.toml").read_text():
            return here / "suites"
    found = importlib.util.find_spec("moe_parity.suites")  # above us: found, never imported
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0]).resolve()


def arguments(request: Request, folder: Path) -> list[str]:
    """Return the arguments of pytest for a request."""
    args = [
        str(folder if request.case_from is None else folder / CAPTURED),
        # our configuration, wherever we are installed: no ini file that happens to lie above
        f"--config-file={os.devnull}",
        f"--rootdir={folder.parent}",
        "--import-mode=importlib",
        "--strict-markers",
        # this command imports hypothesis before pytest can rewrite its assertions: no matter
        "--override-ini=filterwarnings=ignore::pytest.PytestAssertRewriteWarning",
        "--override-ini=xfail_strict=true",
        "-pno:cacheprovider",
        f"-p{plugin.__name__}",
        "--tb=short",
        "-ra",
        f"--junitxml={request.out / 'junit.xml'}",
        f"--parity-out={request.out}",
        "--parity-report",
        f"--parity-device={request.device or 'auto'}",
    ]
    args += [f"--ignore={folder / name}" for name in NOT_CHECKS]
    args += [f"--parity-kernel={name}" for name in request.kernels]
    args += ["--parity-require-gpu"] if request.require_gpu else []
    args += [] if request.timeout is None else [f"--parity-timeout={request.timeout}"]
    args += [] if request.seed is None else [f"--parity-seed={request.seed}"]
    args += [] if request.profile is None else [f"--hypothesis-profile={request.profile}"]
    args += [] if request.expression is None else ["-k", request.expression]
    args += [] if request.markers is None else ["-m", request.markers]
    args += [] if request.shapes is None else [f"--parity-shapes={request.shapes}"]
    args += [] if request.shard is None else [f"--parity-shard={request.shard}"]
    args += ["--parity-last-failed"] if request.last_failed else []
    args += [] if request.case_from is None else [f"--parity-case-from={request.case_from}"]
    args += ["-n", str(request.workers), "--dist=worksteal"] if request.workers else []
    return args


class Watcher:
    """A pytest plugin that shows how far a run has come, on a terminal or in a log."""

    def __init__(self, console: Console, bar: Progress | None) -> None:
        self.console = console
        self.bar = bar
        self.ticker = Ticker(self._tick)
        self.notes: list[str] = []
        self.unwritten = ""
        self._task = bar.add_task("collecting", total=None) if bar else None
        self._total = 0
        self._done = 0
        self._failed: set[str] = set()
        self._began = time.monotonic()

    def _tick(self) -> None:
        """Give a log its sign of life; a bar moves by itself."""
        if self.bar is None:
            seconds = time.monotonic() - self._began
            far = f"{self._done:,} of {self._total:,} tests" if self._total else "collecting"
            failed = f", {len(self._failed):,} failed" if self._failed else ""
            self.console.print(f"{seconds:.0f} s: {far}{failed}", highlight=False)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Print the header."""
        if not hasattr(session.config, "workerinput"):
            for line in plugin.header(session.config):
                self.console.print(escape(line), style="dim", highlight=False)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Learn how many tests there are."""
        self._expect(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Learn how many tests there are from a worker."""
        self._expect(len(ids))

    def _expect(self, total: int) -> None:
        if total and self._total != total:
            self._total = total
            if self.bar and self._task is not None:
                self.bar.update(self._task, total=total, description="checking")
            else:
                self.ticker.said()
                self.console.print(f"checking {count(total, 'test')}", highlight=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Show a failure when it happens, and count what has finished."""
        if report.failed and report.nodeid not in self._failed:
            self._failed.add(report.nodeid)
            self._show(report.nodeid, report)
        if report.when == "teardown" or report.when not in ("setup", "call"):
            self._done += 1
            if self.bar and self._task is not None:
                self.bar.update(self._task, completed=self._done)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Show a file that cannot be collected, once for all workers."""
        if report.failed and report.nodeid not in self._failed:
            self._failed.add(report.nodeid)
            self._show(report.nodeid, report)

    def _show(self, nodeid: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = getattr(crash, "message", None) or report.longreprtext.strip() or "failed"
        lines = [line for line in text.splitlines() if line.strip()]
        first = lines[0] if crash else lines[-1].removeprefix("E").strip()
        for kind in ("AssertionError: ", "Failed: ", "Overrun: "):
            first = first.removeprefix(kind)
        self.ticker.said()
        self.console.print(f"[bold red]✗[/] {escape(nodeid)}\n  {escape(first)}", highlight=False)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Keep what the session wants said."""
        session = config.stash.get(plugin.SESSION, None)
        if session is not None:
            self.notes, self.unwritten = session.notes, session.unwritten


@contextlib.contextmanager
def _watching(console: Console) -> Iterator[Watcher]:
    """Give a watcher, with a bar on a terminal and without one elsewhere and in CI."""
    if not console.is_terminal or os.environ.get("CI"):
        yield Watcher(console, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # pytest redirects stdout; the bar writes to the console's own file
    options: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
    with Progress(*columns, console=console, transient=True, **options) as bar:
        yield Watcher(console, bar)


@contextlib.contextmanager
def terminated_is_interrupted() -> Iterator[None]:
    """Treat SIGTERM, which a CI sends when it cancels a job, like Ctrl-C: the results are kept."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Log(io.TextIOBase):
    """pytest.log, which a full disk may cost, but never the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with contextlib.suppress(OSError):
            path.write_bytes(b"")

    def write(self, text: str) -> int:
        """Append to the file, where there is room."""
        with contextlib.suppress(OSError), self._path.open("a") as file:
            file.write(text)
        return len(text)


def _run_pytest(args: list[str], out: Path, console: Console) -> tuple[int, list[str], Watcher]:
    """Run pytest; return its status, its usage errors and what has watched it.

    Raises ParityError where pytest itself cannot write.
    """
    errors, text = io.StringIO(), _Log(out / "pytest.log")
    try:
        with (
            terminated_is_interrupted(),
            _watching(console) as watcher,
            watcher.ticker,
            contextlib.redirect_stdout(text),
            contextlib.redirect_stderr(errors),
        ):
            status = int(pytest.main(args, plugins=[watcher]))
    except OSError as error:
        raise ParityError(
            f"pytest ended early: {error.strerror} ({error.filename or out}). What had finished is "
            f"kept in {out / FOLDER}: `parity report {out / FOLDER} -o report.html` reads it."
        ) from None
    lines = errors.getvalue().splitlines()
    text.write("".join(f"{line}\n" for line in lines))
    usage = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return status, usage, watcher


def run(request: Request) -> int:
    """Check, report and judge; return the exit status. Raises ParityError for bad input."""
    plugin.choose_device(request.device or "auto", request.require_gpu)
    for option, text in (("-k", request.expression), ("-m", request.markers)):
        _check_expression(option, text)
    Shard.parse(request.shard)
    Shapes.parse(request.shapes)
    if request.case_from is not None:
        from moe_parity.harness.captured.file import read as read_captured

        read_captured(request.case_from)
    prepare(request.out)
    console = Console(file=_own(sys.stdout), soft_wrap=True)
    before = _stamp(request.out / FILE_NAME)
    args = arguments(request, suites())
    status, usage, watcher = _run_pytest(args, request.out, console)
    if watcher.unwritten:
        raise ParityError(watcher.unwritten)
    if status == pytest.ExitCode.USAGE_ERROR:
        raise ParityError(usage[0] if usage else f"pytest refused; see {request.out}/pytest.log.")
    if _stamp(request.out / FILE_NAME) == before:
        console.print(f"[{_STYLES['incomplete']}]! incomplete[/] no results were written")
        console.print(f"see {request.out / 'pytest.log'}", highlight=False)
        return INCOMPLETE
    for note in watcher.notes:
        if not note.startswith(("results: ", "report: ")):
            console.print(f"[yellow]![/] {escape(note)}", highlight=False)
    return _conclude(console, request.out, request.durations)


def _check_expression(option: str, text: str | None) -> None:
    """Refuse what only the workers of xdist would refuse, each with a traceback."""
    try:
        Expression.compile(text or "")
    except SyntaxError as error:
        raise ParityError(
            f"wrong expression for {option}: {text!r}, column {error.offset}: {error.msg}."
        ) from None


def _own(stream: TextIO) -> TextIO:
    """Return a stream to the same place that pytest, which captures what tests print, leaves be."""
    try:
        return os.fdopen(os.dup(stream.fileno()), "w", encoding=stream.encoding, buffering=1)
    except (OSError, ValueError):  # it has no file: somebody captures us
        return stream


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino


def _conclude(console: Console, out: Path, durations: int) -> int:
    found = read(out / FILE_NAME)
    judgement: Judgement = judge(found)
    style, word = _STYLES[judgement.status], _WORDS[judgement.status]
    console.print(f"[{style}]{word}[/]: {escape(judgement.sentence)}", highlight=False)
    if SHARD in found.info.environment:
        console.print(f"shard {found.info.environment[SHARD]}", highlight=False)
    slowest = sorted(found.tests, key=lambda record: -record.seconds)[:durations]
    for record in slowest:
        console.print(f"{record.seconds:8.2f} s  {escape(record.nodeid)}", highlight=False)
    console.print(f"report: {escape(str(out / 'report.html'))}", highlight=False)
    return _STATUS[judgement.status]
