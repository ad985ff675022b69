"""Reports by cause: one row a cause, its failures below it, and one cause told once."""

import re
from dataclasses import replace

import pytest

from moe_parity.harness.checks.verdict import caused, found
from moe_parity.harness.diagnosis.cause import Cause, CauseKind
from moe_parity.references.errors import ParityError
from moe_parity.reports import causes, html, markdown, tables
from moe_parity.reports.records import Record, Run, RunEnd, RunInfo
from moe_parity.reports.results import read, write
from moe_parity.suites.meta.test_report import HOSTILE, Page

DIVIDE = ("decision", "quant.apply=divide")
TAIL = ("mistake", "k_tail")
LEFT = ("memory", "unwritten")


def red(test: str, cause=("", ""), *, check: str = "exact", **fields) -> Record:
    """Return a red check of a test."""
    facts = {
        "kernel": "mine",
        "stage": "fc1",
        "compared": 100,
        "differing": 7,
        "message": f"{cause[1] or 'nothing known'} shows in {check} of {test}",
        "verdict": "fail",
    }
    kind, name = cause
    own = {"id": f"{test}:{check}", "nodeid": test, "cause_kind": kind, "cause": name}
    return Record(**(own | {"check": check} | facts | fields))


def broken(test: str, message: str) -> Record:
    """Return the record of a test that broke."""
    own = {"id": f"{test}:test", "check": "test", "nodeid": test}
    return Record(verdict="error", message=message, **own)


def run_of(*records: Record) -> Run:
    """Return a finished run of these records."""
    tests = len({record.nodeid for record in records})
    end = RunEnd(records=len(records), collected=tests, ran=tests, exitstatus=1)
    return Run(RunInfo(started="2026-01-01T00:00:00+00:00"), records, end)


def section(text: str) -> str:
    """Return the section of a page about what did not pass."""
    return text[text.index('<section id="failures">') : text.index('<section id="stages">')]


def titles(text: str) -> list[str]:
    """Return the headings of the causes of a page, in order."""
    headings = re.findall(r'<h3 id="cause-\d+" class="cause">(.*?)</h3>', text, re.DOTALL)
    return [seen(heading) for heading in headings]


def seen(part: str) -> str:
    """Return the visible text of a part of a page."""
    return Page(f"<div>{part}</div>").text


MANY = (
    red("a", TAIL),
    red("b", DIVIDE),
    broken("e", "fixture torn"),
    red("c", DIVIDE, kernel="other", stage="fc2", differing=2, compared=50),
    red("d", DIVIDE),
    red("d", DIVIDE, check="rerun"),
    red("f", check="bounded", message="0.5 is above 0.4"),
)


def test_one_row_a_cause_the_most_frequent_first_and_what_has_none_last():
    page = Page(section(html.render(run_of(*MANY)))).text
    table = page[page.index("What went wrong") : page.index("What went wrong") + 400]
    rows = (
        "quant.apply=divide another decision 3 4 16 of 250 fc1, fc2 mine, other",
        "k_tail a mistake 1 1 7 of 100 fc1 mine",
        "no cause an assertion of a test, or a test that broke 2 1 7 of 100 fc1 mine",
    )
    places = [table.index(row) for row in rows]
    assert places == sorted(places)
    summary = [line for line in markdown.render(run_of(*MANY)).splitlines() if line[:1] == "|"]
    assert [line.split(" | ")[0] for line in summary[2:5]] == [
        "| quant.apply=divide",
        "| k\\_tail",
        "| no cause",
    ]
    assert summary[2].split(" | ")[1:] == [
        "another decision", "fc1, fc2", "mine, other", "3", "4", "16 of 250 |"
    ]  # fmt: skip


def test_what_did_not_pass_stands_below_its_cause():
    page = html.render(run_of(*MANY))
    assert titles(page) == [
        "quant.apply=divide another decision 3 tests",
        "k_tail a mistake 1 test",
        "no cause an assertion of a test, or a test that broke 2 tests",
    ]
    cards = re.findall(r"<code>(\w+)(?::\w+)?</code></summary>", section(page))
    assert cards == ["b", "c", "d", "a", "e", "f"]
    summary = markdown.render(run_of(*MANY))
    places = [summary.index(f"`{t}:") for t in ("b", "c", "d", "a", "e", "f")]
    assert places == sorted(places)
    names = [
        "**`quant.apply=divide`**: another decision, 3 tests",
        "**`k_tail`**: a mistake, 1 test\n",
        "**no cause**: an assertion of a test, or a test that broke, 2 tests",
    ]
    assert summary.index(names[0]) < places[0]
    assert places[2] < summary.index(names[1]) < places[3] < summary.index(names[2]) < places[4]


