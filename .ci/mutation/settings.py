"""What stands in mutation.toml and in a session's file."""

from __future__ import annotations

import ast
import dataclasses
import fcntl
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any, TextIO

from mutation.changes import Change, Refusal, places

ROOT = Path(__file__).resolve().parents[2]
DEAD = ("killed", "timeout", "does not import", "crashed")
"""The outcomes in which tests noticed a mutant."""
CONFIG = ROOT / ".ci" / "mutation.toml"


@dataclasses.dataclass(frozen=True)
class Config:
    """mutation.toml, read and checked."""

    selections: dict[str, tuple[str, ...]]
    equivalent: dict[tuple[str, str, str, int, str], str]
    excluded: re.Pattern[str]
    factor: float
    at_least: float
    memory: int


def configuration(path: Path = CONFIG, root: Path = ROOT) -> Config:
    """Read the configuration; raise Refusal where it and the tree do not fit together."""
    raw = tomllib.loads(path.read_text())
    modules = sorted({str(p.relative_to(root)) for area in raw["areas"] for p in root.glob(area)})
    selections: dict[str, tuple[str, ...]] = {}
    for entry in raw["selection"]:
        for module in entry["modules"]:
            if module not in modules or module in selections:
                why = "stands twice" if module in selections else "is in no area of the tree"
                raise Refusal(f"{path.name}: {module} {why}; each module has one selection.")
            selections[module] = tuple(entry["tests"])
    for module in modules:
        if module not in selections and not blank(root / module):
            raise Refusal(f"{path.name}: {module} has no selection of tests; add one.")
    for tests in set(selections.values()):
        for test in tests:
            if test.startswith("suites/") and not (root / test.partition("::")[0]).exists():
                raise Refusal(f"{path.name}: there is no {test}; name tests that exist.")
    equivalent = {}
    for entry in raw.get("equivalent", []):
        reason = entry.pop("reason")
        made = Change(**{"nth": 0, **entry})
        lines = (root / made.module).read_text().split("\n") if made.module in modules else []
        if len(places(lines, made.line)) <= made.nth:
            raise Refusal(
                f"{path.name}: {made.module} has no line {made.line!r} with number {made.nth}; "
                "take its equivalent change off the list, or write the line as it is now."
            )
        equivalent[made.key] = reason
    limits = raw["limits"]
    excluded = re.compile("|".join(f"(?:{rule})" for rule in raw["operators"]["exclude"]))
    return Config(
        selections, equivalent, excluded, limits["factor"], limits["at_least"],
        int(limits["memory_gib"] * 2**30),
    )  # fmt: skip


def blank(path: Path) -> bool:
    """Say whether a module is a docstring and nothing else."""
    return len(ast.parse(path.read_text()).body) <= 1


# --- a session ------------------------------------------------------------------------------------


def locked(path: Path) -> TextIO:
    """Open a session's file to write at its end, or refuse where a run has it."""
    stream = path.open("a")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise Refusal(f"another run writes to {path}; wait for it, or name another file.") from None
    return stream


class Session:
    """A file of JSON lines: a head, the mutants, the results so far."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise Refusal(f"there is no session {path}; make one with: .ci/mutate init.")
        self.path, self.head = path, {}
        self.mutants: list[Change] = []
        self.results: dict[int, dict[str, Any]] = {}
        for text in self._whole().splitlines():
            line = json.loads(text)
            if "mutant" in line:
                self.mutants.append(Change(**line["mutant"]))
            elif "result" in line:
                self.results[line["result"]] = line
            else:
                self.head = line

    def awaits(self, number: int, config: Config, *, again: bool) -> bool:
        """Say whether a mutant has no result, or, once more, whether it survived unexplained."""
        result = self.results.get(number)
        if result is None:
            return True
        unexplained = self.mutants[number].key not in config.equivalent
        return again and result["outcome"] not in DEAD and unexplained

    def _whole(self) -> str:
        """Return the lines that end; a process that was killed may have left half a one."""
        text = self.path.read_text()
        return text[: text.rfind("\n") + 1]

    def open(self) -> TextIO:
        """Return the file, to add results at its end; no other run has it until it is closed."""
        stream = locked(self.path)
        stream.truncate(len(self._whole().encode()))
        return stream

    def add(self, stream: TextIO, number: int, result: dict[str, Any]) -> None:
        """Write the result of a mutant, at once."""
        self.results[number] = {"result": number, **result}
        stream.write(json.dumps(self.results[number]) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
