"""How a run may end, seen from outside: a hang, a crash, a full disk, SIGKILL.

Whatever it is, the finished tests are kept, a sentence says what happened and where they are, and a
kernel that hung or crashed is named with its case.
"""

import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from moe_parity.harness.cli import commands as cli
from moe_parity.reports.parts import read_parts
from moe_parity.reports.records import Run
from moe_parity.suites.meta.outside import Suite, clean, command, wait_until


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def verdicts(run: Run) -> dict[str, str]:
    return {record.id.removesuffix(":test"): record.verdict for record in run.tests}


# --- a hang, a crash ----------------------------------------------------------------------------

HEAD = """
import ctypes
from moe_parity.harness.session.watch import current
def mine(name, kernel="mine"):
    return pytest.param(name, id=f"{kernel}-{name}", marks=pytest.mark.moe(kernel=kernel))
"""
HOW = {
    # what the kernel does, what is said of it
    "loop": ("while True: time.sleep(0.01)", "ran longer than the limit of 1 s (test_it.py, line"),
    "deaf": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}); time.sleep(60)",
        "ran longer than the limit of 1 s and did not answer (test_it.py, line",
    ),
    "swallows": (
        "\n            while True:"
        "\n                try: time.sleep(60)"
        "\n                except BaseException: pass",
        "ran longer than the limit of 1 s and did not answer (test_it.py, line",
    ),
    "segfault": ("ctypes.string_at(0)", "took its process down (test_it.py, line"),
    "exit": ("os._exit(3)", "took its process down: it left by os._exit, or was killed"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "took its process down: it left by"),
}


@pytest.mark.parametrize("how", HOW)
def test_a_kernel_that_gives_no_answer_is_one_failed_record(suite, how):
    """It names the kernel, the case and the line, and the others run."""
    does, said = HOW[how]
    suite.write("import moe_parity.harness.session.watch as w\nw.GRACE = 1.0", "conftest.py")
    suite.write(HEAD + f"""
@pytest.mark.parametrize("name", [mine(n) for n in "abcd"])
def test_it(name):
    current().case(f"mine-{{name}}", f"parity repro mine-{{name}}")
    if name == "b":
        {does}
""")  # fmt: skip
    done = suite.run("--parity-out=out", "--parity-timeout=1", "-n1")
    assert done.returncode == 1
    assert "Fatal Python error" not in done.stdout + done.stderr
    run = suite.results()
    told = {"a": "pass", "b": "error", "c": "pass", "d": "pass"}
    assert verdicts(run) == {f"test_it:mine-{name}": verdict for name, verdict in told.items()}
    (bad,) = [record for record in run.records if record.verdict == "error"]
    assert bad.kernel == "mine"
    assert bad.message.startswith(f"mine on b {said}")
    if how not in ("loop",):
        assert bad.repro == "parity repro mine-b"
    assert "no test is about" not in done.stdout
    assert "left no record" not in done.stdout


def test_a_kernel_that_gives_out_again_and_again_is_left_alone(suite):
    """After three cases the others of its tests are skipped, with the reason; the rest runs."""
    suite.write(HEAD + """
@pytest.mark.parametrize("name", [mine(n) for n in "abcdef"] + [mine("a", "other")])
def test_it(request, name):
    if "mine" in request.node.name:
        os._exit(3)
""")  # fmt: skip
    done = suite.run("--parity-out=out", "-n1")
    assert done.returncode == 1
    run = suite.results()
    assert sorted(verdicts(run).values()) == ["error"] * 3 + ["pass"] + ["skip"] * 3
    skipped = [record for record in run.tests if record.verdict == "skip"]
    assert {record.why for record in skipped} == {"given_up"}
    assert {record.reason for record in skipped} == {"mine hung or crashed in 3 cases before"}


def test_a_hang_without_workers_says_a_sentence(suite):
    """There is nobody to go on: the process ends, and says what was running and what is kept."""
    suite.write("import moe_parity.harness.session.watch as w\nw.GRACE = 0.5", "conftest.py")
    suite.write(HEAD + """
def test_a(): pass
@pytest.mark.parametrize("name", [mine("b")])
def test_it(name):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}); time.sleep(60)
""")  # fmt: skip
    done = suite.run("--parity-out=out", "--parity-timeout=1")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "parity: mine ran longer than the limit of 1 s and did not answer"
    )
    assert f"what had finished is kept in {suite.folder / 'out' / 'parts'}" in done.stderr
    left = read_parts(suite.folder / "out" / "parts")
    assert [record.id for record in left.records] == ["test_a::test"]