@pytest.mark.parametrize("number", [0, 1, 6, 500])
@pytest.mark.parametrize("distinct", [False, True], ids=["of-one-cause", "each-of-its-own"])
def test_every_link_leads_to_its_cause(number: int, distinct: bool):
    records = [
        red(f"t{n}", ("mistake", f"m{n if distinct else 0}"), message=f"{'x' * 300} {n}")
        for n in range(number)
    ]
    text = html.render(run_of(*records, broken("z", "torn")) if records else run_of())
    assert len(text.encode()) < html.LIMIT
    page = Page(text)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    links = [a["href"][1:] for tag, a in page.tags if tag == "a" and a["href"][0] == "#"]
    assert len(ids) == len(set(ids))
    assert set(links) <= set(ids)
    to_causes = [link for link in links if link.startswith("cause-")]
    assert to_causes == [name for name in ids if name.startswith("cause-")]
    shown = min(number, 40) if distinct else min(number, 1)
    assert len(to_causes) == shown + bool(number)
    for anchor in to_causes:
        link = re.search(rf'<a href="#{anchor}">(.*?)</a>', text)
        heading = re.search(rf'<h3 id="{anchor}" class="cause">(.*?)</h3>', text)
        assert seen(link[1])
        assert seen(heading[1]).startswith(seen(link[1]))
    many = distinct and number == 500
    assert ("460 more causes" in page.text) == many
    summary = markdown.render(run_of(*records, broken("z", "torn")))
    assert ("And 480 more causes, in report.html." in summary) == many
    assert summary.count("\n**`m") == (min(number, 20) if distinct else min(number, 1))
    assert "| no cause |" in summary
    assert "`z:test`" in summary


def test_of_hundreds_with_one_cause_a_few_stand_open_and_the_rest_is_counted():
    records = [red(f"t{n}", DIVIDE, message="differs") for n in range(500)]
    text = section(html.render(run_of(*records)))
    assert len(re.findall(r'<details class="card fail" open>', text)) == 1
    folded = text[text.index('<details class="more">') :]
    cards = len(re.findall(r'<details class="card fail">', folded))
    assert f"{cards} more of this cause" in folded
    assert f"{500 - 1 - cards} more did not pass for this cause" in folded
    assert 20 <= cards <= 100
    summary = markdown.render(run_of(*records))
    shown = summary.count("- ✗ `t")
    assert 1 <= shown <= 5
    assert f"- and {500 - shown} more, in report.html" in summary


def test_what_is_open_shows_every_stage_and_kernel_first():
    """The first failure of another kernel is not hidden behind fifty of the first one."""
    records = [red(f"t{n}", DIVIDE) for n in range(50)]
    records += [red("u", DIVIDE, kernel="other"), red("v", DIVIDE, stage="fc2")]
    (group,) = causes.groups(run_of(*records))
    assert [f.test for f in group.failures[:4]] == ["t0", "u", "v", "t1"]
    text = section(html.render(run_of(*records)))
    opened = re.findall(r"open>\n<summary>.*?<code>(\w+):", text)
    assert opened == ["t0", "u", "v"]


def test_one_cause_is_told_once_in_a_test():
    """A check that repeats the cause is named; one that says something else says it."""
    records = (
        red("t", check="finite", message="not finite at row 3"),
        red("t", LEFT, message="leaves row 3 unwritten"),
        red("t", LEFT, check="rerun", message="leaves row 3 unwritten, again"),
        red("t", LEFT, check="write_set", message="leaves row 3 unwritten, too"),
        red("t", LEFT, check="exact_fc2", message="leaves row 9 unwritten", stage="fc2"),
        Record(id="t:test", check="test", nodeid="t", verdict="fail", message="leaves row 3"),
    )
    page, summary = section(html.render(run_of(*records))), markdown.render(run_of(*records))
    assert page.count('class="card fail"') == 1
    for text in (page, summary):
        told = Page(text).text if text is page else text
        assert told.count("leaves row") == 1
        assert "lso red for the same cause: rerun" in told
        assert "lso red: finite" in told
    assert "rerun, write_set, exact_fc2 (in fc2, 7 of 100 differ)" in Page(page).text
    assert "not finite at row 3" in page
    (group,) = causes.groups(run_of(*records))
    assert (group.tests, group.checks, group.stages) == (1, 5, "fc1, fc2")
    assert "  Also red: finite" in summary.splitlines()


