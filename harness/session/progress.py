"""A sign of life for logs: a line whenever nothing was said for ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

SILENCE = 10.0
"""Seconds after which a log hears of a run again."""


class Ticker:
    """Calls a function, in a thread of its own, when nothing was said for some seconds."""

    def __init__(self, say: Callable[[], None], seconds: float = SILENCE) -> None:
        """Begin with the body of a `with`; an exception of `say` ends the ticking alone."""
        self._say = say
        # a little less than promised: a thread wakes late
        self._seconds = seconds * 0.95
        self._last = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="parity-progress")

    def said(self) -> None:
        """Note that something was said: the next line is due later."""
        self._last = time.monotonic()

    def _run(self) -> None:
        while not self._over.wait(max(0.01, self._last + self._seconds - time.monotonic())):
            if time.monotonic() - self._last >= self._seconds:
                self.said()
                try:
                    self._say()
                except (OSError, ValueError):  # a reader that left, a file that was closed
                    return

    def __enter__(self) -> Ticker:
        """Start."""
        self.said()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Stop."""
        self._over.set()
        self._thread.join(timeout=1.0)
