"""The file results.jsonl: read, never half trusted, and written whole.

Only the end line makes a file complete; what a run writes before that are its `parts`. The values
in it are `records`.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_parity.references.errors import ParityError
from moe_parity.reports.records import (
    SCHEMA,
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


def write(run: Run, path: Path) -> Run:
    """Write a whole results file in one step; return `run` with its end line's count set."""
    lines = [to_line("run", run.info), *(to_line("record", record) for record in run.records)]
    if run.end is not None:
        end = replace(run.end, records=len(run.records))
        run = replace(run, end=end)
        lines.append(to_line("end", end))
    write_atomic(path, b"".join(lines))
    return run
