"""The tables of a report, as pandas frames and plain rows; how they look is another matter."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from moe_parity.reports.records import ITEM_CHECK, SEVERITY, Run

SYMBOL: Mapping[str, str] = {"pass": "✓", "fail": "✗", "error": "!", "skip": "–"}
"""A verdict is never told by colour alone."""

TEXTS = ("kernel", "recipe", "stage", "shape", "scale", "mid", "layout", "dtype", "clamp", "ep")
COLUMNS = (
    *(name for name in TEXTS if name != "mid"),
    "check",
    "bound",
    "compared",
    "differing",
    "code_flips",
    "max_ulp",
    "could_show",
    "nearest_mutant",
    "mutant_distance",
    "rel_err_bf16",
    "rel_err_f64",
    "verdict",
    "mid",
    "cause_kind",
    "cause",
)
"""The columns of tolerances.csv, in order; a new one goes to the end."""

STAGE_COLUMNS = (
    "kernel",
    "stage",
    "contract",
    "checks",
    "passed",
    "compared",
    "differing",
    "code_flips",
    "max_ulp",
    "could_show",
    "nearest_mutant",
    "mutant_distance",
    "verdict",
)
"""The columns of `by_stage`."""

_WHOLE = ("compared", "differing", "code_flips", "max_ulp", "could_show")


def tolerances(run: Run) -> pd.DataFrame:
    """Return one row for each check that ran, with the columns of COLUMNS."""
    rows = [
        {name: getattr(record, name) for name in COLUMNS}
        for record in run.checks
        if record.verdict != "skip"
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(_WHOLE, "Int64"))


def to_csv(run: Run) -> str:
    """Return tolerances.csv; what was not measured is empty."""
    text: str = tolerances(run).to_csv(index=False, lineterminator="\n")
    return text


def worst_first(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with those that did not pass on top, otherwise in their order."""
    order = frame["verdict"].map(lambda verdict: -SEVERITY[verdict])
    return frame.iloc[order.argsort(kind="stable")]


def by_stage(run: Run) -> pd.DataFrame:
    """Return one row for each kernel and stage: how much was compared, how close it came.

    `could_show` is the smallest of the checks that were held against mutants: the weakest evidence.
    """
    frame = tolerances(run)
    promised = {(r.kernel, r.stage): r.contract for r in run.checks if r.contract}
    rows: list[dict[str, object]] = []
    for (kernel, stage), group in frame.groupby(["kernel", "stage"], sort=True):
        nearest = group.dropna(subset=["mutant_distance"]).sort_values("mutant_distance")
        measured = group[group["nearest_mutant"] != ""]
        rows.append(
            {
                "kernel": kernel,
                "stage": stage,
                "contract": promised.get((kernel, stage), ""),
                "checks": len(group),
                "passed": int((group["verdict"] == "pass").sum()),
                "compared": group["compared"].sum(),
                "differing": group["differing"].sum(),
                "code_flips": group["code_flips"].sum(),
                "max_ulp": group["max_ulp"].max(),
                "could_show": measured["could_show"].min(),
                "nearest_mutant": nearest["nearest_mutant"].iloc[0] if len(nearest) else "",
                "mutant_distance": nearest["mutant_distance"].iloc[0] if len(nearest) else None,
                "verdict": max(group["verdict"], key=lambda verdict: SEVERITY[verdict]),
            }
        )
    return pd.DataFrame(rows, columns=list(STAGE_COLUMNS))


@dataclass(frozen=True)
class Cell:
    """One cell of the coverage matrix: how many records of each verdict."""

    counts: Mapping[str, int]

    @property
    def verdict(self) -> str:
        """The worst verdict, empty where there is no record."""
        return max(self.counts, key=lambda verdict: SEVERITY[verdict], default="")

    @property
    def text(self) -> str:
        """Return for instance `✓ 12`, `✗ 1 of 12`, `– 3`, or a dot for nothing."""
        if not self.counts:
            return "·"
        total = sum(number for verdict, number in self.counts.items() if verdict != "skip")
        number = self.counts[self.verdict]
        of = f" of {total:,}" if self.verdict in ("fail", "error") else ""
        return f"{SYMBOL[self.verdict]} {number:,}{of}"


@dataclass(frozen=True)
class Coverage:
    """Kernel by format: which of them met at all, and how it went."""

    kernels: tuple[str, ...]
    rows: tuple[tuple[tuple[str, str, str], tuple[Cell, ...]], ...]
    """((scale, layout, dtype), a cell for each kernel)."""


def coverage(run: Run) -> Coverage:
    """Count the records of checks, and skipped tests, by (scale, layout, dtype) and kernel."""
    counts: dict[tuple[str, str, str], dict[str, Counter[str]]] = defaultdict(
        lambda: defaultdict(Counter)
    )
    for record in run.records:
        counted = record.check != ITEM_CHECK or record.verdict == "skip"
        if record.kernel and counted and (record.scale or record.layout or record.dtype):
            form = (record.scale, record.layout, record.dtype)
            counts[form][record.kernel][record.verdict] += 1
    kernels = tuple(sorted({kernel for row in counts.values() for kernel in row}))
    return Coverage(
        kernels,
        tuple(
            (form, tuple(Cell(dict(row.get(kernel, {}))) for kernel in kernels))
            for form, row in sorted(counts.items())
        ),
    )


def not_tested(run: Run) -> list[tuple[str, list[str]]]:
    """Return (kind and reason, names of the tests or checks) of all skips, largest first."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for record in run.records:
        if record.verdict == "skip":
            kind = f"{record.why.replace('_', ' ')}: " if record.why else ""
            reasons[f"{kind}{record.reason or 'no reason given'}"].append(
                record.id.removesuffix(f":{ITEM_CHECK}").rstrip(":")
            )
    return sorted(reasons.items(), key=lambda entry: (-len(entry[1]), entry[0]))


def sources(run: Run) -> list[tuple[str, str]]:
    """Return (file, first digits of its sha256) of every kernel source that was really used."""
    return sorted({pair for record in run.records for pair in record.sources.items()})


def show(value: object) -> str:
    """Return a value as a cell: thousands apart, three digits of a float, nothing for None."""
    if value is None or value is pd.NA or value != value:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.3g}"
    if isinstance(value, int) or hasattr(value, "__index__"):
        return f"{int(value):,}"
    return str(value)


def used(frame: pd.DataFrame, names: Iterable[str]) -> list[str]:
    """Return those columns that hold anything: an empty one only takes room."""
    return [name for name in names if any(show(value) for value in frame[name])]
