"""The recorder: what the checks of the running test say becomes the records of that test.

Hypothesis calls a test body for many examples, so several calls with one `check` within a test
are one record: outputs are summed, distances keep their extreme, the worst verdict stands, and of
several that failed the last one speaks, because Hypothesis replays the minimal example last. The
records of a test are handed on when it has finished, together with one for the test itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moe_parity.reports.records import ITEM_CHECK, SEVERITY, Record, Verdict

FIELDS = frozenset(f.name for f in fields(Record))
LABELS = ("kernel", "recipe", "stage", "scale", "mid", "layout", "dtype", "clamp", "ep", "shape")
"""Fields that say what was tested; a marker, a parameter or a check may set them."""

_SET_BY_RECORDER = frozenset({"id", "nodeid", "suite", "examples"})
_SUMS = ("compared", "differing", "code_flips", "could_show")
_LEAST = "_least"  # the distance of the example that named the nearest mutant
_MAXIMA = ("max_ulp", "rel_err_bf16", "rel_err_f64")


def item_name(nodeid: str) -> tuple[str, str]:
    """Return (suite, name) of a pytest node id; `name` begins the ids of its records.

    `suites/test_quant.py::test_bits[ours-ue8m0]` gives (`quant`, `test_bits:ours-ue8m0`). A file
    in a folder below the suites may repeat a test's name, so its suite stands in front.
    """
    path, _, rest = nodeid.partition("::")
    folders = path.removesuffix(".py").split("/")
    stem = folders[-1].removeprefix("test_")
    suite = (
        "/".join([*folders[folders.index("suites") + 1 : -1], stem])
        if ("suites" in folders)
        else stem
    )
    function, _, param = rest.partition("[")
    name = f"{function.replace('::', '.')}:{param.removesuffix(']')}"
    return suite, f"{suite}/{name}" if "/" in suite else name


def whole_name(nodeid: str) -> tuple[str, str]:
    """Return (suite, name) of a node id in any repository, where a name may stand in many files.

    `tests/test_quant.py::TestX::test_bits[a-b]` gives (`tests/test_quant.py`,
    `tests/test_quant.py/TestX.test_bits:a-b`).
    """
    path, _, rest = nodeid.partition("::")
    function, _, param = rest.partition("[")
    return path, f"{path}/{function.replace('::', '.')}:{param.removesuffix(']')}"


Named = Callable[[str], tuple[str, str]]
"""A node id -> (suite, name)."""


def as_label(value: object) -> str:
    """Return a parameter or marker value as text: None and False "", 7.0 "7", True "yes"."""
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass
class Item:
    """The running test: what its parameters and marker say, and its checks so far."""

    nodeid: str
    labels: Mapping[str, Any] = field(default_factory=dict)
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: str | None = None
    why: str = ""
    """The kind of the skip's reason, where it has one."""
    failed: str | None = None
    expected_failure: bool = False
    repro: str = ""
    """What runs again what broke the test, where that is one case."""
    seconds: float = 0.0

    @property
    def refuted(self) -> str | None:
        """The message of the first check that has failed, None if none has."""
        bad = (c for c in self.checks.values() if SEVERITY[c["verdict"]] > SEVERITY["pass"])
        return next((str(c.get("message") or c["check"]) for c in bad), None)


