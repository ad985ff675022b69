"""report.html: one file that opens anywhere, offline, without scripts, and says first what is so.

The same records give the same bytes. The file stays under a mebibyte: of very many checks, the
table shows those that did not pass and as many others as fit, and says how many it leaves out.
"""

from __future__ import annotations

import base64
import gzip
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moe_parity.reports import causes, maps, tables
from moe_parity.reports.records import Record, Run, judge, to_line

LIMIT = 1 << 20
"""Bytes of a report, at most."""

_RAW_LIMIT = 200 << 10
_ROWS = 2000
_CAUSES = 40
_FAILURES = 60
_OPEN = 3
"""Failures of a cause that stand open: the first of this many stages of kernels that have it."""
_TEXT = 1500
_ALSO = 500

HEADINGS = {
    "code_flips": "code flips",
    "max_ulp": "max ulp",
    "could_show": "could show",
    "nearest_mutant": "nearest mutant",
    "mutant_distance": "told apart",
    "rel_err_bf16": "rel. to BF16",
    "rel_err_f64": "rel. to f64",
}
_OUTPUTS = ("compared", "differing", "code_flips", "max_ulp", "could_show")
_NUMBERS = (*_OUTPUTS, "rel_err_bf16", "rel_err_f64", "mutant_distance")
_STAGE_TEXTS = ("kernel", "stage", "contract")
_STAGE_NUMBERS = ("checks", "passed", *_OUTPUTS, "mutant_distance")
_NEAREST = ("nearest_mutant",)


def _table(
    frame: pd.DataFrame, texts: Sequence[str], numbers: Sequence[str], *last: str
) -> dict[str, Any]:
    """Return what the template's table macro needs; numbers stand together, aligned right."""
    frame = tables.worst_first(frame)
    left, right = tables.used(frame, texts), tables.used(frame, numbers)
    names = [*left, *right, *tables.used(frame, last)]
    cells = ([tables.show(value)[:_TEXT] for value in frame[name]] for name in names)
    return {
        "headings": [HEADINGS.get(name, name) for name in names],
        "first_number": len(left) + 2,
        "last_number": len(left) + len(right) + 1,
        "rows": [(verdict, row) for verdict, *row in zip(frame["verdict"], *cells, strict=True)],
    }


def _raw(run: Run) -> str | None:
    """Return the records as a data address of gzipped JSON lines, None where they are too many."""
    lines = [to_line("run", run.info), *(to_line("record", record) for record in run.records)]
    if run.end is not None:
        lines.append(to_line("end", run.end))
    packed = base64.b64encode(gzip.compress(b"".join(lines), mtime=0)).decode()
    return f"data:application/gzip;base64,{packed}" if len(packed) <= _RAW_LIMIT else None


def _failure(failure: causes.Failure) -> dict[str, Any]:
    record = failure.record
    what = (*tables.TEXTS, "contract")
    facts = [(name, getattr(record, name)) for name in what]
    facts += [(name, "yes") for name in ("graph", "poison") if getattr(record, name)]
    facts.append(("device", record.device))
    return {
        "record": record,
        "name": record.id.removesuffix(":test").rstrip(":"),
        "facts": [(name, value) for name, value in facts if value],
        "message": (record.message or "no message")[:_TEXT],
        "same": [(r.check, _beside(r, record)) for r in failure.same],
        "also": [(r.check, (r.message or "no message")[:_ALSO]) for r in failure.others],
    }


def _beside(record: Record, first: Record) -> str:
    """Return what a check adds to the first one of the same cause: another stage, and how much."""
    if record.stage == first.stage:
        return ""
    much = f", {record.differing:,} of {record.compared:,} differ" if record.compared else ""
    return f"in {record.stage}{much}"


def _groups(groups: list[causes.Group]) -> list[dict[str, Any]]:
    """Return what the template says of each cause, with as many failures as the page has room."""
    shares = causes.share([len(group.failures) for group in groups], _FAILURES)
    told = []
    for number, (group, share) in enumerate(zip(groups, shares, strict=True), start=1):
        cards = [_failure(failure) for failure in group.failures[:share]]
        # what has no cause in common is not told by one example
        opened = min(group.places, _OPEN) if group.known else _OPEN
        told.append(
            {
                "group": group,
                "anchor": f"cause-{number}",
                "open": cards[:opened],
                "folded": cards[opened:],
                "more": len(group.failures) - share,
            }
        )
    return told


def _tolerances(run: Run) -> pd.DataFrame:
    frame = tables.tolerances(run)
    # without its kind it is what the check was about
    return frame.assign(cause=frame["cause"].where(frame["cause_kind"] != "", ""))


def _context(run: Run) -> dict[str, Any]:
    groups = causes.groups(run)
    kept = causes.first_ones(groups, _CAUSES)
    shown = [record.could_show for record in run.checks if record.could_show is not None]
    tests = Counter(record.verdict for record in run.tests)
    return {
        "run": run,
        "command": shlex.join(run.info.command)[:_TEXT],
        "judgement": judge(run),
        "symbol": tables.SYMBOL,
        "show": tables.show,
        "tests": [(v, tests[v]) for v in ("pass", "fail", "error", "skip") if tests[v]],
        "totals": {
            "tests": len(run.tests),
            "checks": len(run.checks),
            "outputs compared": sum(record.compared for record in run.checks),
            "outputs differing": sum(record.differing for record in run.checks),
            "could have been red": sum(shown) if shown else None,
            "seconds": run.end.seconds if run.end else None,
        },
        "groups": _groups(kept),
        "more_causes": len(groups) - len(kept),
        "stages": _table(tables.by_stage(run), _STAGE_TEXTS, _STAGE_NUMBERS, *_NEAREST),
        "tolerances": _table(
            _tolerances(run), (*tables.TEXTS, "check", "bound"), _NUMBERS, *_NEAREST, "cause"
        ),
        **_maps(run),
        "coverage": tables.coverage(run),
        "not_tested": [
            (reason[:_TEXT], names[:12], len(names)) for reason, names in tables.not_tested(run)
        ],
        "sources": tables.sources(run),
        "raw": _raw(run),
    }


def _maps(run: Run) -> dict[str, Any]:
    """Return the pictures of invariance maps, their table, and the lines that are alike."""
    pictures = maps.pictures(run)
    alike = [
        (" ".join(filter(None, (picture.kernel, config))), words)
        for picture in pictures
        for config, words in picture.alike
    ]
    table = maps.rows(run)
    return {"pictures": pictures, "map_head": maps.HEAD, "map_rows": table, "map_alike": alike}


def render(run: Run) -> str:
    """Return the report as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.j2")
    context = _context(run)
    rows = context["tolerances"]["rows"]
    shown = _ROWS
    while True:
        context["tolerances"]["rows"] = rows[:shown]
        text = template.render(context, left_out=max(0, len(rows) - shown))
        if len(text.encode()) < LIMIT or shown < 50:
            return text
        shown //= 2