def test_no_limit_and_a_long_drawn_test_are_left_in_peace(suite):
    """0 is no limit; a property has the time anew for each of its cases."""
    suite.write(HEAD + """
def test_it():
    for n in range(3):
        current().case(f"mine-{n}", "")
        time.sleep(0.6)
""")  # fmt: skip
    assert suite.run("--parity-timeout=1").returncode == 0
    assert suite.run("--parity-timeout=0").returncode == 0
    assert suite.run("--parity-timeout=0.5").returncode == 1


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("time.sleep(60)", "ran longer than the limit of 1 s (test_b.py, line 4)"),
        ("ctypes.string_at(0)", "took its process down (test_b.py, line 4): segmentation fault."),
        ("os._exit(3)", "took its process down: it left by os._exit, or was killed"),
    ],
    ids=["hang", "crash", "exit"],
)
def test_a_file_that_cannot_be_collected_ends_the_run_once(suite, does, said):
    """A kernel's own functions are asked there; the file and the line are named, not 8 times."""
    suite.write("def test_a(): pass", "test_a.py")
    suite.write(f"import ctypes\n{does}\ndef test_b(): pass", "test_b.py")
    done = suite.run("--parity-out=out", "--parity-timeout=1", "-n1")
    assert done.returncode in (1, 2)
    (bad,) = [record for record in suite.results().records if record.verdict == "error"]
    assert bad.nodeid == "test_b.py"
    assert bad.message.startswith(f"collecting test_b.py {said}")
    assert done.stdout.count("node down") <= 1


def test_a_fixture_that_a_test_asks_for_leaves_it_its_limit(suite):
    """The limit of the test goes on once that of the fixture has ended."""
    suite.write("""
        @pytest.fixture
        def made(): return 1
        def test_it(request):
            request.getfixturevalue("made")
            while True: time.sleep(0.01)
    """)
    done = suite.run("--parity-out=out", "--parity-timeout=1")
    assert done.returncode == 1
    (record,) = suite.results().records
    assert record.message.startswith("test_it ran longer than the limit of 1 s")


# --- a full disk --------------------------------------------------------------------------------


