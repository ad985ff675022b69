"""Markdown for a pull request's comment: cells, code and tables that no content breaks out of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LIMIT = 60 << 10
"""Bytes of a summary, at most: a comment may hold 64 KiB."""


def cell(text: str, most: int = 300) -> str:
    """Return text that stays within its cell and is not Markdown or HTML."""
    flat = " ".join(text.split())
    for special in "\\`*_<>|[]":
        flat = flat.replace(special, f"\\{special}")
    return flat[:most]


def code(text: str) -> str:
    """Return text as a code span, whatever backquotes it holds."""
    flat = " ".join(text.split())
    fence = "`" * (max((len(run) for run in _runs(flat)), default=0) + 1)
    pad = " " if "`" in flat else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def _runs(text: str) -> list[str]:
    return [run for run in "".join(c if c == "`" else " " for c in text).split() if run]


def table(headings: Sequence[str], numbers: int, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose last `numbers` columns are right-aligned."""
    rule = [":--"] * (len(headings) - numbers) + ["--:"] * numbers
    lines = [f"| {' | '.join(headings)} |", f"|{'|'.join(rule)}|"]
    return lines + [f"| {' | '.join(cell(text) for text in row)} |" for row in rows]


def fit(lines: list[str], room: int, where: str = "report.html") -> str:
    """Return as many lines as fit into `room` bytes, and a sentence where some do not.

    The sentence says `where` all of them are.
    """
    taken = 0
    for line in lines:
        room -= len(line.encode()) + 1
        if room < 0:
            break
        taken += 1
    text = "".join(f"{line}\n" for line in lines[:taken])
    if taken < len(lines):
        text += f"\n{len(lines) - taken:,} more lines were cut; {where} has them.\n"
    return text
