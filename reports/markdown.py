"""summary.md: the report for a pull request; GitHub's Markdown, at most 60 KiB.

A comment may hold 64 KiB. What does not fit is cut row by row, and the summary says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moe_parity.reports import causes, maps, tables
from moe_parity.reports.records import Checkout, Run, RunInfo, count, judge

LIMIT = 60 << 10
"""Bytes of a summary, at most."""

_MARK = {"pass": "✓ Passed", "fail": "✗ Failed", "incomplete": "! Incomplete"}
_FAILURES = 20
_EACH = 3
_CAUSES = 20


def _cell(text: str) -> str:
    """Return text that stays within its cell and is not Markdown or HTML."""
    flat = " ".join(text.split())
    for special in "\\`*_<>|[]":
        flat = flat.replace(special, f"\\{special}")
    return flat[:300]


def _code(text: str) -> str:
    """Return text as a code span, whatever backquotes it holds."""
    flat = " ".join(text.split())
    fence = "`" * (max((len(run) for run in _runs(flat)), default=0) + 1)
    pad = " " if "`" in flat else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def _runs(text: str) -> list[str]:
    return [run for run in "".join(c if c == "`" else " " for c in text).split() if run]


def _table(headings: Sequence[str], numbers: int, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose last `numbers` columns are right-aligned."""
    rule = [":--"] * (len(headings) - numbers) + ["--:"] * numbers
    lines = [f"| {' | '.join(headings)} |", f"|{'|'.join(rule)}|"]
    return lines + [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]


def _head(run: Run) -> list[str]:
    verdict = judge(run)
    info = run.info
    own = "moe-parity" if info.checkouts else ""
    commits = [_commit(info, own)] if info.commit or info.checkouts else []
    commits += [_commit(other, f"{other.name} ({other.words})") for other in info.checkouts]
    device = info.environment.get("gpu") or f"{info.device} (virtual GPU)"
    versions = [f"{n} {info.environment[n]}" for n in ("torch", "triton") if n in info.environment]
    seed = "no seed" if info.seed is None else f"seed {info.seed}"
    facts = [device, *versions, f"profile {info.profile}", seed]
    return [
        f"### {_MARK[verdict.status]}: {verdict.sentence}",
        "",
        _cell(" · ".join(commits + facts)),
        "",
    ]


def _commit(of: RunInfo | Checkout, name: str) -> str:
    words = ("commit", (of.commit or "unknown")[:12], "(dirty)" if of.dirty else "")
    return " ".join(filter(None, (name, *words)))


def _failures(run: Run) -> list[str]:
    groups = causes.groups(run)
    if not groups:
        return []
    tests = {failure.test for group in groups for failure in group.failures}
    kept = causes.first_ones(groups, _CAUSES)
    lines = [f"#### What did not pass ({len(tests):,})", "", *_causes(kept)]
    if len(groups) > len(kept):
        lines += ["", f"And {count(len(groups) - len(kept), 'more cause')}, in report.html."]
    lines.append("")
    shares = causes.share([len(group.failures) for group in kept], _FAILURES)
    for group, share in zip(kept, shares, strict=True):
        share = min(share, _EACH)
        lines += [f"**{_names(group)}**: {group.kind_words}, {count(group.tests, 'test')}", ""]
        for failure in group.failures[:share]:
            lines += _failure(failure)
        if len(group.failures) > share:
            lines.append(f"- and {len(group.failures) - share:,} more, in report.html")
        lines.append("")
    return lines


def _causes(groups: Sequence[causes.Group]) -> list[str]:
    """Return the table of what went wrong, the most frequent first."""
    rows = []
    for group in groups:
        wrong, of = group.differing
        much = f"{wrong:,} of {of:,}" if of else ""
        name = " or ".join((group.title, *group.alternatives[:2])) + group.beyond
        checks = f"{group.checks:,}" if group.checks else ""
        numbers = (f"{group.tests:,}", checks, much)
        rows.append([name, group.kind_words, group.stages, group.kernels, *numbers])
    headings = ["cause", "what it is", "stages", "kernels", "tests", "checks", "outputs differing"]
    return _table(headings, 3, rows)


