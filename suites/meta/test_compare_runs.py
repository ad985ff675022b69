"""`parity compare` of two results files: by digest, verdict and cause; a bisection's statuses."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_parity.harness.checks.compare import digest
from moe_parity.harness.checks.expect import fields
from moe_parity.harness.checks.flow import check
from moe_parity.harness.cli import commands as cli
from moe_parity.harness.session.recorder import Recorder
from moe_parity.kernels import find
from moe_parity.references.language import Case
from moe_parity.references.stages import STAGES
from moe_parity.reports.comparison import State
from moe_parity.reports.records import Record, Run, RunEnd, RunInfo
from moe_parity.reports.results import read, write
from moe_parity.suites.planted import following, kernel_of

INFO = RunInfo(
    started="now", seed=0, device="cpu", environment={"torch": "2.13.0", "vllm": "0.33.0"}
)


def record(name: str, **values: Any) -> Record:
    about = {"check": "exact", "verdict": "pass", "kernel": "k", "stage": "fc1", "compared": 8}
    own = {"digest": f"{name}@0 aa"} | about | values
    return Record(id=f"t:{name}:{own['check']}", nodeid=name, **own)


def kept(path: Path, *records: Record, info: RunInfo = INFO, ended: bool = True) -> Path:
    end = RunEnd(records=len(records), collected=1, ran=1, exitstatus=0) if ended else None
    write(Run(info, records, end), path)
    return path


def compared(tmp_path: Path, base: Record | list, candidate: Record | list, **other: Any) -> dict:
    """Compare two runs through the command and return its JSON and its exit status."""
    sides = [own if isinstance(own, list) else [own] for own in (base, candidate)]
    old = kept(tmp_path / "base.jsonl", *sides[0])
    new = kept(tmp_path / "new.jsonl", *sides[1], **other)
    status = cli.main(["compare", str(old), str(new), "--json", str(tmp_path / "c.json")])
    return dict(json.loads((tmp_path / "c.json").read_text())) | {"exit": status}


RED = {"verdict": "fail", "cause_kind": "mistake", "cause": "k_tail", "message": "K tail lost."}
FOUND = {
    "same": ({}, {}, State.SAME, ""),
    "bits": ({}, {"digest": "a@0 bb"}, State.CHANGED, "both are green by recipe"),
    "recipe": (
        {"recipe": "vllm_cuda", "stage": "act_quant"},
        {"recipe": "deepgemm", "stage": "act_quant", "digest": "a@0 bb"},
        State.CHANGED, "follows recipe deepgemm, and followed vllm_cuda: quant.",
    ),
    "failure": ({}, RED, State.FAILS, "K tail lost."),
    "fixed": (RED, {}, State.FIXED, "it was red: K tail lost."),
    "as_red": (RED, RED, State.SAME, ""),
    "other_cause": (RED, RED | {"cause": "zeros", "message": "Zeros."}, State.CHANGED, "Zeros."),
    "redder": (RED, RED | {"digest": "a@0 bb"}, State.CHANGED, "K tail lost."),
    "drawn": ({}, {"digest": "b@7 aa"}, State.APART, "drawn cases: the base judged a@0"),
    "folded": ({"digest": "", "examples": 9}, {}, State.APART, "stands for several drawn cases"),
    "no_digest": ({"digest": ""}, {}, State.APART, "the base holds no digest"),
    "skipped": ({}, {"verdict": "skip", "reason": "No GPU."}, State.APART, "candidate skips it"),
    "other_check": ({"check": "rerun", "digest": ""}, {"check": "rerun", "digest": ""},
                    State.AGREED, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_became_of_a_record(tmp_path, name):
    base, candidate, state, words = FOUND[name]
    told = compared(tmp_path, record("a", **base), record("a", **candidate))
    (one,) = told["items"]
    assert one["state"] == state
    assert words in one["sentence"] + one["reason"]
    moved = state in (State.CHANGED, State.FAILS, State.FIXED)
    assert told["exit"] == (1 if moved else 3 if state is State.APART else 0)
    if state is State.FAILS:
        assert (one["cause_kind"], one["cause"]) == ("mistake", "k_tail")


def test_records_of_one_side_alone_are_said(tmp_path):
    told = compared(tmp_path, [record("a"), record("b")], [record("a"), record("c")])
    assert [(one["case"], one["reason"]) for one in told["items"]] == [
        ("t:a:exact", ""),
        ("t:b:exact", "the candidate has no such record"),
        ("t:c:exact", "the base has no such record"),
    ]
    assert told["exit"] == 0
    skipped = record("b", check="test", verdict="skip", reason="No GPU.")
    told = compared(tmp_path, [record("a"), record("b")], [record("a"), skipped])
    assert told["items"][1]["reason"] == "the candidate skips it: No GPU."


def test_a_test_that_broke_is_a_new_failure(tmp_path):
    """Its checks are green, or there are none; where a check says it, it is said once."""
    base = [record("a"), record("a", check="test"), record("b", check="test")]
    broken = {"verdict": "error", "message": "boom"}
    new = [record("a", **RED), record("a", check="test", **broken)]
    told = compared(tmp_path, base, [*new, record("b", check="test", **broken)])
    assert [(one["case"], one["sentence"]) for one in told["items"]] == [
        ("t:a:exact", "K tail lost."),
        ("t:b:test", "boom"),
    ]


OTHER = {
    "device": ({"device": "cuda"}, "the runs have device cpu and cuda"),
    "seed": ({"seed": 7}, "the runs have seed 0 and 7"),
    "torch": ({"environment": {"torch": "2.14.0", "vllm": "0.33.0"}},
              "the runs have torch 2.13.0 and 2.14.0 (--any-version)"),
    "triton": ({"environment": {**INFO.environment, "triton": "3.8"}},
               "the runs have triton none and 3.8 (--any-version)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_another_setting_is_not_compared_and_said(tmp_path, name):
    changes, reason = OTHER[name]
    info = dataclasses.replace(INFO, **changes)
    told = compared(tmp_path, record("a"), record("a", digest="a@0 bb"), info=info)
    assert [one["reason"] for one in told["items"]] == [reason]
    assert told["exit"] == 3
    sides = [str(tmp_path / name) for name in ("base.jsonl", "new.jsonl")]
    status = cli.main(["compare", *sides, "--any-version"])
    assert status == (1 if "version" in reason else 3)


def test_another_version_of_a_vendor_is_a_matter_of_its_kernels(tmp_path):
    info = dataclasses.replace(INFO, environment={"torch": "2.13.0", "vllm": "0.34.0"})
    both = [record("a", kernel="vllm_moe_sum"), record("b", kernel="ours_combine")]
    told = compared(tmp_path, both, both, info=info)
    assert [one["reason"] for one in told["items"]] == [
        "the runs have vllm 0.33.0 and 0.34.0 (--any-version)", "",
    ]  # fmt: skip


def test_an_interrupted_run_is_incomplete_and_a_change_in_it_a_change(tmp_path):
    told = compared(tmp_path, record("a"), record("a"), ended=False)
    assert (told["exit"], told["unfinished"]) == (3, "the run of the candidate was interrupted")
    told = compared(tmp_path, record("a"), record("a", **RED), ended=False)
    assert told["exit"] == 1
    assert told["sentence"].endswith("; the run of the candidate was interrupted")


def test_causes_that_overlap_are_one_row(tmp_path, capsys):
    """Where few outputs differ two decisions explain them; another case says which it is."""
    one = RED | {"cause": "x=1", "cause_kind": "decision", "message": "x or y."}
    vague = one | {"alternatives": ("y=1",)}
    clear = one | {"cause": "y=1", "message": "y."}
    compared(tmp_path, [record(n) for n in "abc"],
             [record("a", **vague), record("b", **clear), record("c", **clear)])  # fmt: skip
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert said == ["  new failure: y.", "    in 3 cases: t:b:exact, t:c:exact, t:a:exact"]


def test_a_comment_is_escaped_and_below_sixty_kib(tmp_path):
    message = "<script>|`x`_ [a](b) " * 40
    names = [f"c{n}" for n in range(400)]
    about = [{"kernel": f"k{n}", "stage": f"s{n % 4}"} for n in range(400)]
    red = RED | {"message": message}
    reds = [record(n, **red | a) for n, a in zip(names, about, strict=True)]
    greens = [record(n, **a) for n, a in zip(names, about, strict=True)]
    base = kept(tmp_path / "a.jsonl", *greens)
    new = kept(tmp_path / "b.jsonl", *reds)
    out = tmp_path / "c.md"
    assert cli.main(["compare", str(base), str(new), "--markdown", str(out)]) == 1
    text = out.read_text()
    assert len(text.encode()) <= 60 << 10
    assert "\\<script\\>\\|\\`x\\`\\_" in text
    assert "<script>" not in text
    assert text.endswith("more lines were cut; `parity compare --json` has them.\n")


# --- digests --------------------------------------------------------------------------------------


def test_a_digest_tells_bits_and_nothing_else():
    """Another NaN is the same, another sign of zero is not; rows of nobody say nothing."""
    stage, case = STAGES["act_quant"], Case(m=4, h=256)
    inputs = stage.inputs(case)
    outputs = stage.outputs(case, inputs)
    codes, scales = torch.zeros(4, 256, dtype=torch.uint8), torch.ones(4, 2)
    live = {name: torch.tensor([True, True, True, False]) for name in outputs}

    def of(change: int | None = None, value: float = 0.0, row: int = 0) -> str:
        made = {"codes": codes.clone(), "scales": scales.clone()}
        if change is not None:
            made["codes"][row, 5] = change
        made["scales"][row, 1] += value
        return digest(outputs, made, live)

    assert of() == of() == of(3, row=3) == of(None, 1.0, row=3)
    assert len({of(), of(1), of(0x80), of(None, 1e-6), of(0x7F)}) == 5
    assert of(0x7F) == of(0xFF), "both are NaN"


def test_a_check_of_bits_writes_its_digest_with_the_case():
    case = Case(m=3, h=128, seed=4)
    kernel = kernel_of("act_quant", following())
    first = next(iter(check(kernel, case, "cpu")))
    told = fields(kernel, case, "cpu", first)
    name, _, bits = told["digest"].rpartition(" ")
    assert name == "fp32-m3-h128@4"
    assert bits == first.digest
    other = next(iter(check(kernel, dataclasses.replace(case, seed=5), "cpu")))
    assert other.digest != bits != ""


def test_several_examples_of_a_record_have_no_digest():
    taken: list[Record] = []
    recorder = Recorder(device="cpu", seed=0, sink=taken.append)
    for count in (1, 2):
        recorder.start("t.py::t", {})
        for _ in range(count):
            recorder.add({"check": "exact", "verdict": "pass", "digest": "a@0 aa"})
        recorder.finish()
    assert [one.digest for one in taken if one.check == "exact"] == ["a@0 aa", ""]


# --- bad input, and a bisection -------------------------------------------------------------------

BAD = {
    "nothing": ([], "got 0 paths"),
    "one": (["{a}"], "got 1 paths"),
    "missing": (["{a}", "nosuch.jsonl"], "nosuch.jsonl does not exist"),
    "kernel_file": (["{a}", "k.py"], "compared by --kernel BASE --against"),
    "one_kernel": (["--kernel", "k.py"], "--against is missing"),
    "both": (["{a}", "--kernel", "k.py", "--against", "l.py"], "leave out"),
    "package": (["--package", "nosuch", "a", "b"], "known: vllm"),
    "folder": (["--package", "vllm", "nosuch", "b"], "nosuch is no folder"),
    "case": (["--kernel", "a", "--against", "b", "--case", "q9"], "names no kernel"),
    "unwritable": (["{a}", "{a}", "--json", "nosuch/c.json"], "there is no folder nosuch"),
    "two_stdouts": (["{a}", "{a}", "--json", "-", "--markdown", "-"], "name a file for one"),
    "option": (["--nosuch"], "unrecognized arguments"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_a_bisection_skips_it(tmp_path, capsys, name):
    file = str(kept(tmp_path / "a.jsonl", record("a")))
    args, words = BAD[name]
    args = [file if arg == "{a}" else arg for arg in args]
    for extra, wanted in ([], 2), (["--bisect"], 125):
        try:
            status = cli.main(["compare", *args, *extra])
        except SystemExit as refusal:
            status = refusal.code
        said = capsys.readouterr()
        assert (status, said.out) == (wanted, "")
        assert words in said.err
        assert said.err.count("\n") == 1


def test_what_is_written_to_stdout_stands_there_alone(tmp_path, capsys):
    file = str(kept(tmp_path / "a.jsonl", record("a")))
    assert cli.main(["compare", file, file, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "same"


def test_git_bisect_finds_the_commit_that_changed_a_bit(tmp_path):
    """A commit whose run is torn is skipped, neither good nor bad."""
    base = kept(tmp_path / "base.jsonl", record("a"))
    repo = tmp_path / "repo"
    repo.mkdir()

    def git(*args: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", str(repo), *who, *args], capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip
        return done.stdout + done.stderr

    git("init", "-q")
    for name, bits in [("one", "aa"), ("two", "aa"), ("torn", ""), ("bad", "bb"), ("late", "bb")]:
        file = kept(repo / "results.jsonl", record("a", digest=f"a@0 {bits}", message=name))
        if not bits:
            file.write_text("{")
        git("add", "-A")
        git("commit", "-qm", name)
    git("bisect", "start", "HEAD", "HEAD~4")
    command = [sys.executable, "-m", "moe_parity.harness", "compare", "--bisect", str(base)]
    said = git("bisect", "run", *command, "results.jsonl")
    assert "first bad commit could be any of" in said, said
    bad, torn = git("rev-parse", ":/^bad"), git("rev-parse", ":/^torn")
    listed = said.partition("could be any of:")[2].split()[:2]
    assert sorted(listed) == sorted([bad.strip(), torn.strip()])


def test_a_run_of_our_own_kernels_compares_with_itself(tmp_path):
    """Records as a session writes them, read again."""
    kernel, case = find("ours_combine"), Case(m=3, e=4, k=2, h=128)
    taken: list[Record] = []
    recorder = Recorder(device="cpu", seed=0, sink=taken.append)
    recorder.start("suites/test_combine.py::t[x]", {})
    for verdict in check(kernel, case, "cpu"):
        recorder.add(fields(kernel, case, "cpu", verdict))
    recorder.finish()
    told = compared(tmp_path, taken, taken)
    assert told["exit"] == 0
    states = [one["state"] for one in told["items"]]
    assert states.count(State.SAME) == 1
    assert set(states) <= {State.SAME, State.AGREED, State.APART}
    assert read(tmp_path / "base.jsonl").records[0].digest.startswith(f"{case.id}@0 ")
