"""An invariance map as records: one for each band, which is a line's numbers of tokens alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_parity.harness.checks.expect import sources
from moe_parity.harness.diagnosis.cause import CauseKind
from moe_parity.harness.evidence.map_values import InvarianceMap, Line, Places
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case
from moe_parity.reports.records import Record

CHECK = "invariance_map"
DEPENDS = "depends_on_other_rows"


def labels(kernel: Kernel, case: Case, config: str, band: str = "") -> dict[str, Any]:
    """Return the fields that say of what a record is."""
    name = ":".join(filter(None, ("map", kernel.name, case.id, config, band)))
    own = {word: getattr(case, word).value for word in ("scale", "layout", "dtype")
           if word in kernel.stage.reads}  # fmt: skip
    return {
        "id": f"{name}:{CHECK}", "nodeid": f"map[{kernel.name}]", "suite": "map",
        "kernel": kernel.name, "stage": kernel.stage.name, "contract": kernel.contract.words,
        "shape": kernel.stage.size_words(case), **own,
        "sources": sources(kernel),
    }  # fmt: skip


def records(made: InvarianceMap, device: str, repro: str) -> Iterator[Record]:
    """Yield the records of a map: the first line's, those of lines that differ, of positions.

    The first has what was compared in all.
    """
    first, bad = made.lines[0], made.broken
    alike = [line for line in made.lines[1:] if line.agrees]
    number = 0
    for line in made.said:
        for span in line.spans:
            words = {
                "case": made.case.id, "config": made.config, "line": line.words,
                "first": str(span.first), "last": str(span.last), "bits": span.bits,
                "decision": span.decision, "called": _called(line),
                "alike": "" if line is not first else "; ".join(
                    f"{one.words} ({_called(one)})" for one in alike
                ),
            }  # fmt: skip
            yield _record(made, words, span.recipe, device, number, bad, repro)
            number += 1
    for place in made.places:
        yield _record(made, _of(made, place), place.recipe, device, number, bad, repro)
        number += 1


def _called(line: Line) -> str:
    return f"M = {', '.join(map(str, line.called))}"


def _of(made: InvarianceMap, place: Places) -> dict[str, str]:
    return {
        "case": made.case.id, "config": made.config, "line": f"copies, {place.m}",
        "positions": place.positions, "bits": place.bits, "decision": place.decision,
    }  # fmt: skip


def _record(
    made: InvarianceMap, words: dict[str, str], recipe: str, device: str, number: int, bad: bool,
    repro: str,
) -> Record:  # fmt: skip
    head, bad = number == 0, bad and number == 0
    who = f"{made.kernel.stage} of {made.kernel.name}"
    who += f", configuration {made.config}" if made.config else ""
    text = f"{who}, on {made.case.id}: {made.sentence}."
    text += " Its contract promises that they do not (invariance)." if bad else ""
    return Record(
        **labels(made.kernel, made.case, made.config, f"{number:02}"), check=CHECK,
        verdict="fail" if bad else "pass", recipe=recipe, device=device,
        message=text if head else "", cause_kind=CauseKind.BATCH.value if bad else "",
        cause=DEPENDS if bad else "", repro=repro if bad else "", differing=int(bad),
        compared=made.compared if head else 0, could_show=made.could_show if head else None,
        band={name: word for name, word in words.items() if word},
    )  # fmt: skip
