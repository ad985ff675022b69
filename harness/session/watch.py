"""The watch over what is running: a time limit for each case, and its name where a process dies.

Two things end a case that hangs. A signal raises `Overrun` in the main thread when the time is up:
the case is red and the process goes on. Where Python never gets to see the signal (a loop in native
code, a wait for a GPU), the process ends itself `GRACE` seconds later, a worker of xdist by a
thread that needs no interpreter. What it was running stands in a file of its own, and so does where
it hung or crashed, so that whoever survives can say it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import IO, Any

from moe_parity.reports.parts import running

ON_CPU, ON_GPU = 120.0, 300.0
"""Seconds that one case may take, where nothing else is said."""

GRACE = 5.0
"""Seconds between the signal and the end of the process."""

TOO_MANY = 3
"""Cases in which a kernel may hang or take its process down before the rest is left alone."""


class Overrun(BaseException):
    """A case ran longer than the limit; no `except Exception` of a kernel takes it."""

    __module__ = "builtins"  # so that pytest shows it by its name alone


class Watch:
    """What this process is running, for how long it may, and which kernels gave out before."""

    def __init__(self, seconds: float, folder: Path | None = None, worker: str | None = None):
        """Watch with a limit of `seconds` a case, 0 for none; `folder` is that of the parts."""
        self.seconds = seconds
        self._folder = folder
        self._worker = worker
        self._entry: dict[str, Any] = {}
        self._depth = 0
        self._last: threading.Timer | None = None
        self._terminal = os.dup(2)  # before pytest captures it
        self._stack: IO[str] | None = None
        if folder is not None and worker is not None:
            # a crash in native code then says where, and not to the terminal
            self._stack = _stack_file(folder, worker).open("w")
            faulthandler.enable(file=self._stack)

    # --- what is running -------------------------------------------------------------------------

    def begin(self, nodeid: str, labels: Mapping[str, Any]) -> None:
        """Say that a test begins."""
        self._entry = {"nodeid": nodeid, "labels": dict(labels)}
        self._save()

    def case(self, name: str, repro: str) -> None:
        """Say that the running test turns to a case, which has the whole time again."""
        if not self._entry:
            return
        self._entry |= {"case": name, "repro": repro}
        self._save()
        self._arm()

    def end(self) -> None:
        """Say that the test is over."""
        self._entry = {}
        if self._folder is not None:
            with contextlib.suppress(OSError):
                running(self._folder, self._worker).unlink(missing_ok=True)

    def _save(self) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):  # a full disk: the records say so
                path = running(self._folder, self._worker)
                path.write_text(json.dumps(self._entry), encoding="utf-8")

    # --- how long --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def limit(self) -> Iterator[None]:
        """Raise Overrun in the body when the time is up; end the process if that does not help."""
        if not self.seconds:
            yield
            return
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGALRM, self._overrun) if main else None
        self._depth += 1
        self._arm()
        try:
            yield
        finally:
            self._depth -= 1
            self._disarm()
            if main:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            if self._depth:
                self._arm()  # a fixture that a test asked for is done, the test goes on

    def _arm(self) -> None:
        if not self.seconds:
            return
        self._disarm()
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
        if self._stack is not None:
            faulthandler.dump_traceback_later(self.seconds + GRACE, exit=True, file=self._stack)
        else:
            self._last = threading.Timer(self.seconds + GRACE, self._leave)
            self._last.daemon = True
            self._last.start()

    def _disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._last is not None:
            self._last.cancel()

    def _overrun(self, _: int, frame: FrameType | None) -> None:
        place = f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})" if frame else ""
        raise Overrun(f"{_who(self._entry)} ran longer than the limit of {self.seconds:g} s{place}")

    def _leave(self) -> None:
        """End the only process of a run, with a sentence."""
        kept = f"; what had finished is kept in {self._folder}" if self._folder else ""
        text = (
            f"parity: {_who(self._entry)} ran longer than the limit of {self.seconds:g} s and did "
            f"not answer, so this process ends{kept}. With -n 1 or more a run goes on.\n"
        )
        os.write(self._terminal, text.encode())
        os._exit(1)

    # --- which kernels gave out ------------------------------------------------------------------

    def gave_out(self, kernel: str) -> None:
        """Note, for all processes of the run, that a kernel hung or took its process down."""
        if self._folder is not None and kernel:
            with contextlib.suppress(OSError), self._count(kernel).open("ab") as file:
                file.write(b".")

    def given_up(self, kernel: str) -> bool:
        """Whether a kernel has given out too often to be asked again."""
        if self._folder is None or not kernel:
            return False
        try:
            return self._count(kernel).stat().st_size >= TOO_MANY
        except OSError:
            return False

    def _count(self, kernel: str) -> Path:
        assert self._folder is not None
        return self._folder / f"gave-out-{kernel}"


def _stack_file(folder: Path, worker: str | None) -> Path:
    return folder / f"stack-{worker or 'main'}.txt"


# --- what a process leaves that died ------------------------------------------------------------


def last_words(folder: Path, worker: str | None, limit: float) -> tuple[dict[str, Any], str]:
    """Return what a process that died was running, and in a sentence how it ended.

    The first is empty where it ran no test.
    """
    try:
        entry = dict(json.loads(running(folder, worker).read_bytes()))
    except (OSError, ValueError):
        entry = {}
    try:
        stack = _stack_file(folder, worker).read_text(errors="replace")
    except OSError:
        stack = ""
    who, place = _who(entry), _place(stack)
    if stack.startswith("Timeout"):
        return entry, (
            f"{who} ran longer than the limit of {limit:g} s and did not answer{place}: its "
            "process was ended (--timeout sets the limit)"
        )
    if fatal := re.match(r"Fatal Python error: (.+)", stack):
        return entry, f"{who} took its process down{place}: {fatal[1].lower()}"
    return entry, (
        f"{who} took its process down: it left by os._exit, or was killed, for instance for want "
        "of memory"
    )


def _place(stack: str) -> str:
    """Return the innermost line of the main thread, which a dump has last, outside of libraries."""
    main = stack.rpartition("most recent call first")[2]
    lines = re.findall(r'File "([^"]+)", line (\d+)', main)
    own = [line for line in lines if not re.search(r"/lib(64)?/python|^<", line[0])]
    return f" ({Path(own[0][0]).name}, line {own[0][1]})" if own else ""


def _who(entry: Mapping[str, Any]) -> str:
    """Return what an entry is about: ``my_kernel on fp32-m3-h512``, or the test's name."""
    kernel, case = entry.get("labels", {}).get("kernel", ""), entry.get("case", "")
    if kernel:
        return f"{kernel} on {case.removeprefix(f'{kernel}-')}" if case else str(kernel)
    return str(entry.get("nodeid", "the test")).rpartition("::")[2]


_watch = Watch(0.0)


def current() -> Watch:
    """Return the watch of this process; outside a session, one that limits nothing."""
    return _watch


def install(watch: Watch) -> None:
    """Make a watch the one of this process."""
    global _watch
    _watch = watch
