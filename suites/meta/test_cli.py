"""The command `parity`: bad input is one sentence and status 2, and a verdict is an exit status."""

import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import moe_parity.harness.cli as commands
from moe_parity.harness import evidence
from moe_parity.harness.cli import commands as cli
from moe_parity.harness.session import environment
from moe_parity.references.errors import ParityError
from moe_parity.reports.records import Record, Run, RunEnd, RunInfo
from moe_parity.reports.results import read, write

OUTPUTS = {
    "results.jsonl",
    "tolerances.csv",
    "summary.md",
    "junit.xml",
    "report.html",
    "pytest.log",
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Write the results of one passing test."""
    records = (
        Record(id="a:exact", check="exact", verdict="pass", nodeid="a", kernel="k", compared=5),
        Record(id="a:test", check="test", verdict="pass", nodeid="a"),
    )
    end = RunEnd(records=2, collected=1, ran=1, exitstatus=0)
    write(Run(RunInfo(started="now"), records, end), tmp_path / "results.jsonl")
    return tmp_path / "results.jsonl"


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run the command, insist on one line on stderr and status 2, and return the line."""
    try:
        status = cli.main([str(arg) for arg in args])
    except SystemExit as exit_:
        status = exit_.code
    captured = capsys.readouterr()
    assert status == cli.BAD_INPUT
    assert captured.out == ""
    assert captured.err.startswith("parity: ")
    assert captured.err.count("\n") == 1
    return captured.err


# --- report -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "start"),
    [("r.html", "<!doctype html>"), ("r.md", "### ✓ Passed"), ("r.csv", "kernel,recipe")],
    ids=["html", "md", "csv"],
)
def test_report_goes_by_the_ending(results, tmp_path, capsys, name, start):
    """The format follows the name, and the path is printed for the next command."""
    target = tmp_path / name
    assert cli.main(["report", str(results), "-o", str(target)]) == cli.OK
    assert target.read_text().startswith(start)
    assert capsys.readouterr().out == f"{target}\n"
    odd = tmp_path / "report.txt"
    assert cli.main(["report", str(results), "-o", str(odd), "--format", "md"]) == cli.OK
    assert odd.read_text().startswith("### ")


BAD_RESULTS = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-5]), "is truncated"),
    "empty": (lambda p: p.write_bytes(b""), "is empty"),
    "foreign": (lambda p: p.write_text("<html>\n"), "is not JSON"),
    "schema": (lambda p: p.write_text(p.read_text().replace('"schema": 1', '"schema": 0')), "0"),
    "missing": (lambda p: p.unlink(), "does not exist"),
    "directory": (lambda p: (p.unlink(), p.mkdir()), "results.jsonl/results.jsonl does not exist"),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_report_refuses_bad_results(results, tmp_path, capsys, name):
    """Nothing is written, so an older report is not lost."""
    damage, phrase = BAD_RESULTS[name]
    damage(results)
    target = tmp_path / "report.html"
    target.write_text("older")
    assert phrase in refused(capsys, "report", results, "-o", target)
    assert target.read_text() == "older"


def test_report_of_an_interrupted_run_is_asked_for(results, tmp_path, capsys):
    """With --partial, what is there is shown, as incomplete."""
    results.write_bytes(results.read_bytes()[:-5])
    target = tmp_path / "r.md"
    assert "--partial" in refused(capsys, "report", results, "-o", target)
    assert cli.main(["report", str(results), "-o", str(target), "--partial"]) == cli.OK
    assert target.read_text().startswith("### ! Incomplete: interrupted after 1 test")


def test_report_refuses_a_target(results, tmp_path, capsys):
    """An unwritable place and an unknown format are named."""
    assert "cannot write" in refused(capsys, "report", results, "-o", results / "r.html")
    assert "cannot write" in refused(capsys, "report", results, "-o", tmp_path / "no" / "r.html")
    assert "cannot tell the format" in refused(capsys, "report", results, "-o", tmp_path / "r.pdf")


# --- the other commands -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        pytest.param([], id="nothing"),
        pytest.param(["chekc"], id="command"),
        pytest.param(["check", "--krnel", "x"], id="option"),
        pytest.param(["check", "--kern", "x"], id="abbreviation"),
        pytest.param(["check", "--device", "tpu"], id="device"),
        pytest.param(["check", "-n", "many"], id="workers"),
        pytest.param(["check", "--seed", "x"], id="seed"),
        pytest.param(["check", "--profile", "fast"], id="profile"),
        pytest.param(["report"], id="no-results"),
        pytest.param(["witness"], id="no-action"),
        pytest.param(["repro"], id="no-id"),
    ],
)
def test_usage_is_one_line(capsys, args):
    """And it says where the help is."""
    assert "--help`" in refused(capsys, *args)