def test_two_causes_in_a_test_are_two_failures():
    records = (
        red("t", TAIL),
        red("t", check="finite"),
        red("t", ("batch", "depends_on_other_rows"), check="row_subset"),
    )
    every = causes.failures(run_of(*records))
    assert [[r.check for r in (f.record, *f.also)] for f in every] == [
        ["exact", "finite"], ["row_subset"]
    ]  # fmt: skip
    assert "What did not pass (1)" in markdown.render(run_of(*records))


def test_a_failure_without_a_cause_is_told_by_its_check():
    """A test's own record only repeats what its check said, unless the test itself broke."""
    own = Record(id="t:test", check="test", nodeid="t", verdict="fail", message="again")
    (failure,) = causes.failures(run_of(red("t"), own))
    assert (failure.record.check, failure.also) == ("exact", ())
    (failure,) = causes.failures(run_of(own))
    assert failure.record == own
    (failure,) = causes.failures(run_of(red("t"), broken("t", "torn")))
    assert [r.check for r in (failure.record, *failure.also)] == ["test", "exact"]
    caused_, torn = causes.failures(run_of(red("t", TAIL), broken("t", "torn")))
    assert [caused_.record.check, torn.record.check] == ["exact", "test"]


def test_what_a_check_is_about_is_no_cause():
    """A test of mutants names its mutant; where it fails, that is not what went wrong."""
    run = run_of(red("t", ("", "quant.apply=divide"), check="mutant_noticed"))
    (group,) = causes.groups(run)
    assert not group.known
    assert titles(html.render(run)) == [
        "no cause an assertion of a test, or a test that broke 1 test"
    ]


def test_alternatives_are_shown_and_those_of_all_failures_with_the_cause():
    both, one = ("quant.apply=mul", "quant.scale=up"), ("quant.scale=up",)
    run = run_of(red("a", DIVIDE, alternatives=both), red("b", DIVIDE, alternatives=one))
    page, summary = html.render(run), markdown.render(run)
    common = "quant.apply=divide or quant.scale=up"
    assert titles(page)[0].startswith(f"{common} another decision")
    text = Page(section(page)).text
    assert "The same bits come of quant.apply=mul, quant.scale=up" in text.replace(" , ", ", ")
    assert f"| {common} | another decision |" in summary
    assert "**`quant.apply=divide` or `quant.scale=up`**" in summary
    assert "The same bits come of `quant.apply=mul`, `quant.scale=up`" in summary
    many = run_of(red("a", DIVIDE, alternatives=("p", "q", "r", "s")))
    assert titles(html.render(many))[0].startswith(
        "quant.apply=divide or p or q or one of 2 others"
    )
    assert "| quant.apply=divide or p or q or one of 2 others |" in markdown.render(many)
    assert "`q` or one of 2 others**" in markdown.render(many)
    apart = run_of(red("a", DIVIDE, alternatives=both), red("b", DIVIDE))
    assert titles(html.render(apart)) == ["quant.apply=divide another decision 2 tests"]


def test_what_is_explained_by_one_cause_alone_is_shown_first():
    """A case of one token may leave several; a larger one says which."""
    unsure = [red(test, TAIL, alternatives=("other", "more")) for test in ("a", "b")]
    (group,) = causes.groups(run_of(*unsure, red("c", TAIL)))
    assert [failure.test for failure in group.failures] == ["c", "a", "b"]


def test_what_one_cause_explains_is_one_row():
    """`k_tail or zeros` by two tests and `zeros` by a third: one fault, and it is `zeros`."""
    zeros = ("mistake", "zeros")
    either = [red(test, TAIL, alternatives=("zeros", "tile")) for test in ("a", "b")]
    elsewhere = red("d", TAIL, alternatives=("zeros",), kernel="other")
    run = run_of(*either, red("c", zeros), elsewhere)
    assert [(g.kind, g.name, [f.test for f in g.failures]) for g in causes.groups(run)] == [
        (*zeros, ["c", "a", "b"]),
        (*TAIL, ["d"]),
    ]
    assert [group.alternatives for group in causes.groups(run)] == [(), ("zeros",)]
    alone = run_of(*either, red("c", TAIL), red("e", zeros))
    assert [(g.name, g.tests) for g in causes.groups(alone)] == [("k_tail", 3), ("zeros", 1)]
    crossed = run_of(either[0], red("c", zeros, alternatives=("tile", "k_tail")))
    (group,) = causes.groups(crossed)
    assert (group.name, group.alternatives) == ("k_tail", ("zeros", "tile"))


