"""summary.md: the report for a pull request; GitHub's Markdown, at most 60 KiB.

A comment may hold 64 KiB. What does not fit is cut row by row, and the summary says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_parity.reports import causes, maps, tables
from moe_parity.reports.cells import LIMIT, cell, code, fit, table
from moe_parity.reports.records import Checkout, Run, RunInfo, count, judge

_MARK = {"pass": "✓ Passed", "fail": "✗ Failed", "incomplete": "! Incomplete"}
_FAILURES = 20
_EACH = 3
_CAUSES = 20


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
        cell(" · ".join(commits + facts)),
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
    return table(headings, 3, rows)


def _names(group: causes.Group) -> str:
    names = " or ".join(map(code, (group.name, *group.alternatives[:2])))
    return names + group.beyond if group.known else group.title


def _failure(failure: causes.Failure) -> list[str]:
    record = failure.record
    lines = [f"- {tables.SYMBOL[record.verdict]} {code(record.id)}  "]
    lines.append(f"  {cell(record.message or 'no message')}")
    if record.alternatives:
        lines.append(f"  The same bits come of {', '.join(map(code, record.alternatives))}")
    if failure.same:
        names = ", ".join(other.check for other in failure.same)
        lines.append(f"  Also red for the same cause: {cell(names)}")
    if failure.others:
        lines.append(f"  Also red: {cell(', '.join(other.check for other in failure.others))}")
    if record.repro:
        lines.append(f"  Reproduce: {code(record.repro)}")
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
    return ["#### By kernel and stage", "", *table(headings, len(numbers), rows), ""]


def _maps(run: Run) -> list[str]:
    rows = maps.rows(run)
    if not rows:
        return []
    return ["#### Invariance map", "", *table(maps.HEAD, maps.NUMBERS, rows), ""]


def _coverage(run: Run) -> list[str]:
    matrix = tables.coverage(run)
    if not matrix.rows:
        return []
    rows = [[*form, *(own.text for own in cells)] for form, cells in matrix.rows]
    headings = ["scale", "layout", "dtype", *(cell(kernel) for kernel in matrix.kernels)]
    body = table(headings, len(matrix.kernels), rows)
    return ["#### Coverage: kernel by format", "", *body, ""]


def _not_tested(run: Run) -> list[str]:
    reasons = tables.not_tested(run)
    if not reasons:
        return []
    rows = [[reason, f"{len(names):,}"] for reason, names in reasons]
    return ["#### Not tested", "", *table(["why", "number"], 1, rows), ""]


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
    return table(headings, len(numbers), rows)


def render(run: Run) -> str:
    """Return the summary; the table of tolerances, last, takes the room that is left."""
    lines = _head(run) + _failures(run) + _maps(run) + _stages(run) + _coverage(run)
    lines += _not_tested(run)
    text = fit(lines, LIMIT - 2000)
    tolerances = _tolerances(run)
    if tolerances:
        room = LIMIT - len(text.encode()) - 300
        body = fit(tolerances, room)
        text += f"<details><summary>Tolerances</summary>\n\n{body}\n</details>\n"
    return text
