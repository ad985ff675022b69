"""Reports: what a reviewer reads, made from a results file and nothing else.

No torch, no kernel and no network: a report can be made anywhere, from records alone.
"""

from __future__ import annotations

from pathlib import Path

from moe_parity.reports.results import Run, write_atomic


def write_all(run: Run, out: Path) -> Path:
    """Write report.html, summary.md and tolerances.csv to `out`; return the path of the first."""
    from moe_parity.reports import html, markdown, tables

    write_atomic(out / "tolerances.csv", tables.to_csv(run))
    write_atomic(out / "summary.md", markdown.render(run))
    write_atomic(out / "report.html", html.render(run))
    return out / "report.html"
