"""The parts of a run that has not ended: DIR/parts, a file for each process that writes.

A line is written in one piece when its test has finished, so that whatever ends a run keeps every
finished one. The session that ends in order merges the parts into results.jsonl and removes them;
what a killed one left is found here, by the next run and by `parity report`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_parity.references.errors import ParityError
from moe_parity.reports.records import SEVERITY, Record, Run, RunInfo, count, to_line
from moe_parity.reports.results import FILE_NAME, RUN_START, read, write

FOLDER = "parts"
"""Of the folder that results are written to."""

_PARTS = "results-*.jsonl"
_RUNNING = "running-*.json"


def part(folder: Path, worker: str | None) -> Path:
    """Return the file that a worker, or the only process, writes its records to."""
    return folder / f"results-{worker or 'main'}.jsonl"


def running(folder: Path, worker: str | None) -> Path:
    """Return the file in which a process keeps what it is running now."""
    return folder / f"running-{worker or 'main'}.json"


def now_running(folder: Path) -> list[dict[str, Any]]:
    """Return what the processes of a run were running when they were last heard of."""
    found = []
    for path in sorted(folder.glob(_RUNNING)):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_bytes()))
    return [entry for entry in found if isinstance(entry, dict)]


# --- a folder of results ------------------------------------------------------------------------


def prepare(directory: Path) -> Path:
    """Make `directory` and its `parts`, prove that both can be written, and return `parts`.

    Raises ParityError; call it before anything runs.
    """
    parts = directory / FOLDER
    probe = parts / f".probe-{os.getpid()}"
    try:
        parts.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"probe")  # a full disk makes empty files
        probe.unlink()
        if (directory / FILE_NAME).is_dir():
            raise IsADirectoryError(0, f"{FILE_NAME} in it is a directory")
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink()
        raise ParityError(
            f"cannot write results to {directory}: {error.strerror}; choose another --out."
        ) from None
    return parts


class Lock:
    """The right to write into a folder of parts; the system takes it from a process that dies."""

    def __init__(self, folder: Path) -> None:
        """Take it; raises ParityError where another run has it."""
        self._file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 20).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise ParityError(
                f"another run (process {holder}) is writing to {folder.parent}: wait for it, or "
                "choose another --out."
            ) from None
        except OSError:
            return  # a file system without locks
        os.truncate(self._file, 0)
        os.write(self._file, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Give it back."""
        with contextlib.suppress(OSError):
            os.close(self._file)


def rescue(directory: Path) -> str:
    """Save what an earlier run left in the parts of `directory`; return a sentence, or nothing.

    Its records become one file, `interrupted-<start>.jsonl`, and the parts are free again. Raises
    ParityError where that file cannot be written; the parts then stay.
    """
    folder = directory / FOLDER
    left = read_parts(folder)
    if left is not None and left.records:
        start = "".join(c if c.isalnum() else "-" for c in left.info.started)
        path = directory / f"interrupted-{start}.jsonl"
        write(left, path)
    for old in folder.glob("*"):
        if old.name != ".lock":
            old.unlink()
    if left is None or not left.records:
        return ""
    return (
        f"an earlier run, started {left.info.started}, never ended: what it had finished, "
        f"{count(len(left.records), 'record')}, is kept in {path}; `parity report {path} "
        "--partial -o report.html` reads it."
    )


# --- writing ------------------------------------------------------------------------------------


class Writer:
    """Appends records to a new file, each line in one piece; raises ParityError if it cannot."""

    def __init__(self, path: Path, info: RunInfo) -> None:
        self.path = path
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o666)
        except OSError as error:
            raise ParityError(f"cannot write {path}: {error.strerror}.") from None
        self._append(to_line("run", info))

    def add(self, record: Record) -> None:
        """Append one finished record."""
        self._append(to_line("record", record))

    def close(self) -> None:
        """Close the file; a part has no end line, `merge` writes it."""
        os.close(self._file)

    def _append(self, line: bytes) -> None:
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise ParityError(f"cannot write {self.path}: {error.strerror}.") from None
        if written != len(line):
            raise ParityError(f"cannot write {self.path}: the disk is full.")


# --- reading ------------------------------------------------------------------------------------


def worst_of(records: Iterable[Record]) -> dict[str, Record]:
    """Return the records by id in sorted order; of several with one id, the worst."""
    worst: dict[str, Record] = {}
    for record in records:
        known = worst.get(record.id)
        if known is None or SEVERITY[record.verdict] > SEVERITY[known.verdict]:
            worst[record.id] = record
    return dict(sorted(worst.items()))


def merge(folder: Path, extra: Iterable[Record] = ()) -> tuple[Record, ...]:
    """Return the records of all parts in a folder and `extra`, sorted by id.

    Two records have one id where a worker crashed after it wrote a test that another then
    repeated; the worse stands. A half line at the end of a part is what a crash left: dropped.
    """
    runs = (_read_part(part) for part in sorted(folder.glob(_PARTS)))
    found = [record for run in runs if run is not None for record in run.records]
    return tuple(worst_of([*found, *extra]).values())


def read_parts(folder: Path) -> Run | None:
    """Return what the parts in a folder hold as a run without an end, None where there are none."""
    runs = [_read_part(part) for part in sorted(folder.glob(_PARTS))]
    whole = [run for run in runs if run is not None]
    return Run(whole[0].info, merge(folder), None) if whole else None


def _read_part(path: Path) -> Run | None:
    """Return what is in a part, None where its first line was never finished."""
    try:
        with path.open("rb") as file:
            first = file.readline()
    except FileNotFoundError:
        return None
    if not first.endswith(b"\n") and RUN_START.startswith(first[: len(RUN_START)]):
        return None
    return read(path, partial=True)


def unfinished(path: Path) -> Path | None:
    """Return the parts that belong to a results file or its folder, None where there are none."""
    directory = path if path.is_dir() else path.parent
    for folder in (directory, directory / FOLDER):
        if next(folder.glob(_PARTS), None) is not None:
            return folder
    return None


def sentence_of(folder: Path, run: Run) -> str:
    """Return in a sentence what was read from the parts of a run that has not ended."""
    busy = [str(entry.get("case") or entry.get("nodeid")) for entry in now_running(folder)]
    tail = f"; it was running {' and '.join(busy)}" if busy else ""
    return (
        f"the run that was started {run.info.started} has not ended: "
        f"{count(len(run.records), 'finished record')} read from {folder}{tail}."
    )
