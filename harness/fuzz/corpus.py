"""The corpus: failures as files, each of which is tried again before anything is drawn.

An entry is JSON and says which kernel failed on which case, with which seed, and why. It has no
date and no version in it: the same failure is the same file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_parity.harness.fuzz.reason import Failure, Reason, case_of
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.reports.results import write_atomic

SCHEMA = 1
FOLDER = "parity-corpus"
"""Where a caller's entries are, below the working directory."""

_FIELDS = {
    "schema": int, "kernel": str, "case": str, "seed": int, "check": str, "stage": str,
    "cause": str, "sentence": str, "after": list,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A failure that was kept, and its file."""

    path: Path
    kernel: str
    failure: Failure

    @property
    def case(self) -> Case:
        """The case that failed."""
        return self.failure.case


def home(builtin: bool, suites: Path) -> Path:
    """Return where failures go: beside the suites in a checkout for kernels of ours, else here."""
    here = suites.resolve().parent == Path.cwd().resolve()
    return suites / "corpus" if here and builtin else Path(FOLDER)


def save(folder: Path, kernel: str, failure: Failure) -> Path:
    """Write a failure into a folder and return its file; raises ParityError where that fails."""
    data: dict[str, Any] = {"schema": SCHEMA, "kernel": kernel, **failure.to_json()}
    del data["others"], data["kind"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParityError(f"cannot write {folder}: {error.strerror}.") from None
    path = folder / name_of(kernel, failure)
    write_atomic(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    return path


def name_of(kernel: str, failure: Failure) -> str:
    """Return the name of an entry's file: the kernel, and a hash of the case and the reason."""
    data = failure.to_json()
    key = [data[name] for name in ("case", "seed", "check", "stage", "cause", "after")]
    return f"{kernel}-{hashlib.sha256(json.dumps([kernel, *key]).encode()).hexdigest()[:12]}.json"


def files(folder: Path, kernel: str | None = None) -> list[Path]:
    """Return the entries of a folder in order of name, those of one kernel or all."""
    with contextlib.suppress(OSError):
        found = sorted(folder.glob("*.json"))
        return [path for path in found if kernel is None or kernel_of(path) == kernel]
    return []


def kernel_of(path: Path) -> str:
    """Return the kernel that a file's name says, which a broken file has too."""
    return path.stem.rpartition("-")[0]


def load(path: Path) -> Entry:
    """Read an entry; raises ParityError, in one sentence, for what is none."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ParityError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise _not_an_entry(path, "it is not JSON") from None
    if not isinstance(data, dict):
        raise _not_an_entry(path, "it is no object")
    if data.get("schema") != SCHEMA:
        raise ParityError(
            f"{path} has schema {data.get('schema')!r:.40}, this version reads schema {SCHEMA}: "
            "use the moe-parity that wrote it, or delete the file."
        )
    for name, kind in _FIELDS.items():
        value = data.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _not_an_entry(path, f"{name} is {value!r:.40}, expected {kind.__name__}")
    try:
        failure = Failure(
            case=case_of(data["case"], data["seed"]),
            reason=Reason(data["check"], data["stage"], data["cause"]),
            sentence=data["sentence"],
            after=tuple(_calls(data["after"])),
        )
    except (ParityError, TypeError, ValueError) as error:
        raise _not_an_entry(path, str(error).rstrip(".")) from None
    return Entry(path=path, kernel=data["kernel"], failure=failure)


def _calls(listed: list[Any]) -> Iterator[Case]:
    for entry in listed:
        text, seed = entry
        if not isinstance(text, str) or not isinstance(seed, int):
            raise TypeError(f"after has {entry!r:.40}, expected a case id and a seed")
        yield case_of(text, seed)


def _not_an_entry(path: Path, why: str) -> ParityError:
    return ParityError(f"{path} is no entry of a corpus: {why}; delete it or restore it.")
