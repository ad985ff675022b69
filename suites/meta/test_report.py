"""Reports: right, the same every time, safe, self-contained, and never too large to send."""

import base64
import csv
import gzip
import io
import re
from dataclasses import replace
from functools import cached_property
from html.parser import HTMLParser

import pytest

from moe_parity.reports import html, markdown, tables, write_all
from moe_parity.reports.records import Record, Run, RunEnd, RunInfo

HOSTILE = '</script><img src="http://evil.example/x">|`<b>& \n| --- |'
KERNELS = ("mine", "deepgemm_per_token", "vllm_per_token_group")
FORMATS = [
    (s, lay, d) for s in ("fp32", "ue8m0") for lay in ("row", "tma") for d in ("bf16", "f32")
]


def make(number: int, *, bad: int = 0, message: str = "3 of 4096 differ", **info) -> Run:
    """Return a finished run of `number` tests, each with two checks; the first `bad` fail."""
    records = []
    for i in range(number):
        kernel, (scale, layout, dtype) = KERNELS[i % 3], FORMATS[i // 3 % len(FORMATS)]
        name = f"test_bits:{kernel}-{scale}-{layout}-{dtype}-m{i}-k7168"
        failed = i < bad
        own = {
            "nodeid": f"suites/test_quant.py::test_bits[{i}]",
            "suite": "quant",
            "kernel": kernel,
            "recipe": "ours",
            "stage": "act_quant",
            "shape": f"m{i}-k7168",
            "scale": scale,
            "layout": layout,
            "dtype": dtype,
            "device": "virtual_gpu",
            "verdict": "fail" if failed else "pass",
            "message": message if failed else "",
        }
        exact = Record(
            id=f"{name}:exact",
            check="exact",
            bound="exact",
            compared=7168 * (i + 1),
            differing=3 * failed,
            max_ulp=2 * failed,
            could_show=1000 + i,
            nearest_mutant="quant.apply=divide",
            mutant_distance=12.0 + i,
            rel_err_f64=0.0234567,
            cause_kind="decision" if failed else "",
            cause="quant.apply=divide" if failed else "",
            repro=f"parity repro '{name}:exact' --seed 7" if failed else "",
            sources={"kernels/moe_triton/quant.py": "0123456789ab"},
            **own,
        )
        finite = replace(exact, id=f"{name}:finite", check="finite", verdict="pass", differing=0)
        records += [exact, finite, Record(id=f"{name}:test", check="test", **own)]
    for i in range(3):
        records.append(
            Record(id=f"test_gpu:{i}:test", check="test", verdict="skip", reason="needs a CUDA GPU")
        )
    facts = {"started": "2026-01-01T00:00:00+00:00", "command": ("parity", "check"), "seed": 7}
    environment = {"torch": "2.13.0", "moe-parity": "0.1.0"}
    run = RunInfo(**(facts | {"environment": environment, "commit": "ab" * 20} | info))
    end = RunEnd(
        records=len(records), collected=number + 3, ran=number, exitstatus=int(bad > 0), seconds=9.5
    )
    return Run(run, tuple(records), end)


class Page(HTMLParser):
    """Collects the tags and the visible text of a page."""

    VOID = frozenset({"meta", "br", "input", "img", "link", "hr"})
    OPEN_ENDED = frozenset({"td", "th", "tr", "li"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Note a tag; a new row or cell ends the one before it."""
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            while tag in self.OPEN_ENDED and tag in self.open[-2:]:
                self.open.pop()
            self.open.append(tag)

    def handle_endtag(self, tag):
        """Close a tag, and insist that it is the open one."""
        while self.open[-1] != tag:
            assert self.open.pop() in self.OPEN_ENDED, f"{tag} closes something else"
        self.open.pop()

    def handle_data(self, data):
        """Note what can be seen."""
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @cached_property
    def text(self) -> str:
        """Return the visible text, spaces folded."""
        return " ".join(" ".join(self.words).split())


def test_the_page_says_first_what_is_so():
    """Verdict, identity, failures, stages, tolerances, coverage, what was not tested: in order."""
    page = Page(html.render(make(30, bad=2)))
    assert page.open == []
    words = [
        "✗ Failed 2 of 30 tests did not pass, 3 tests skipped",
        "Identity",
        "abababababab",
        "seed 7",
        "kernels/moe_triton/quant.py",
        "What did not pass",
        "What went wrong",
        "quant.apply=divide another decision 2 2",
        "3 of 4096 differ",
        "parity repro 'test_bits:mine-fp32-row-bf16-m0-k7168:exact' --seed 7",
        "By kernel and stage",
        "Tolerances",
        "m29-k7168",
        "Coverage",
        "✗ 1 of",
        "Not tested, and why",
        "– 3 needs a CUDA GPU",
        "Environment",
    ]
    links = page.text.index("Environment") + len("Environment")
    assert page.text.index(words[0]) < links
    at = links  # past the links to the sections, which have the same names
    for word in words[1:]:
        at = page.text.index(word, at) + len(word)


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        pytest.param(make(3), "✓ Passed 3 tests and 6 checks passed", id="pass"),
        pytest.param(make(3, bad=1), "✗ Failed 1 of 3 tests", id="fail"),
        pytest.param(replace(make(3), end=None), "! Incomplete interrupted after", id="cut"),
        pytest.param(make(0), "! Incomplete nothing ran", id="nothing"),
        pytest.param(Run(RunInfo(started="now"), (), None), "! Incomplete", id="bare"),
    ],
)
def test_verdicts_have_a_sign_and_a_word(run, verdict):
    """Colour is never all there is, on the page and in the summary."""
    assert verdict in Page(html.render(run)).text
    sign = verdict.split()[:2]
    assert markdown.render(run).startswith(f"### {' '.join(sign)}: ")


def test_the_page_needs_nothing_and_nobody():
    """No address but data, no script from elsewhere, and the table is there without scripts."""
    text = html.render(make(30, bad=2))
    page = Page(text)
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:")), f"{tag} {name}={value[:60]}"
        assert not [name for name in attributes if name.startswith("on")]
        assert tag not in {"link", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"@import|url\(|https?:|fetch\(|XMLHttp|import\(", text)
    without = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert Page(without).text.count("m7-k7168") >= 2


def test_the_records_are_inside():
    """What the page embeds is the results file itself."""
    run = make(5, bad=1)
    address = next(a["href"] for t, a in Page(html.render(run)).tags if a.get("download"))
    data = gzip.decompress(base64.b64decode(address.partition(",")[2]))
    assert len(data.splitlines()) == len(run.records) + 2
    assert b'"message": "3 of 4096 differ"' in data


def test_the_same_records_give_the_same_bytes(tmp_path):
    """A report holds no date of its own and no order of chance."""
    run = make(40, bad=3)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_all(run, tmp_path / name)
    for name in ("report.html", "summary.md", "tolerances.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_text_from_a_kernel_stays_text():
    """A message, a reason, a name or a variable cannot become markup."""
    run = make(2, bad=1, message=HOSTILE, environment={HOSTILE: HOSTILE}, command=(HOSTILE,))
    odd = replace(run.records[0], id=HOSTILE, kernel=HOSTILE, shape=HOSTILE, scale=HOSTILE)
    skip = Record(id="s:test", check="test", verdict="skip", reason=HOSTILE)
    run = replace(run, records=(*run.records, odd, skip))
    page = Page(html.render(run))
    assert "img" not in {tag for tag, _ in page.tags}
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert page.text.count("http://evil.example/x") >= 5
    summary = markdown.render(run)
    for line in summary.splitlines():
        for cell in re.split(r"(?<!\\)\|", line) if line.startswith("|") else ():
            assert not re.search(r"(?<!\\)[<`]", cell)


@pytest.mark.parametrize("number", [700, 4000], ids=["of-2100-records", "of-12000-records"])
def test_a_page_stays_small(number):
    """Under a mebibyte; what is left out has passed, and the page says how much it is."""
    run = make(number, bad=80, message="m" * 5000)
    text = html.render(run)
    assert len(text.encode()) < html.LIMIT == 1 << 20
    page = Page(text)
    assert page.text.count("✗ fail") >= 80
    assert "20 more did not pass for this cause" in page.text
    assert ("rows that passed are left out" in page.text) == (number == 4000)


@pytest.mark.parametrize("bad", [0, 900], ids=["passed", "failed"])
def test_a_summary_fits_a_comment(bad):
    """At most 60 KiB, and it says what it cut."""
    text = markdown.render(make(900, bad=bad, message="m" * 400))
    assert len(text.encode()) <= markdown.LIMIT == 60 << 10
    assert "more lines were cut; report.html has them." in text
    assert text.count("<details>") == text.count("</details>") == 1
    assert ("897 more, in report.html" in text) == (bad == 900)


def test_every_row_of_a_summary_has_its_cells():
    """A table of GitHub's Markdown breaks with the first row of another width."""
    widths = set()
    for line in markdown.render(make(9, bad=1, message="a | b")).splitlines():
        if line.startswith("|"):
            widths.add(len(re.split(r"(?<!\\)\|", line)))
        elif widths:
            assert len(widths) == 1, line
            widths = set()


def test_the_csv_has_the_columns_of_the_contract():
    """One row for each check; what was not measured is empty, and numbers are bare."""
    run = make(2, bad=1)
    bare = Record(id="x:exact", check="exact", verdict="fail", kernel="x", message="raised")
    rows = list(csv.reader(io.StringIO(tables.to_csv(replace(run, records=(*run.records, bare))))))
    names = (
        "kernel recipe stage shape scale layout dtype clamp ep check bound compared differing "
        "code_flips max_ulp could_show nearest_mutant mutant_distance rel_err_bf16 rel_err_f64 "
        "verdict mid cause_kind cause"
    )
    assert " ".join(rows[0]) == names
    assert len(rows) == 6
    first = dict(zip(rows[0], rows[1], strict=True))
    assert (first["compared"], first["max_ulp"], first["rel_err_f64"]) == ("7168", "2", "0.0234567")
    assert first["rel_err_bf16"] == first["clamp"] == ""
    assert rows[5][11:] == ["0", "0", "0", "", "", "", "", "", "", "fail", "", "", ""]


def test_coverage_counts_by_format_and_kernel():
    """A cell shows the worst verdict and how many; where kernel and format never met, a dot."""
    matrix = tables.coverage(make(4, bad=1))
    assert matrix.kernels == tuple(sorted(KERNELS))
    cells = {form: [cell.text for cell in row] for form, row in matrix.rows}
    assert cells == {
        ("fp32", "row", "bf16"): ["✓ 2", "✗ 1 of 2", "✓ 2"],
        ("fp32", "row", "f32"): ["·", "✓ 2", "·"],
    }


def test_no_distance_of_zero_stands_beside_a_difference():
    """Codes a step apart, scales equal: the scales' 0 ulp would seem to speak of the codes."""
    run = make(3, bad=1)
    for ulp, shown in ((0, False), (3, True)):
        records = tuple(replace(r, max_ulp=ulp) for r in run.records)
        page = html.render(replace(run, records=records))
        assert (f", at most {ulp} ulp" in page) == shown


def test_contracts_and_kinds_of_skips_are_shown():
    """What each kernel promises stands beside it, and why something did not run before its text."""
    run = make(3)
    promised = tuple(
        replace(r, contract="all but rerun", mid="ue8m0")
        if r.kernel
        else replace(r, why="needs_gpu")
        for r in run.records
    )
    run = replace(run, records=promised)
    for text in (html.render(run), markdown.render(run)):
        assert text.count("all but rerun") >= 3
        assert "needs gpu: needs a CUDA GPU" in text
        assert "mid" in text
