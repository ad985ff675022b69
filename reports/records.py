"""Records: what a run writes down, as values and as lines of JSON, and how a run is judged.

A results file is JSON lines: one `run` line (who, what, with which versions), one line for each
record, one `end` line. JSON has no NaN: a float that is not finite is written as "nan", "inf" or
"-inf"; a record leaves out what has its default value. Nothing here needs more than the standard
library, so that a report can be made where torch is not installed.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin

from moe_parity.references.errors import ParityError

SCHEMA = 1
ITEM_CHECK = "test"
"""The check of the record that every collected test gets, whatever else it records."""

Verdict = Literal["pass", "fail", "error", "skip"]
SEVERITY: Mapping[str, int] = {"skip": 0, "pass": 1, "fail": 2, "error": 3}
"""Verdicts from mild to bad; where two meet, the worse one stands."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one check said about one test; `check == "test"` speaks for the test itself.

    `compared` counts outputs, `could_show` those of them that would have been red under at least
    one mutant; `differing` counts unequal outputs, `code_flips` unequal quantized codes,
    `max_ulp` the largest distance in units in the last place; `mutant_distance` counts the outputs
    that tell the nearest mutant from the recipe. `why` is the kind of a skip's `reason`, `mid` the
    scale format of a second quantization, `contract` what the kernel promises. None means not
    measured.

    `cause_kind`, `cause` and `alternatives` say why a check is red: what sort of thing it was, its
    name (`quant.apply=divide`, `k_tail`, `unwritten`), and the names of what explains the same bits
    as well. Reports group by the first two. A `cause` without a kind is no reason but what the
    check was about, for instance the mutant that it killed.

    `digest` is `<case id>@<seed> <digest>` of the outputs that a check of bits judged, empty where
    it judged several cases, and in files of before.
    """

    id: str
    check: str
    verdict: Verdict
    nodeid: str = ""
    suite: str = ""
    kernel: str = ""
    recipe: str = ""
    stage: str = ""
    reason: str = ""
    why: str = ""
    scale: str = ""
    mid: str = ""
    layout: str = ""
    dtype: str = ""
    clamp: str = ""
    ep: str = ""
    graph: bool = False
    poison: bool = False
    shape: str = ""
    device: str = ""
    examples: int = 0
    bound: str = ""
    contract: str = ""
    compared: int = 0
    differing: int = 0
    code_flips: int = 0
    max_ulp: int | None = None
    could_show: int | None = None
    nearest_mutant: str = ""
    mutant_distance: float | None = None
    rel_err_bf16: float | None = None
    rel_err_f64: float | None = None
    message: str = ""
    cause_kind: str = ""
    cause: str = ""
    alternatives: tuple[str, ...] = ()
    repro: str = ""
    digest: str = ""
    seconds: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)
    band: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """Another repository that a run took something from: kernels by name, or its tests.

    `name` is its folder's; `commit` and `dirty` are None for files outside of any checkout.
    """

    name: str
    commit: str | None = None
    dirty: bool | None = None
    kernels: tuple[str, ...] = ()
    tests: bool = False

    @property
    def words(self) -> str:
        """What comes from it, for reports."""
        return " and ".join(filter(None, ("tests" if self.tests else "", ", ".join(self.kernels))))


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The first line: who ran what, where.

    `commit` and `dirty` are those of this project, None outside a checkout; `checkouts` are all
    other repositories that kernels or tests came from.
    """

    started: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    dirty: bool | None = None
    checkouts: tuple[Checkout, ...] = ()
    seed: int | None = None
    profile: str = ""
    device: str = ""
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The last line. `collected` and `ran` count tests; a skipped test did not run."""

    records: int = 0
    collected: int
    ran: int
    exitstatus: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """A results file in memory; `end` is None where the file was interrupted."""

    info: RunInfo
    records: tuple[Record, ...]
    end: RunEnd | None

    @property
    def tests(self) -> tuple[Record, ...]:
        """One record for each test."""
        return tuple(record for record in self.records if record.check == ITEM_CHECK)

    @property
    def checks(self) -> tuple[Record, ...]:
        """The records of checks, without those that speak for a test."""
        return tuple(record for record in self.records if record.check != ITEM_CHECK)


@dataclass(frozen=True)
class Judgement:
    """The verdict on a run: `fail` beats `incomplete`, which beats `pass`."""

    status: Literal["pass", "fail", "incomplete"]
    sentence: str


def count(number: int, noun: str) -> str:
    """Return for instance `1 test` or `1,234 tests`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def judge(run: Run) -> Judgement:
    """Judge a run by its records first, then by what its end line says."""
    tests = Counter(record.verdict for record in run.tests)
    ran = sum(tests.values()) - tests["skip"]
    tail = f", {count(tests['skip'], 'test')} skipped" if tests["skip"] else ""
    if bad := {r.nodeid for r in run.records if r.verdict in ("fail", "error")}:
        return Judgement("fail", f"{len(bad):,} of {count(ran, 'test')} did not pass{tail}")
    if run.end is None:
        return Judgement("incomplete", f"interrupted after {count(sum(tests.values()), 'test')}")
    lost = run.end.collected - sum(tests.values())
    if lost > 0:
        return Judgement(
            "incomplete", f"{lost:,} of {count(run.end.collected, 'test')} left no record"
        )
    if ran == 0:
        return Judgement("incomplete", f"nothing ran{tail}")
    if run.end.exitstatus != 0:
        return Judgement("incomplete", f"pytest ended with status {run.end.exitstatus}")
    checks = count(len(run.checks), "check")
    return Judgement("pass", f"{count(ran, 'test')} and {checks} passed{tail}")