def _fold(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the two calls of one check, `new` the later one, as one."""
    bad = SEVERITY["fail"]
    before, after = SEVERITY[old["verdict"]], SEVERITY[new["verdict"]]
    folded = dict(new if after > before or after == before >= bad else old)
    for name in _SUMS:
        known = [call[name] for call in (old, new) if call.get(name) is not None]
        folded |= {name: sum(known)} if known else {}
    for name in _MAXIMA:
        known = [call[name] for call in (old, new) if call.get(name) is not None]
        folded |= {name: max(known)} if known else {}
    told = [call for call in (old, new) if call.get("mutant_distance") is not None]
    if told:
        # Each example names its nearest mutant by the outputs that tell it; the sum of these
        # numbers is at most what tells any one mutant over all examples.
        nearest = min(told, key=lambda call: call.get(_LEAST, call["mutant_distance"]))
        folded["nearest_mutant"] = nearest.get("nearest_mutant", "")
        folded[_LEAST] = nearest.get(_LEAST, nearest["mutant_distance"])
        folded["mutant_distance"] = sum(call["mutant_distance"] for call in told)
    if SEVERITY[folded["verdict"]] < bad:
        folded |= _shared_labels(old, new)
    folded.pop("digest", None)  # of one example: the others are as much the record's
    folded["examples"] = old["examples"] + 1
    folded["seconds"] = old.get("seconds", 0.0) + new.get("seconds", 0.0)
    folded["sources"] = {**old.get("sources", {}), **new.get("sources", {})}
    return folded


def _shared_labels(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the labels of several passing examples: all values, or that the shape was drawn."""
    labels = {}
    for name in (*LABELS, "bound", "device"):
        values = {part for call in (old, new) for part in str(call.get(name, "")).split("+")}
        values.discard("")
        if name == "shape" and len(values) > 1:
            values = {"drawn"}
        labels[name] = "+".join(sorted(values))
    return labels


class Recorder:
    """Takes what checks say (`add`) while a test runs, and hands on its records at its end."""

    def __init__(
        self,
        *,
        device: str,
        seed: int | None,
        sink: Callable[[Record], None],
        named: Named = item_name,
    ) -> None:
        self.device = device
        self.named = named
        self.seed = seed
        self.item: Item | None = None
        self._sink = sink
        self._outer: Recorder | None = None  # of a session whose test runs this session

    def __repr__(self) -> str:
        """Stay short in the examples that hypothesis prints."""
        return "parity_recorder"

    def add(self, record_fields: Mapping[str, Any]) -> None:
        """Add what a check found: fields of `Record`, `check` and `verdict` among them.

        The recorder itself sets id, nodeid, suite and examples, and fills from the test's
        parameters and `moe` marker what is left out. Raises TypeError for a field that does not
        exist or is not the check's to set, RuntimeError outside a test.
        """
        if self.item is None:
            raise RuntimeError("parity_recorder.add was called while no test is running")
        new = dict(record_fields)
        if wrong := (new.keys() - FIELDS) | (new.keys() & _SET_BY_RECORDER):
            raise TypeError(f"a check cannot record the fields {', '.join(sorted(wrong))}")
        if new.get("verdict") not in SEVERITY or not new.get("check"):
            raise TypeError(f"a record needs check and verdict, one of {', '.join(SEVERITY)}")
        if new["check"] == ITEM_CHECK:
            raise TypeError(f"the check {ITEM_CHECK!r} is the test's own record")
        for name, value in new.items():
            # a scalar of numpy or torch has no JSON
            plain = value.item() if hasattr(value, "item") else value
            new[name] = as_label(plain) if name in LABELS else plain
        check = self.item.checks
        known = check.get(new["check"])
        check[new["check"]] = new | {"examples": 1} if known is None else _fold(known, new)

    def start(self, nodeid: str, labels: Mapping[str, Any]) -> Item:
        """Begin a test; `labels` are the fields that its parameters and marker set."""
        global _running
        self.item, self._outer, _running = Item(nodeid, labels), _running, self
        return self.item

    def finish(self) -> None:
        """End the test and hand on its records."""
        global _running
        item, self.item = self.item, None
        if item is not None:
            _running, self._outer = self._outer, None
            for record in self.records(item):
                self._sink(record)

    def records(self, item: Item) -> list[Record]:
        """Return the records of a finished test: one for each check, then its own."""
        records = []
        for check in item.checks.values():
            if item.expected_failure and SEVERITY[check["verdict"]] > SEVERITY["pass"]:
                check = check | {"verdict": "skip", "reason": item.skipped}
            records.append(self._record(item, **check))
        return [*records, self._own_record(item)]

    def _own_record(self, item: Item) -> Record:
        refuted = None if item.expected_failure else item.refuted
        verdict: Verdict = "pass"
        message = ""
        if item.failed is not None:
            verdict, message = ("fail", refuted) if refuted else ("error", item.failed)
        elif refuted is not None:
            verdict, message = "fail", f"the test passed although a check failed: {refuted}"
        elif item.skipped is not None:
            verdict = "skip"
        return self._record(
            item,
            check=ITEM_CHECK,
            verdict=verdict,
            message=message,
            reason=(item.skipped or "") if verdict == "skip" else "",
            why=item.why if verdict == "skip" else "",
            repro=item.repro,
            seconds=item.seconds,
            examples=max((c["examples"] for c in item.checks.values()), default=0),
        )

    def _record(self, item: Item, **values: Any) -> Record:
        suite, name = self.named(item.nodeid)
        given = {key: value for key, value in values.items() if value not in (None, "")}
        given.pop(_LEAST, None)
        record_id = f"{name}:{given['check']}"
        if given["verdict"] in ("fail", "error") and "repro" not in given:
            seed = "" if self.seed is None else f" --parity-seed={self.seed}"
            given["repro"] = f"pytest '{item.nodeid}'{seed}"
        given["seconds"] = round(given.get("seconds", 0.0), 4)
        own = {"id": record_id, "nodeid": item.nodeid, "suite": suite}
        return Record(**({"device": self.device} | dict(item.labels) | given | own))


_running: Recorder | None = None


def running() -> Recorder | None:
    """Return the recorder of the running test; None outside of tests, and without the plugin."""
    return _running