def _names(group: causes.Group) -> str:
    names = " or ".join(map(_code, (group.name, *group.alternatives[:2])))
    return names + group.beyond if group.known else group.title


def _failure(failure: causes.Failure) -> list[str]:
    record = failure.record
    lines = [f"- {tables.SYMBOL[record.verdict]} {_code(record.id)}  "]
    lines.append(f"  {_cell(record.message or 'no message')}")
    if record.alternatives:
        lines.append(f"  The same bits come of {', '.join(map(_code, record.alternatives))}")
    if failure.same:
        names = ", ".join(other.check for other in failure.same)
        lines.append(f"  Also red for the same cause: {_cell(names)}")
    if failure.others:
        lines.append(f"  Also red: {_cell(', '.join(other.check for other in failure.others))}")
    if record.repro:
        lines.append(f"  Reproduce: {_code(record.repro)}")
    return lines


def _stages(run: Run) -> list[str]:
    frame = tables.by_stage(run)
    if frame.empty:
        return []
    numbers = ["checks", "compared", "differing", "code_flips", "max_ulp", "could_show"]
    numbers = tables.used(frame, numbers)
    texts = tables.used(frame, ("kernel", "stage", "contract"))
    rows = [
        [tables.SYMBOL[row["verdict"]], *(tables.show(row[name]) for name in (*texts, *numbers))]
        for _, row in frame.iterrows()
    ]
    headings = ["", *texts, *(name.replace("_", " ") for name in numbers)]
    return ["#### By kernel and stage", "", *_table(headings, len(numbers), rows), ""]


def _maps(run: Run) -> list[str]:
    rows = maps.rows(run)
    if not rows:
        return []
    return ["#### Invariance map", "", *_table(maps.HEAD, maps.NUMBERS, rows), ""]


def _coverage(run: Run) -> list[str]:
    matrix = tables.coverage(run)
    if not matrix.rows:
        return []
    rows = [[*form, *(cell.text for cell in cells)] for form, cells in matrix.rows]
    headings = ["scale", "layout", "dtype", *(_cell(kernel) for kernel in matrix.kernels)]
    table = _table(headings, len(matrix.kernels), rows)
    return ["#### Coverage: kernel by format", "", *table, ""]


def _not_tested(run: Run) -> list[str]:
    reasons = tables.not_tested(run)
    if not reasons:
        return []
    rows = [[reason, f"{len(names):,}"] for reason, names in reasons]
    return ["#### Not tested", "", *_table(["why", "number"], 1, rows), ""]


def _tolerances(run: Run) -> list[str]:
    frame = tables.tolerances(run)
    if frame.empty:
        return []
    frame = tables.worst_first(frame)
    texts = tables.used(frame, (*tables.TEXTS, "check", "bound"))
    numbers = tables.used(frame, ("compared", "differing", "max_ulp", "could_show"))
    rows = [
        [tables.SYMBOL[row["verdict"]], *(tables.show(row[name]) for name in (*texts, *numbers))]
        for _, row in frame.iterrows()
    ]
    headings = ["", *(name.replace("_", " ") for name in (*texts, *numbers))]
    return _table(headings, len(numbers), rows)


def render(run: Run) -> str:
    """Return the summary; the table of tolerances, last, takes the room that is left."""
    lines = _head(run) + _failures(run) + _maps(run) + _stages(run) + _coverage(run)
    lines += _not_tested(run)
    text = _fit(lines, LIMIT - 2000)
    table = _tolerances(run)
    if table:
        room = LIMIT - len(text.encode()) - 300
        body = _fit(table, room)
        text += f"<details><summary>Tolerances</summary>\n\n{body}\n</details>\n"
    return text


def _fit(lines: list[str], room: int) -> str:
    """Return as many lines as fit into `room` bytes, and a sentence where some do not."""
    taken = 0
    for line in lines:
        room -= len(line.encode()) + 1
        if room < 0:
            break
        taken += 1
    text = "".join(f"{line}\n" for line in lines[:taken])
    if taken < len(lines):
        text += f"\n{len(lines) - taken:,} more lines were cut; report.html has them.\n"
    return text