def small_files() -> None:
    """Let no file grow past 6,000 bytes, which a test can have without a disk of its own."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_full_disk_is_one_sentence_and_status_2(suite, workers):
    """What had finished stays, and the sentence says where and what reads it."""
    suite.write("@pytest.mark.parametrize('i', range(99))\ndef test_many(i): pass\n")
    done = subprocess.run(
        command(suite.folder, "--parity-out=out", workers), cwd=suite.folder,
        env=clean(PYTHONDONTWRITEBYTECODE="1"), capture_output=True, text=True, check=False,
        timeout=60, preexec_fn=small_files,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr
    assert "left no record" not in done.stdout
    (sentence,) = [line for line in done.stdout.splitlines() if line.startswith("cannot write")]
    out = suite.folder / "out"
    if (out / "results.jsonl").exists():  # one part, of which the last half line is gone, may fit
        assert workers == "-n0"
        assert sentence.endswith(": the disk is full. The run ended there.")
        kept = suite.results()
    else:
        where = f"What had finished is kept in {out / 'parts'}: make room, then `parity report "
        assert where in sentence
        kept = read_parts(out / "parts")
    assert 5 < len(kept.records) < 99
    assert {record.verdict for record in kept.records} == {"pass"}


# --- SIGKILL ------------------------------------------------------------------------------------


@pytest.fixture
def killed(suite: Suite) -> Suite:
    """Kill a run while its second test runs."""
    suite.write("""
        def test_a(): pass
        def test_b():
            if os.environ.get("SLOW"): time.sleep(60)
    """)
    with subprocess.Popen(
        command(suite.folder, "--parity-out=out"), cwd=suite.folder, env=clean(SLOW="1"),
        stdout=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        part = suite.folder / "out" / "parts" / "results-main.jsonl"
        wait_until(lambda: part.exists() and part.read_bytes().count(b"\n") == 2)
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    assert not (suite.folder / "out" / "results.jsonl").exists()
    return suite


@pytest.mark.parametrize("path", ["out", "out/parts", "out/results.jsonl"])
def test_the_report_of_a_killed_run_reads_its_parts(killed, capsys, monkeypatch, path):
    """However the run is called, it says where they are and what was running."""
    monkeypatch.chdir(killed.folder)
    assert cli.main(["report", path, "-o", "r.md"]) == cli.OK
    said = capsys.readouterr().err
    assert said.startswith("parity: the run that was started ")
    assert said.endswith(
        "1 finished record read from out/parts; it was running test_it.py::test_b.\n"
    )
    assert Path("r.md").read_text().startswith("### ! Incomplete: interrupted after 1 test")


def test_the_next_run_saves_what_a_killed_one_left(killed, capsys, monkeypatch):
    """Its records become a file of their own, which the sentence names."""
    monkeypatch.chdir(killed.folder)
    done = killed.run("--parity-out=out", "-k", "test_b")
    assert done.returncode == 0
    assert "an earlier run, started " in done.stdout
    assert "never ended: what it had finished, 1 record, is kept in" in done.stdout
    assert set(verdicts(killed.results())) == {"test_b:"}
    (saved,) = Path("out").glob("interrupted-*.jsonl")
    assert str(saved) in done.stdout
    assert cli.main(["report", str(saved), "--partial", "-o", "r.csv"]) == cli.OK


def test_an_older_report_is_not_taken_for_the_killed_run(killed, capsys, monkeypatch):
    """results.jsonl is there, of an earlier run: both are named."""
    monkeypatch.chdir(killed.folder)
    parts = [(p.name, p.read_bytes()) for p in Path("out/parts").iterdir() if p.is_file()]
    assert killed.run("--parity-out=out").returncode == 0
    Path("out/parts").mkdir()
    for name, data in parts:
        Path("out/parts", name).write_bytes(data)
    assert cli.main(["report", "out/results.jsonl", "-o", "r.md"]) == cli.OK
    assert "out/results.jsonl is of an earlier run; " in capsys.readouterr().err
    assert Path("r.md").read_text().startswith("### ✓ Passed: 2 tests")


def test_two_runs_do_not_write_to_one_folder(suite):
    """The second is refused before it can touch the records of the first."""
    suite.write("def test_slow(): time.sleep(float(os.environ['SLOW']))")
    with subprocess.Popen(
        command(suite.folder, "--parity-out=out"), cwd=suite.folder, env=clean(SLOW="60"),
        stdout=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        lock = suite.folder / "out" / "parts" / ".lock"
        wait_until(lambda: lock.exists() and bool(lock.read_bytes()))
        done = suite.run("--parity-out=out", SLOW="0")
        process.kill()
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"another run (process {process.pid}) is writing to" in done.stderr
    assert suite.run("--parity-out=out", SLOW="0").returncode == 0


# --- a GPU that answers no more ------------------------------------------------------------------

LOST = """
    from moe_parity.harness.session import environment

    lost = []
    environment.gpu_lost = lambda: bool(lost)

    @pytest.mark.parametrize("kernel", ["mine"])
    def test_bad(kernel, parity_recorder):
        lost.append(1)
        raise RuntimeError("CUDA error: device-side assert triggered")

    @pytest.mark.parametrize("n", range(4))
    def test_others(n, parity_recorder):
        parity_recorder.add({"check": "exact", "verdict": "fail" if lost else "pass"})
        assert not lost
"""


def test_a_lost_gpu_costs_the_test_that_lost_it_and_no_other(suite):
    """A worker whose GPU answers no more is replaced."""
    suite.write(LOST)
    assert suite.run("-n1", "--parity-out=out").returncode == 1
    red = {r.nodeid for r in suite.results().records if r.verdict != "pass"}
    assert red == {"test_it.py::test_bad[mine]"}
    messages = [r.message for r in suite.results().records if r.nodeid in red]
    assert "RuntimeError: CUDA error: device-side assert triggered" in messages
    assert len({r.nodeid for r in suite.results().records}) == 5


def test_a_lost_gpu_ends_a_run_without_workers(suite):
    """With the test that lost it; nothing else is called red."""
    suite.write(LOST)
    done = suite.run("-n0", "--parity-out=out")
    assert done.returncode == 2
    assert "left the GPU in an error that only a new process clears" in done.stdout
    assert {r.nodeid for r in suite.results().records} == {"test_it.py::test_bad[mine]"}