@pytest.mark.parametrize("name", ["", "check", "report", "kernels", "recipes", "repro", "witness"])
def test_help_documents_the_exit_status(capsys, name):
    """Of the command and of each of its own."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([*([name] if name else []), "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for line in ("0  every check", "1  a check failed", "2  bad input", "3  incomplete"):
        assert line in text


@pytest.fixture
def owner(monkeypatch):
    """Stand in for the modules behind the thin commands; return what they were called with."""
    calls = []

    def fake(package: types.ModuleType, name: str, **functions: object) -> None:
        module = types.ModuleType(f"{package.__name__}.{name}")
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(package, name, module, raising=False)

    def called(name: str, result: object = 0):
        def function(*args: object) -> object:
            calls.append((name, *args))
            if isinstance(result, BaseException):
                raise result
            return result

        return function

    table = called("kernels", "a table")
    fake(
        commands,
        "listing",
        kernels_table=table,
        recipes_table=called("recipes", ParityError("no\nluck.")),
    )
    fake(commands, "repro", run=called("repro", 1))
    fake(
        evidence,
        "witness_set",
        record=called("record"),
        verify=called("verify", KeyboardInterrupt()),
    )
    return calls


def test_thin_commands_pass_on_what_they_are_given(owner, capsys):
    """Arguments arrive, results are printed, statuses are returned."""
    assert cli.main(["kernels"]) == cli.OK
    assert capsys.readouterr().out == "a table\n"
    assert cli.main(["repro", "a:b:c", "--seed", "7"]) == cli.FAILED
    assert cli.main(["witness", "record", "-o", "w", "--kernel", "k"]) == cli.OK
    assert "no luck." in refused(capsys, "recipes")
    assert cli.main(["witness", "verify", "a", "b"]) == cli.INCOMPLETE
    assert capsys.readouterr().err == "parity: interrupted.\n"
    assert owner == [
        ("kernels",),
        ("repro", ["a:b:c"], 7, None, [], None, None),
        ("record", Path("w"), ["k"]),
        ("recipes",),
        ("verify", [Path("a"), Path("b")]),
    ]


def test_a_reader_that_has_had_enough_is_no_error():
    """`parity kernels | head` ends quietly."""
    script = (
        "import sys, types, moe_parity.harness.cli as package\n"
        "package.listing = types.SimpleNamespace(kernels_table=lambda: 'x' * 10**6)\n"
        "sys.exit(package.main(['kernels']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


# --- check --------------------------------------------------------------------------------------


class Project:
    """A checkout in small: a folder of suites, and a pyproject that says whose it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "suites" / "meta").mkdir(parents=True)
        (folder / "harness").mkdir()
        (folder / "harness" / "plugin.py").touch()
        (folder / "pyproject.toml").write_text('[project]\nname = "moe-parity"\n')
        (folder / "suites" / "meta" / "test_own.py").write_text("def test_own(): assert False\n")
        (folder / "suites" / "test_it.py").write_text("""
import pytest
@pytest.mark.moe(kernel="mine", scale="ue8m0")
def test_good(parity_recorder):
    parity_recorder.add({"check": "exact", "verdict": "pass", "compared": 64})
def test_bad(parity_recorder):
    message = "[red]3[/] of 64 differ"
    parity_recorder.add({"check": "exact", "verdict": "fail", "compared": 64, "message": message})
    pytest.fail(message)
def test_skipped():
    pytest.skip("not today")
""")

    def start(self, *args: str, **variables: str) -> subprocess.Popen[str]:
        """Start `parity check` here."""
        dropped = ("MOE_PARITY_", "PYTEST_", "PYTHON", "CI")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        return subprocess.Popen(
            [sys.executable, "-m", "moe_parity.harness", "check", *args],
            cwd=self.folder,
            env=kept | {"CUDA_VISIBLE_DEVICES": ""} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def check(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `parity check` here to its end."""
        with self.start(*args, **variables) as process:
            out, err = process.communicate(timeout=120)
        assert "Traceback" not in out + err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_check_writes_all_and_tells_a_failure(project, workers):
    """Every output is there, the failure is shown, the suites' own tests are left out."""
    done = project.check("-n", workers)
    assert done.returncode == cli.FAILED
    assert done.stderr == ""
    assert {path.name for path in (project.folder / "parity-out").iterdir()} == OUTPUTS
    assert "✗ suites/test_it.py::test_bad\n  [red]3[/] of 64 differ" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "✗ failed: 1 of 2 tests did not pass, 1 test skipped",
        "report: parity-out/report.html",
    ]
    run = read(project.folder / "parity-out" / "results.jsonl")
    assert run.end.collected == 3
    assert run.info.command[-2:] == ("-n", workers)
    assert "[red]3[/] of 64 differ" in (project.folder / "parity-out" / "pytest.log").read_text()


def test_check_selects_by_marker_and_passes(project):
    """A small selection is green, also where CI is set, and a file gets no colour."""
    args = ("-m", "moe(scale='ue8m0')", "-n", "0", "--out", "o", "--seed", "5", "--profile", "ci")
    done = project.check(*args, CI="true")
    assert done.returncode == cli.OK
    assert "✓ passed: 1 test and 1 check passed" in done.stdout
    assert "\x1b" not in done.stdout
    info = json.loads((project.folder / "o" / "results.jsonl").read_text().splitlines()[0])
    assert (info["seed"], info["profile"]) == (5, "ci")


@pytest.mark.parametrize("name", ["skipped", "nosuch"])
def test_check_of_nothing_is_incomplete(project, name):
    """Neither skips nor an empty selection give a verdict."""
    done = project.check("-k", name, "-n", "0")
    assert done.returncode == cli.INCOMPLETE
    assert "! nothing ran" in done.stdout


def test_check_shows_a_misspelt_variable(project):
    """On the terminal, not only in the log."""
    done = project.check("-k", "good", "-n", "0", MOE_PARITY_DEVISE="cuda")
    assert done.returncode == cli.OK
    assert "did you mean MOE_PARITY_DEVICE?" in done.stdout


def test_check_that_is_cancelled_keeps_what_has_finished(project):
    """SIGTERM, as a CI sends it: results and report are there, and the status is 3."""
    slow = project.folder / "suites" / "test_it.py"
    slow.write_text("import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\n")
    with project.start("-n", "1") as process:
        part = project.folder / "parity-out" / "parts"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not any(
            b"test_a" in file.read_bytes() for file in part.glob("results-*")
        ):
            time.sleep(0.02)
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert process.returncode == cli.INCOMPLETE, out + err
    assert "! incomplete: 1 of 2 tests left no record" in out
    run = read(project.folder / "parity-out" / "results.jsonl")
    assert [record.id for record in run.records] == ["test_a::test"]


EARLY = {
    "no-gpu": (["--device", "cuda"], "the device is cuda, but torch finds no CUDA GPU"),
    "required": (["--require-gpu"], "a GPU is required, but torch finds no CUDA GPU"),
    "out": (["--out", "pyproject.toml/out"], "cannot write results to pyproject.toml/out"),
    "expression": (["-k", "scale=ue8m0"], "wrong expression for -k: 'scale=ue8m0', column 6"),
    "marker": (["-m", "moe("], "wrong expression for -m: 'moe('"),
}
LATE = {
    "kernel": (["--kernel", "nosuch"], "unknown kernel 'nosuch'"),
    "no-file": (["--kernel", "nosuch.py"], "nosuch.py"),
    "import": (["--kernel", "broken.py"], "broken.py does not import: NameError: name 'oops'"),
}


@pytest.mark.parametrize("name", EARLY)
def test_check_refuses_bad_input_before_pytest_starts(project, capsys, monkeypatch, name):
    """One sentence, status 2."""
    args, phrase = EARLY[name]
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr(environment, "gpu", lambda: None)
    assert phrase in refused(capsys, "check", *args)


@pytest.mark.parametrize("name", LATE)
def test_check_refuses_bad_input_before_anything_runs(project, name):
    """One sentence, status 2, and the results of an earlier run are still there."""
    args, phrase = LATE[name]
    (project.folder / "broken.py").write_text("oops\n")
    (project.folder / "parity-out").mkdir()
    (project.folder / "parity-out" / "results.jsonl").write_text("earlier")
    done = project.check(*args)
    assert done.returncode == cli.BAD_INPUT
    assert phrase in done.stderr
    assert done.stderr.startswith("parity: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert (project.folder / "parity-out" / "results.jsonl").read_text() == "earlier"
