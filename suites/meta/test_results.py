"""results.jsonl: what is written is what is read, and what is broken is refused in one sentence."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_parity.reports.parts import ParityError, Writer, merge, prepare
from moe_parity.reports.records import Record, Run, RunEnd, RunInfo, judge, to_line
from moe_parity.reports.results import read, write

INFO = RunInfo(started="2026-01-01T00:00:00+00:00", command=("parity", "check"), seed=7)


def record(name: str, verdict: str = "pass", check: str = "test", **values) -> Record:
    return Record(id=f"{name}:{check}", check=check, verdict=verdict, nodeid=name, **values)


def finished(*records: Record, collected: int | None = None, exitstatus: int = 0) -> Run:
    tests = [r for r in records if r.check == "test"]
    ran = sum(r.verdict != "skip" for r in tests)
    number = len(tests) if collected is None else collected
    return Run(INFO, records, RunEnd(collected=number, ran=ran, exitstatus=exitstatus))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """Write a complete file of three records."""
    path = tmp_path / "results.jsonl"
    write(finished(record("a"), record("a", check="exact", compared=9), record("b")), path)
    return path


def test_reads_what_was_written(tmp_path):
    """Every field survives, and so does a float that JSON has no word for."""
    odd = record(
        "a:x",
        "fail",
        "exact",
        rel_err_f64=float("inf"),
        mutant_distance=3.0,
        max_ulp=2,
        graph=True,
        sources={"k.py": "0123456789ab"},
        message='two\nlines, "quoted" ✗',
    )
    run = write(finished(odd, record("b", "skip", reason="no GPU")), tmp_path / "r.jsonl")
    assert read(tmp_path / "r.jsonl") == run
    nan = record("c", "fail", "exact", rel_err_bf16=float("nan"))
    write(finished(nan), tmp_path / "r.jsonl")
    assert str(read(tmp_path / "r.jsonl").records[0].rel_err_bf16) == "nan"
    json.loads(to_line("record", nan), parse_constant=lambda name: pytest.fail(name))


def _edit(path: Path, line: int, old: str, new: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new)
    path.write_text("".join(lines))


BROKEN = {
    "half-line": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "truncated: line 5 breaks off"),
    "no-end": (
        lambda p: p.write_text("".join(p.read_text().splitlines(keepends=True)[:3])),
        "truncated: no end line after line 3",
    ),
    "half-first-line": (lambda p: p.write_bytes(p.read_bytes()[:40]), "line 1 breaks off"),
    "empty": (lambda p: p.write_text(""), "is empty"),
    "blank": (lambda p: p.write_text("\n\n"), "is empty"),
    "text": (lambda p: p.write_text("hello\n"), "line 1, is not JSON"),
    "binary": (lambda p: p.write_bytes(bytes(range(256))), "line 1, is not JSON"),
    "other-json": (lambda p: p.write_text('{"a": 1}\n'), "not a results file"),
    "array": (lambda p: p.write_text("[1]\n"), "not a results file"),
    "deep": (lambda p: p.write_text("[" * 100_000), "not a results file"),
    "no-run-line": (
        lambda p: p.write_text("".join(p.read_text().splitlines(keepends=True)[1:])),
        "expected the run line",
    ),
    "schema": (lambda p: _edit(p, 0, '"schema": 1', '"schema": 2'), "has schema 2"),
    "unknown-field": (lambda p: _edit(p, 1, '"check"', '"chekc"'), "unknown field 'chekc'"),
    "missing-field": (lambda p: _edit(p, 1, '"check": "test", ', ""), "lacks"),
    "wrong-type": (lambda p: _edit(p, 2, '"compared": 9', '"compared": "9"'), "compared = '9'"),
    "bool-for-int": (lambda p: _edit(p, 2, '"compared": 9', '"compared": true'), "compared = True"),
    "verdict": (lambda p: _edit(p, 1, '"pass"', '"passed"'), "verdict = 'passed'"),
    "repeated": (lambda p: _edit(p, 3, '"b:test"', '"a:test"'), "repeats the record 'a:test'"),
    "removed": (
        lambda p: p.write_text("".join(p.read_text().splitlines(keepends=True)[::2])),
        "holds 1 record, its end line says 3",
    ),
    "two-runs": (lambda p: p.write_text(p.read_text() * 2), "line 6, is a run line out of place"),
    "missing": (lambda p: p.unlink(), "does not exist"),
    "directory": (lambda p: (p.unlink(), p.mkdir()), "is a directory"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refuses_a_broken_file_in_one_sentence(good, name):
    """A file that cannot be trusted whole is not read at all, and the sentence names it."""
    damage, phrase = BROKEN[name]
    damage(good)
    with pytest.raises(ParityError) as error:
        read(good)
    text = str(error.value)
    assert phrase in text
    assert str(good) in text
    assert "\n" not in text
    assert text.endswith(".")


def test_every_cut_is_noticed_and_loses_at_most_the_line_it_hit(good):
    """However a file is cut, it is refused whole, and its finished lines are there in part."""
    data = good.read_bytes()
    first = data.index(b"\n") + 1
    for size in range(len(data)):
        good.write_bytes(data[:size])
        with pytest.raises(ParityError):
            read(good)
        if size >= first:
            run = read(good, partial=True)
            assert len(run.records) == min(3, data[:size].count(b"\n") - 1)
            assert run.end is None
            assert judge(run).status == "incomplete"


def test_a_killed_process_keeps_every_finished_line(tmp_path):
    """A record is on its way to the disk when `add` returns: SIGKILL cannot take it back."""
    script = f"""
