"""A comparison as Markdown for the comment of a pull request: a table for each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moe_parity.reports.cells import LIMIT, cell, code, fit, table
from moe_parity.reports.comparison import Comparison, Item, State, groups, reasons

_MARK = {"changed": "✗", "incomplete": "!", "same": "✓"}
LONGEST = 1500
"""Letters of a sentence, at most."""
ROWS = 40
"""Changes of a stage that have a row."""


def render(comparison: Comparison) -> str:
    """Return the comparison, at most 60 KiB: what does not fit is cut, and said."""
    sentence = cell(comparison.sentence, LONGEST)
    lines = [f"### {_MARK[comparison.status]} {sentence}", ""]
    lines += [f"base: {code(comparison.base)}  ", f"candidate: {code(comparison.candidate)}", ""]
    for note in comparison.notes:
        lines += [cell(note, LONGEST), ""]
    for stage in comparison.stages:
        lines += _stage(stage or "no stage", comparison.of(stage))
    return fit(lines, LIMIT - 200, "`parity compare --json`")


def _stage(stage: str, items: tuple[Item, ...]) -> list[str]:
    states = [state for state in State if any(item.state is state for item in items)]
    rows = []
    for kernel in dict.fromkeys(item.kernel for item in items):
        number = Counter(item.state for item in items if item.kernel == kernel)
        rows.append([kernel, *(f"{number[state]:,}" for state in states)])
    lines = [f"#### {cell(stage)}", ""]
    lines += table(["kernel", *(state.value for state in states)], len(states), rows)
    return [*lines, "", *_changes(items), *_apart(items)]


def _changes(items: tuple[Item, ...]) -> Iterator[str]:
    moved = groups([item for item in items if item.state not in (State.SAME, State.AGREED)])
    moved = [group for group in moved if group.first.state is not State.APART]
    for group in moved[:ROWS]:
        first = group.first
        why = f" {code(first.why)}" if first.why else ""
        yield f"- **{first.state.value}**{why}: {cell(first.sentence, LONGEST)}  "
        more = f" and {len(group.items) - 1:,} more" if len(group.items) > 1 else ""
        yield f"  {code(first.case)}{more}"
    if len(moved) > ROWS:
        yield f"- and {len(moved) - ROWS:,} more"
    if moved:
        yield ""


def _apart(items: tuple[Item, ...]) -> Iterator[str]:
    rows = [[reason, f"{many:,}"] for reason, many in reasons(items)]
    if rows:
        yield from table(["not comparable", "number"], 1, rows[:ROWS])
        yield ""