# --- one line -----------------------------------------------------------------------------------


_DEFAULTS = asdict(Record(id="", check="", verdict="pass"))
for _required in ("id", "check", "verdict"):
    del _DEFAULTS[_required]


def _jsonable(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return dict(sorted(value.items()))
    return value


def to_line(kind: str, item: Record | RunInfo | RunEnd) -> bytes:
    """Return one line of a results file, newline included; a record leaves out its defaults."""
    data = asdict(item)
    if isinstance(item, Record):
        data = {key: value for key, value in data.items() if value != _DEFAULTS.get(key)}
    data = {"kind": kind} | {key: _jsonable(value) for key, value in data.items()}
    return json.dumps(data, ensure_ascii=False, allow_nan=False).encode() + b"\n"


_Line = TypeVar("_Line", Record, RunInfo, RunEnd, Checkout)


def _coerce(value: Any, hint: Any) -> object:
    """Return `value` as the type `hint`; raise TypeError where it is another."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _coerce(value, next(arg for arg in args if arg is not type(None)))
    if origin is Literal:
        fits = value in args
    elif origin is tuple and args[0] is Checkout:
        fits = isinstance(value, list) and all(isinstance(part, dict) for part in value)
        value = tuple(from_json(Checkout, part, "a checkout") for part in value) if fits else value
    elif origin is tuple:
        fits = isinstance(value, list) and all(isinstance(part, str) for part in value)
        value = tuple(value) if isinstance(value, list) else value
    elif origin is Mapping:
        fits = isinstance(value, dict) and all(isinstance(part, str) for part in value.values())
    elif hint is float:
        if value in ("nan", "inf", "-inf"):
            return float(str(value))
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    if not fits:
        raise TypeError
    return value


_RENAMED = {"decision": "cause"}
"""Fields of before -> their names now: a file that a former version wrote is read all the same."""
_IMPLIED = {"decision": {"cause_kind": "decision"}}
"""Fields of before -> what they said without a field of its own."""
_HINTS: Mapping[type, Mapping[str, Any]] = {
    line: typing.get_type_hints(line) for line in (Record, RunInfo, RunEnd, Checkout)
}


def from_json(line: type[_Line], data: Mapping[str, Any], where: str) -> _Line:
    """Return the value of a parsed line; `where` begins the sentence of a ParityError."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name == "kind":
            continue
        values |= _IMPLIED.get(name, {})
        name = _RENAMED.get(name, name)
        if name not in _HINTS[line]:
            raise ParityError(f"{where} has an unknown field {name!r}: not written by moe-parity.")
        try:
            values[name] = _coerce(value, _HINTS[line][name])
        except TypeError:
            raise ParityError(
                f"{where} has {name} = {value!r:.60}, which is not a {name} moe-parity writes."
            ) from None
    try:
        return line(**values)
    except TypeError:
        given = {f.name for f in fields(line)} & values.keys()
        missing = sorted(f.name for f in fields(line) if f.name not in given)
        raise ParityError(f"{where} lacks one of its fields {', '.join(missing)}.") from None