import os, signal
from moe_parity.reports.parts import Writer
from moe_parity.reports.records import Record, RunInfo
from pathlib import Path
writer = Writer(Path({str(tmp_path / "part.jsonl")!r}), RunInfo(started="now"))
for i in range(50):
    writer.add(Record(id=f"t{{i}}:test", check="test", verdict="pass"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(read(tmp_path / "part.jsonl", partial=True).records) == 50


def test_merge_sorts_and_keeps_the_worse_of_two(tmp_path):
    """The order of workers leaves no trace; a crash after a pass is not forgotten."""
    for name, records in (
        ("results-gw0.jsonl", [record("c"), record("a")]),
        ("results-gw1.jsonl", [record("b", "fail"), record("c", "error")]),
    ):
        writer = Writer(tmp_path / name, INFO)
        for one in records:
            writer.add(one)
        writer.close()
    with (tmp_path / "results-gw1.jsonl").open("ab") as part:
        part.write(b'{"kind": "record", "id": "tor')
    (tmp_path / "results-gw2.jsonl").write_bytes(b'{"kind": "ru')  # killed at its start
    (tmp_path / "results-gw3.jsonl").write_bytes(b"")
    merged = merge(tmp_path, [record("d", "skip")])
    verdicts = [(r.id, r.verdict) for r in merged]
    expected = [("a", "pass"), ("b", "fail"), ("c", "error"), ("d", "skip")]
    assert verdicts == [(f"{name}:test", verdict) for name, verdict in expected]


def test_an_unwritable_folder_is_refused(tmp_path):
    """A file where a folder must be cannot be written to, whoever asks."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ParityError, match=r"cannot write results to .*file/out: .*\.$"):
        prepare(tmp_path / "file" / "out")
    (tmp_path / "out" / "results.jsonl").mkdir(parents=True)
    with pytest.raises(ParityError, match="cannot write results to"):
        prepare(tmp_path / "out")


def test_a_failed_write_leaves_the_old_file(tmp_path, good):
    """A file is replaced whole or not at all, and no draft stays behind."""
    before = good.read_bytes()
    good.with_name(f".{good.name}.{os.getpid()}.tmp").mkdir()
    with pytest.raises(ParityError, match="cannot write"):
        write(finished(record("z")), good)
    assert good.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


JUDGED = {
    "all-pass": (finished(record("a")), "pass", "1 test and 0 checks passed"),
    "one-skipped": (finished(record("a"), record("b", "skip")), "pass", "1 test skipped"),
    "one-failed": (finished(record("a", "fail"), record("b")), "fail", "1 of 2 tests did not pass"),
    "fail-beats-lost": (finished(record("a", "error"), collected=9), "fail", "1 of 1 test did not"),
    "check-alone": (finished(record("a"), record("a", "fail", "exact")), "fail", "1 of 1 test"),
    "lost": (finished(record("a"), collected=3), "incomplete", "2 of 3 tests left no record"),
    "all-skipped": (finished(record("a", "skip")), "incomplete", "nothing ran"),
    "no-test": (finished(), "incomplete", "nothing ran"),
    "broken-pytest": (finished(record("a"), exitstatus=3), "incomplete", "ended with status 3"),
    "interrupted": (Run(INFO, (record("a"),), None), "incomplete", "interrupted after 1 test"),
}


@pytest.mark.parametrize("name", JUDGED)
def test_judges_a_run(name):
    """Only a run in which everything collected left a record, and something ran, can pass."""
    run, status, phrase = JUDGED[name]
    judgement = judge(run)
    assert judgement.status == status
    assert phrase in judgement.sentence


def test_reading_and_reporting_need_no_torch():
    """A report can be made where no kernel could run."""
    script = "import sys, moe_parity.reports.html, moe_parity.reports.markdown; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert {"torch", "triton", "numba", "pytest"}.isdisjoint(done.stdout.split())
