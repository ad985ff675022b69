"""The workers of a fuzz run: started, heard, begun anew after a crash, ended together.

A worker that dies is a finding, with the case that it was at: its pipe ends without the event
``end``. Another one takes its place, with a seed of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_parity.harness.fuzz.draw import derived
from moe_parity.harness.fuzz.telling import Telling
from moe_parity.harness.session import environment
from moe_parity.harness.session.watch import last_words
from moe_parity.references.errors import ParityError
from moe_parity.references.language import parse_id

LIVES = 5
"""Times that a worker is begun anew before its place stays empty."""

PATIENCE = 5.0
"""Seconds in which a worker has to end when it is asked to."""


@dataclass(kw_only=True)
class Worker:
    """One process, and what was heard of it."""

    number: int
    life: int
    seed: int
    process: subprocess.Popen[bytes]
    pipe: int
    rest: bytes = b""
    ended: bool = False
    judged: int = 0
    entries: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Team:
    """All processes of a run."""

    telling: Telling
    file: str | None
    device: str
    seed: int
    workers: int
    cases: int | None
    seconds: float | None
    timeout: float
    folder: Path
    """A temporary one, for what a worker leaves that dies."""
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _began: float = field(default_factory=time.monotonic)

    def run(self, entries: list[Path]) -> None:
        """Fuzz until every worker has ended; the first one tries the corpus before all draw."""
        try:
            self._start(0, 0, list(map(str, entries)), self._share(0))
            while self._selector.get_map():
                for key, _ in self._selector.select(timeout=1.0):
                    self._read(key.data)
        except BaseException:
            self._stop()
            raise

    def _start(self, number: int, life: int, entries: list[str], cases: int | None) -> None:
        seed = derived(self.seed, number, life)
        if life or self.workers > 1:
            self.telling.say(f"worker {number + 1} of {self.workers} draws with seed {seed}")
        for left in self.folder.glob(f"*-w{number}.*"):
            left.unlink()
        known = {failure.reason for failure in self.telling.replayed.values()}
        known |= self.telling.found.keys()
        seconds = self.seconds
        if seconds is not None:
            seconds = max(0.0, seconds - (time.monotonic() - self._began))
        orders: dict[str, Any] = {
            "folder": str(self.folder), "file": self.file, "kernel": self.telling.kernel.name,
            "device": self.device, "seed": seed, "cases": cases, "seconds": seconds,
            "timeout": self.timeout, "name": f"w{number}", "entries": entries,
            "known": [[r.check, r.stage, r.cause] for r in known],
        }  # fmt: skip
        mine, theirs = os.pipe()
        command = [sys.executable, "-m", "moe_parity.harness.fuzz.worker", json.dumps(orders)]
        with self._errors(number).open("wb") as errors:
            process = subprocess.Popen(
                [*command, str(theirs)],
                pass_fds=(theirs,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a kernel that prints does not disturb what is found
                stderr=errors,
                env=self._environment(number),
                start_new_session=True,  # Ctrl-C is ours alone, and ends them in order
            )
        os.close(theirs)
        worker = Worker(
            number=number, life=life, seed=seed, process=process, pipe=mine, entries=entries
        )
        self._selector.register(mine, selectors.EVENT_READ, worker)

    def _environment(self, number: int) -> dict[str, str]:
        """Give a worker its GPU and its share of the cores, as a worker of xdist has them."""
        marks = {
            "PYTEST_XDIST_WORKER": f"gw{number}",
            "PYTEST_XDIST_WORKER_COUNT": str(self.workers),
        }
        given = dict(os.environ) | marks
        environment.bind_worker_gpu(given)
        environment.share_cores(given)
        return {name: value for name, value in given.items() if name not in marks}

    def _read(self, worker: Worker) -> None:
        data = os.read(worker.pipe, 1 << 16)
        *lines, worker.rest = (worker.rest + data).split(b"\n")
        for line in lines:
            self._hear(worker, json.loads(line))
        if not data:
            self._selector.unregister(worker.pipe)
            os.close(worker.pipe)
            worker.process.wait()
            if not worker.ended:
                self._lost(worker)

    def _hear(self, worker: Worker, event: dict[str, Any]) -> None:
        kind = event["kind"]
        worker.ended |= kind == "end"
        worker.judged += kind == "judged"
        if kind == "drawing" and worker.number == 0 and worker.life == 0:
            self._begin_others()
        if kind == "replayed":
            worker.entries.remove(event["path"])
        self.telling.hear(event)

    def _begin_others(self) -> None:
        for number in range(1, self.workers):
            self._start(number, 0, [], self._share(number))

    def _share(self, number: int) -> int | None:
        if self.cases is None:
            return None
        return self.cases // self.workers + (number < self.cases % self.workers)

    def _lost(self, worker: Worker) -> None:
        """Tell of a worker that died, and begin it anew."""
        entry, sentence = last_words(self.folder, f"w{worker.number}", self.timeout)
        if not entry.get("case"):
            raise ParityError(
                f"a worker ended before it drew anything: "
                f"{self._stderr(worker) or 'no reason given'}"
            )
        seed = int(entry["repro"].partition("--seed ")[2].split()[0])
        self.telling.close()
        self.telling.crashed(parse_id(entry["case"], seed)[1], sentence)
        if worker.life + 1 >= LIVES:
            self.telling.say(f"! worker {worker.number + 1} died {LIVES} times and is left alone")
            return
        share = self._share(worker.number)
        left = None if share is None else share - worker.judged - 1
        if left is None or left > 0:
            self._start(worker.number, worker.life + 1, worker.entries[1:], left)

    def _errors(self, number: int) -> Path:
        return self.folder / f"stderr-w{number}.txt"

    def _stderr(self, worker: Worker) -> str:
        text = self._errors(worker.number).read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""

    def _stop(self) -> None:
        """End every worker: asked first, so that it says what it was making small, then not."""
        left = [key.data for key in list(self._selector.get_map().values())]
        for worker in left:
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGINT)
        until = time.monotonic() + PATIENCE
        for worker in left:
            try:
                worker.process.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.wait()
        for worker in left:
            os.set_blocking(worker.pipe, False)
            data = b""
            with contextlib.suppress(BlockingIOError):
                while part := os.read(worker.pipe, 1 << 16):
                    data += part
            for line in (worker.rest + data).split(b"\n")[:-1]:
                self.telling.hear(json.loads(line))
            os.close(worker.pipe)
