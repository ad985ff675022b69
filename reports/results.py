"""The file results.jsonl: written one finished line at a time, merged, read, never half trusted.

A line is written in one piece when its test has finished, so an interrupted run keeps every
finished line; only the end line makes a file complete. The values in it are `records`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_parity.references.errors import ParityError
from moe_parity.reports.records import (
    SCHEMA,
    SEVERITY,
    Record,
    Run,
    RunEnd,
    RunInfo,
    count,
    from_json,
    to_line,
)

__all__ = [
    "FILE_NAME",
    "Record",
    "Run",
    "RunEnd",
    "RunInfo",
    "Writer",
    "merge",
    "prepare",
    "read",
    "write",
    "write_atomic",
]

FILE_NAME = "results.jsonl"
RUN_START = b'{"kind": "run"'
"""How every file of ours begins, whole or torn."""

# --- reading ------------------------------------------------------------------------------------


def _lines(path: Path) -> list[bytes]:
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        hint = f"; its results are in {path / FILE_NAME}" if (path / FILE_NAME).exists() else ""
        raise ParityError(f"{path} is a directory, not a results file{hint}.") from None
    except FileNotFoundError:
        raise ParityError(f"{path} does not exist; `parity check` writes one.") from None
    except OSError as error:
        raise ParityError(f"{path} cannot be read: {error.strerror}.") from None
    if not data.strip():
        raise ParityError(f"{path} is empty: no run has written to it.")
    return data.splitlines(keepends=True)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise ParityError(f"{where} is not JSON: not a results file of moe-parity.") from None
    if not isinstance(data, dict) or data.get("kind") not in ("run", "record", "end"):
        raise ParityError(f"{where} is no run, record or end: not a results file of moe-parity.")
    return data


def _read_info(first: bytes, path: Path) -> RunInfo:
    where = f"{path}, line 1,"
    data = _parse(first, where)
    if data["kind"] != "run":
        raise ParityError(f"{where} is a {data['kind']} line, expected the run line.")
    if data.get("schema") != SCHEMA:
        raise ParityError(
            f"{path} has schema {data.get('schema')!r}, this version reads schema {SCHEMA}: "
            "use the moe-parity that wrote it."
        )
    return from_json(RunInfo, data, where)


def read(path: Path | str, *, partial: bool = False) -> Run:
    """Read a results file.

    With `partial`, a file whose end is missing is read as far as it goes and `Run.end` is None;
    an id may then stand there twice, as in the part of a worker.
    Raises ParityError, one sentence, for a file that is missing, empty, truncated or foreign.
    """
    path = Path(path)
    lines = _lines(path)
    if not lines[-1].endswith(b"\n") and lines[0].startswith(RUN_START):
        if not partial or len(lines) == 1:
            raise _truncated(path, f"line {len(lines)} breaks off")
        lines.pop()
    info = _read_info(lines[0], path)
    records: list[Record] = []
    ids: set[str] = set()
    end: RunEnd | None = None
    for number, line in enumerate(lines[1:], start=2):
        where = f"{path}, line {number},"
        data = _parse(line, where)
        if end is not None or data["kind"] == "run":
            raise ParityError(f"{where} is a {data['kind']} line out of place.")
        if data["kind"] == "end":
            end = from_json(RunEnd, data, where)
            continue
        record = from_json(Record, data, where)
        if record.id in ids and not partial:
            raise ParityError(f"{where} repeats the record {record.id!r}.")
        ids.add(record.id)
        records.append(record)
    if end is None and not partial:
        raise _truncated(path, f"no end line after line {len(lines)}")
    if end is not None and end.records != len(records):
        raise ParityError(
            f"{path} holds {count(len(records), 'record')}, its end line says {end.records:,}: "
            "lines were removed or added."
        )
    return Run(info, tuple(records), end)


def _truncated(path: Path, what: str) -> ParityError:
    return ParityError(
        f"{path} is truncated: {what}; the run was interrupted (--partial reads what is there)."
    )


# --- writing ------------------------------------------------------------------------------------


def prepare(directory: Path) -> Path:
    """Make `directory` and its `parts`, prove that both can be written, and return `parts`.

    Raises ParityError; call it before anything runs.
    """
    parts = directory / "parts"
    probe = parts / f".probe-{os.getpid()}"
    try:
        parts.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
        if (directory / FILE_NAME).is_dir():
            raise IsADirectoryError(0, f"{FILE_NAME} in it is a directory")
    except OSError as error:
        raise ParityError(
            f"cannot write results to {directory}: {error.strerror}; choose another --out."
        ) from None
    return parts


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a whole file or, with a ParityError, none of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(data.encode() if isinstance(data, str) else data)
        draft.replace(path)
    except OSError as error:
        raise ParityError(f"cannot write {path}: {error.strerror}.") from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


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


def worst_of(records: Iterable[Record]) -> dict[str, Record]:
    """Return the records by id in sorted order; of several with one id, the worst."""
    worst: dict[str, Record] = {}
    for record in records:
        known = worst.get(record.id)
        if known is None or SEVERITY[record.verdict] > SEVERITY[known.verdict]:
            worst[record.id] = record
    return dict(sorted(worst.items()))


def merge(parts: Iterable[Path], extra: Iterable[Record] = ()) -> tuple[Record, ...]:
    """Return the records of all parts and `extra`, sorted by id.

    Two records have one id where a worker crashed after it wrote a test that another then
    repeated; the worse stands. A half line at the end of a part is what a crash left: dropped.
    """
    found = [record for part in sorted(parts) for record in read(part, partial=True).records]
    return tuple(worst_of([*found, *extra]).values())


def write(run: Run, path: Path) -> Run:
    """Write a whole results file in one step; return `run` with its end line's count set."""
    lines = [to_line("run", run.info), *(to_line("record", record) for record in run.records)]
    if run.end is not None:
        end = replace(run.end, records=len(run.records))
        run = replace(run, end=end)
        lines.append(to_line("end", end))
    write_atomic(path, b"".join(lines))
    return run