def test_a_call_that_raised_differs_in_no_output():
    run = run_of(red("a", ("call", "RuntimeError"), differing=1, compared=0))
    (line,) = (x for x in markdown.render(run).splitlines() if x.startswith("| RuntimeError"))
    assert line.endswith("| 1 | 1 |  |")
    drawn = run_of(red("a", ("call", "RuntimeError"), differing=1, compared=50))
    assert "1 of 50" not in markdown.render(drawn).split("####")[1].split("**")[0]


def test_a_name_of_a_cause_stays_a_name():
    """Neither markup of the page nor of Markdown, and no cell more in a row of the table."""
    run = run_of(red("t", (HOSTILE, f"a_b|`{HOSTILE}"), alternatives=(HOSTILE,), stage=HOSTILE))
    page = Page(html.render(run))
    assert "img" not in {tag for tag, _ in page.tags}
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    summary = markdown.render(run)
    rows = [line for line in summary.splitlines() if line.startswith("|")][:3]
    cells = [re.split(r"(?<!\\)\|", row) for row in rows]
    assert {len(row) for row in cells} == {9}
    assert not re.search(r"(?<!\\)[<`*_]", "".join(cells[2]))
    assert "\\_b" in cells[2][1]
    (heading,) = (line for line in summary.splitlines() if line.startswith("**"))
    fence = re.match(r"\*\*(`+) a_b", heading)[1]
    assert f" {fence} or " in heading
    assert fence not in heading.split(fence)[1]


def test_every_kind_of_cause_has_words():
    assert set(causes.KINDS) == {kind.value for kind in CauseKind}
    assert len(set(causes.KINDS.values())) == len(CauseKind)


def test_the_csv_ends_with_the_cause():
    run = run_of(red("a", TAIL), red("b"))
    head, *rows = tables.to_csv(run).splitlines()
    assert head.endswith(",mid,cause_kind,cause")
    assert rows[0].endswith(",fail,,mistake,k_tail")
    assert rows[1].endswith(",fail,,,")


def test_the_table_of_checks_names_the_cause_of_red_ones():
    """What a green check of mutants is about is no cause."""
    green = red("b", ("", "quant.floor=none"), verdict="pass", check="mutant")
    page = html.render(run_of(red("a", TAIL), green))
    table = page[page.index('<table id="t-tolerances">') :]
    assert "<th>cause</th>" in table
    assert "<td>k_tail" in table
    assert "quant.floor=none" not in table


def test_causes_survive_the_file(tmp_path):
    run = run_of(red("t", TAIL, alternatives=("k_tail_of_one", "zeros")))
    back = read_back(run, tmp_path)
    assert back.records == run.records
    assert back.records[0].alternatives == ("k_tail_of_one", "zeros")
    assert causes.groups(back) == causes.groups(run)


def read_back(run: Run, folder, change=lambda text: text) -> Run:
    """Return a run as its file says, changed on the way."""
    path = folder / "results.jsonl"
    write(run, path)
    path.write_text(change(path.read_text()))
    return read(path)


def test_alternatives_that_are_no_names_are_refused(tmp_path):
    run = run_of(red("t", TAIL, alternatives=("other",)))
    with pytest.raises(ParityError, match="alternatives"):
        read_back(run, tmp_path, lambda text: text.replace('["other"]', '["other", 3]'))


def test_the_decision_of_a_file_of_before_is_its_cause(tmp_path):
    run = run_of(red("t", DIVIDE), red("u"))

    def before(text: str) -> str:
        old = text.replace('"cause_kind": "decision", "cause":', '"decision":')
        assert old != text
        return old

    back = read_back(run, tmp_path, before)
    assert back.records == run.records
    assert titles(html.render(back))[0] == "quant.apply=divide another decision 1 test"


def test_the_place_of_a_cause_is_not_part_of_its_name():
    """The same mistake for expert 3 and for expert 5 is one cause."""
    said = Cause(
        kind=CauseKind.MISTAKE, name="k_tail", words="K tail dropped", where="for expert 3"
    )
    other = replace(said, words="K tail dropped twice")
    verdict = caused(found("exact", "red"), said.among((other, replace(other, name="zeros"))))
    assert (verdict.cause_kind, verdict.cause) == TAIL
    assert verdict.alternatives == ("zeros",)
