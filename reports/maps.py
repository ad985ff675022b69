"""Invariance maps of a run: rows for tables, and the geometry of a picture without scripts.

A record of the check ``invariance_map`` is a band: `band` has its configuration (`config`), the
place and company of the token (`line`), the numbers of tokens (`first`, `last`) or the `positions`
in a batch of copies, the digest of the `bits`, the `decision` that changes where it begins, the
numbers of tokens that were `called`, and the lines that are `alike`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_parity.reports.records import Record, Run

CHECK = "invariance_map"
HEAD = ("kernel", "case", "configuration", "token", "M from", "to", "bits", "recipe",
        "what changes there", "compared", "could show")  # fmt: skip
NUMBERS = 2
"""The last columns that are numbers."""
TONES = 8
"""Colours of classes of bits; of more, they come again: letters tell all."""

_WIDTH, _TALL, _TOP = 1100, 26, 8
_RIGHT = 40
"""Room for the number of an edge at the very end."""
_INSIDE = 62
"""Width from which on a band's recipe has room in it."""


def bands(run: Run) -> list[Record]:
    """Return the records that are bands, in the order of the run."""
    return [record for record in run.checks if record.check == CHECK and record.band]


def letters(records: Iterable[Record]) -> dict[tuple[str, str, str], str]:
    """Return a letter for each kind of bits of a kernel on a case, in the order in which they come.

    Keys are (kernel, case, digest).
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    for record in records:
        own = found.setdefault((record.kernel, record.band["case"]), {})
        own.setdefault(record.band["bits"], _letter(len(own)))
    return {(*key, bits): name for key, own in found.items() for bits, name in own.items()}


def _letter(number: int) -> str:
    name = ""
    while number >= 0:
        name, number = chr(ord("A") + number % 26) + name, number // 26 - 1
    return name


def rows(run: Run) -> list[tuple[str, ...]]:
    """Return the rows of the table, with the columns of HEAD."""
    found = bands(run)
    names = letters(found)
    made: list[tuple[str, ...]] = []
    for record in found:
        band = record.band
        place = "positions" in band
        whole = (
            (f"{record.compared:,}", f"{record.could_show or 0:,}") if record.compared else ("", "")
        )
        made.append((
            record.kernel, band["case"], band.get("config", ""), band["line"],
            f"positions {band['positions']}" if place else band["first"],
            "" if place else band["last"],
            names[record.kernel, band["case"], band["bits"]], record.recipe,
            band.get("decision", ""), *whole,
        ))  # fmt: skip
    return made


def text(run: Run) -> list[str]:
    """Return the table as lines of text in columns; empty where there is no map."""
    table = rows(run)
    if not table:
        return []
    cells = [HEAD, *table]
    used = [n for n in range(len(HEAD)) if any(row[n] for row in table)]
    widths = {n: max(len(row[n]) for row in cells) for n in used}
    return ["  ".join(row[n].ljust(widths[n]) for n in used).rstrip() for row in cells]


# --- the picture --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """One band: where it lies, and what it says."""

    x: float
    width: float
    tone: int
    letter: str
    words: str
    """For a reader who points at it."""
    inside: str
    """What has room in it."""


@dataclass(frozen=True)
class Lane:
    """One line of a configuration."""

    y: int
    name: str
    boxes: tuple[Box, ...]
    edges: tuple[tuple[float, str], ...]
    """Where bits change: x, and the number of tokens."""


@dataclass(frozen=True)
class Picture:
    """A kernel on a case: numbers of tokens to the right, on a log axis, lines downwards."""

    kernel: str
    stage: str
    case: str
    lanes: tuple[Lane, ...]
    ticks: tuple[tuple[float, str], ...]
    width: int
    height: int
    bottom: int
    left: int
    """Where the names of lanes end."""
    sentences: tuple[str, ...]
    alike: tuple[tuple[str, str], ...]
    """(Configuration, the lines with the same bits as the first)."""


def pictures(run: Run) -> list[Picture]:
    """Return a picture of each kernel and case."""
    found = bands(run)
    names = letters(found)
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        groups.setdefault((record.kernel, record.band["case"]), []).append(record)
    return [_picture(own, names) for own in groups.values()]


def _picture(own: Sequence[Record], names: Mapping[tuple[str, str, str], str]) -> Picture:
    spans = [record for record in own if "first" in record.band]
    most = max(int(record.band["last"]) for record in spans)
    named = [(r.band.get("config", "") + r.band["line"]) for r in spans]
    left = 40 + 7 * min(max(map(len, named)), 60)
    scale = (_WIDTH - left - _RIGHT) / math.log2(most + 1)

    def at(m: int) -> float:
        return round(left + scale * math.log2(m), 1)

    lines: dict[tuple[str, str], list[Record]] = {}
    for record in spans:
        lines.setdefault((record.band.get("config", ""), record.band["line"]), []).append(record)
    firsts: dict[str, str] = {}
    lanes = []
    for n, ((config, line), records) in enumerate(lines.items()):
        known = firsts.setdefault(config, line)
        name = (config or "the kernel") if line == known else f"{config} {line}".strip()
        boxes = [_box(record, at, names) for record in records]
        edges = [(at(int(r.band["first"])), r.band["first"]) for r in records[1:]]
        lanes.append(Lane(_TOP + n * (_TALL + 14), name, tuple(boxes), _apart(edges)))
    bottom = _TOP + len(lanes) * (_TALL + 14)
    powers = [1 << n for n in range(most.bit_length()) if 1 << n <= most]
    return Picture(
        kernel=own[0].kernel, stage=own[0].stage, case=own[0].band["case"], lanes=tuple(lanes),
        ticks=tuple((at(m), str(m)) for m in powers), width=_WIDTH, height=bottom + 34,
        bottom=bottom, left=left - 10, sentences=tuple(r.message for r in own if r.message),
        alike=tuple(
            (r.band.get("config", ""), r.band["alike"]) for r in own if r.band.get("alike")
        ),
    )  # fmt: skip


def _apart(edges: list[tuple[float, str]]) -> tuple[tuple[float, str], ...]:
    """Return edges whose labels do not touch: of two that would, the second loses its label."""
    kept: list[tuple[float, str]] = []
    free = 0.0
    for x, label in edges:
        room = x >= free
        kept.append((x, label if room else ""))
        free = x + 9 * len(label) + 6 if room else free
    return tuple(kept)


def _box(
    record: Record, at: Callable[[int], float], names: Mapping[tuple[str, str, str], str]
) -> Box:
    band = record.band
    letter = names[record.kernel, band["case"], band["bits"]]
    left, right = at(int(band["first"])), at(int(band["last"]) + 1)
    words = f"M = {band['first']} to {band['last']}: bits {letter}, {record.recipe}"
    if band.get("decision"):
        words += f"; {band['decision']}"
    wide = right - left
    room = max(0, int((wide - 26) // 7))
    inside = record.recipe if wide >= _INSIDE and len(record.recipe) <= room else ""
    tone = (sum(26**n * (ord(c) - 64) for n, c in enumerate(letter[::-1])) - 1) % TONES
    return Box(left, round(wide, 1), tone, letter, words, inside)
