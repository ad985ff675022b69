"""`.ci/mutate` itself: what is a change, how a run ends, what a session keeps, what is counted."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_parity.references

ROOT = Path(moe_parity.references.__path__[0]).parent
sys.path.insert(0, str(ROOT / ".ci"))
try:
    from mutation import changes, report, running, settings
finally:
    sys.path.remove(str(ROOT / ".ci"))

TWICE = "a = 1\nif a:\n    b = 1\nelse:\n    b = 1\n"


def change(old: str, new: str) -> changes.Change:
    return changes.change("m.py", "core/X", old, new)


def test_every_module_has_its_tests_and_every_equivalent_its_line():
    config = settings.configuration()
    assert len(config.selections) >= 40
    assert all(config.equivalent.values())


BASE = """
areas = ["pkg/*.py"]
limits = {factor = 2, at_least = 1, memory_gib = 1}
operators = {exclude = []}
selection = [%s]
equivalent = [%s]
"""
ONE = '{modules = ["pkg/a.py"], tests = ["suites/test_a.py", "-k", "suites"]}'
KEPT = '{module = "pkg/a.py", operator = "core/X", line = "%s", becomes = "x", reason = "r"}'


@pytest.mark.parametrize(
    ("selections", "equivalent", "sentence"),
    [
        ("", "", "pkg/a.py has no selection of tests; add one."),
        (f"{ONE}, {ONE}", "", "pkg/a.py stands twice; each module has one selection."),
        (ONE.replace("pkg/a", "pkg/b"), "", "pkg/b.py is in no area of the tree"),
        (ONE.replace("test_a", "test_b"), "", "there is no suites/test_b.py; name tests"),
        (ONE, KEPT % "y = 2", "pkg/a.py has no line 'y = 2' with number 0; take its equivalent"),
    ],
)
def test_settings_that_do_not_fit_the_tree_are_refused(
    selections: str, equivalent: str, sentence: str, tmp_path: Path
):
    for name, text in (("pkg/a.py", '"""A."""\nx = 1\n'), ("suites/test_a.py", "")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    path = tmp_path / "mutation.toml"
    path.write_text(BASE % (ONE, KEPT % "x = 1"))
    assert settings.configuration(path, tmp_path).equivalent.popitem()[1] == "r"
    path.write_text(BASE % (selections, equivalent))
    with pytest.raises(changes.Refusal, match=re.escape(sentence)):
        settings.configuration(path, tmp_path)


# --- changes ------------------------------------------------------------------------------------


def test_a_change_is_the_place_with_its_text():
    """Of two equal lines it is the one that was changed, also after lines were added above."""
    made = change(
        TWICE, TWICE.replace("    b = 1\nelse:\n    b = 1", "    b = 1\nelse:\n    b = 2")
    )
    assert (made.line, made.nth, made.becomes) == ("    b = 1", 1, "    b = 2")
    above = "import os\n\n" + TWICE
    assert changes.apply(made, above) == (above[:-2] + "2\n", 7)


def test_a_change_of_several_lines_goes_where_it_came_from():
    old = "for i in (\n    1,\n    2,\n):\n    f(i)\n"
    made = change(old, "for i in []:\n    f(i)\n")
    assert changes.apply(made, old) == ("for i in []:\n    f(i)\n", 1)


def test_a_module_that_was_edited_is_refused():
    made = change(TWICE, TWICE.replace("a = 1", "a = 2"))
    with pytest.raises(changes.Refusal, match=r"m\.py has 'a = 1' 0 times.*make a new session"):
        changes.apply(made, "a = 3\n")


SOURCE = '''"""1 + 1 in words."""
x: Lit[3] | None = 1 + 2


@deco(size=4)
def f(a: int | str = 5, /, *, b) -> int | None:
    if a < 6:
        raise ValueError("at" + f"{a + 7}")
    return g(*a, a[-8])
'''


def test_mutants_are_code_and_not_words():
    pytest.importorskip("cosmic_ray", reason="extra mutation is not installed")
    excluded = settings.configuration().excluded
    found = {made.becomes.strip() for made in changes.mutants("m.py", SOURCE, excluded)}
    assert {re.sub(r" +", " ", text) for text in found} == {
        "x: Lit[3] | None = 2 + 2", "x: Lit[3] | None = 0 + 2", "x: Lit[3] | None = 1 + 3",
        "x: Lit[3] | None = 1 + 1", "x: Lit[3] | None = 1 - 2",
        "def f(a: int | str = 6, /, *, b) -> int | None:",
        "def f(a: int | str = 4, /, *, b) -> int | None:", "if a < 7:", "if a < 5:", "if a <= 6:",
        "if a >= 6:", "if a > 6:", "if not a < 6:", "return g(*a, a[- 9])", "return g(*a, a[- 7])",
        "return g(*a, a[8])",
    }  # fmt: skip


def test_a_sample_has_every_module_and_is_drawn_by_its_seed():
    every = {
        name: [change(TWICE, f"{name}{n}") for n in range(size)]
        for name, size in (("a", 90), ("b", 9), ("c", 1))
    }

    def drawn(seed: int) -> list[changes.Change]:
        return changes.sample(every, 10, random.Random(seed))

    assert sorted(made.becomes[0] for made in drawn(0)) == ["a"] * 9 + ["b", "c"]
    assert drawn(0) == drawn(0) != drawn(1)
    assert len(changes.sample(every, None, random.Random(0))) == 100


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "output", "outcome"),
    [
        (0, "3 passed", ("survived", "")),
        (1, "FAILED suites/test_a.py::test_b[c d] - assert 0\n1 failed",
         ("killed", "suites/test_a.py::test_b[c d]")),
        (1, "ERROR suites/test_a.py::test_b\n1 error", ("killed", "suites/test_a.py::test_b")),
        (2, "ERROR suites/test_a.py\n1 error in 1 s", ("does not import", "1 error in 1 s")),
        (1, "ERROR suites/test_a.py - E\n1 error in 1 s", ("does not import", "1 error in 1 s")),
        (4, "ImportError: m", ("does not import", "ImportError: m")),
        (5, "no tests ran in 1 s", ("no tests", "no tests ran in 1 s")),
        (-11, "", ("crashed", "signal 11")),
    ],
)  # fmt: skip
def test_how_a_run_ends(status: int, output: str, outcome: tuple[str, str]):
    assert running.read(status, output) == outcome


def test_a_run_that_hangs_is_ended_and_the_change_taken_back(tmp_path: Path):
    (tmp_path / "m.py").write_text("def wait():\n    return 0\n")
    (tmp_path / "test_m.py").write_text(
        "import time\nfrom m import wait\n\ndef test_it():\n    time.sleep(wait())\n"
    )
    tests = running.Tests(2**36)

    def outcome(limit: float, text: str = "0") -> running.Outcome:
        made = changes.Change("m.py", "core/X", "    return 0", 0, f"    return {text}")
        return running.mutated(made, tmp_path, lambda: tests.run(tmp_path, ["test_m.py"], limit))

    assert outcome(60).outcome == "survived"
    assert outcome(60, "-1") == running.Outcome(
        "killed", "test_m.py::test_it", pytest.approx(30, abs=30)
    )
    assert outcome(2, "99").outcome == "timeout"
    assert (tmp_path / "m.py").read_text() == "def wait():\n    return 0\n"
    assert not tests.alive


def test_a_copy_is_imported_instead_of_what_is_installed(tmp_path: Path):
    running.copy_tree(tmp_path / "copy")
    assert (tmp_path / "copy/moe_parity/harness/plugin.py").is_file()


# --- sessions and reports -----------------------------------------------------------------------


def session(path: Path, outcomes: list[str]) -> settings.Session:
    lines: list[dict[str, object]] = [{"of": {"m.py": 9}, "seed": 0}]
    for number, _ in enumerate(outcomes):
        made = change("a = 1\n", f"a = {number}{number}\n")
        lines.append({"mutant": vars(made)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = settings.Session(path)
    with kept.open() as stream:
        for number, outcome in enumerate(outcomes):
            kept.add(stream, number, {"outcome": outcome, "by": "", "seconds": 1.0})
    return kept


def test_a_session_survives_half_a_line(tmp_path: Path):
    made = session(tmp_path / "s", ["killed", "survived"])
    with made.path.open("a") as stream:
        stream.write('{"result": 1, "outc')
    again = settings.Session(made.path)
    assert (again.results, again.mutants, again.head) == (made.results, made.mutants, made.head)
    with again.open() as stream:
        again.add(stream, 1, {"outcome": "killed"})
    assert settings.Session(made.path).results[1] == {"result": 1, "outcome": "killed"}


def test_a_session_has_one_run_at_a_time(tmp_path: Path):
    """A second run, or a new session in its place, would mix results of different mutants."""
    made = session(tmp_path / "s", ["killed"])
    before = made.path.read_bytes()
    with made.open():
        for again in (made.open, lambda: settings.locked(made.path)):
            with pytest.raises(changes.Refusal, match=r"another run writes to .*/s; wait for it"):
                again()
    settings.locked(made.path).close()
    assert made.path.read_bytes() == before


def test_what_is_counted(tmp_path: Path):
    """No test is no kill; what is listed as equivalent counts on neither side."""
    outcomes = ["killed", "timeout", "does not import", "crashed", "survived", "no tests",
                "survived"]  # fmt: skip
    kept = session(tmp_path / "s", outcomes)
    config = settings.Config({}, {kept.mutants[6].key: "why"}, re.compile("x"), 1.0, 1.0, 1)
    lines, reasons, percent = report.table(kept, config)
    assert lines[-1] == "| all | 7 | 1 | 2 | 1 | 2 | 1 | 66.7 |"
    assert reasons == {4: "", 5: "", 6: "why"}
    assert percent == pytest.approx(200 / 3)


RECORDER = "harness/session/recorder.py"
NAMES = "suites/meta/test_recorder.py::test_names_of_items"


def mutants_of_the_recorder(path: Path, *changed: tuple[str, str]) -> settings.Session:
    source = (ROOT / RECORDER).read_text()
    lines: list[dict[str, object]] = [{"of": {RECORDER: 2}, "seed": 0}]
    for old, new in changed:
        assert old in source
        made = changes.change(RECORDER, "core/X", source, source.replace(old, new, 1))
        lines.append({"mutant": vars(made)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return settings.Session(path)


def config_of(tests: tuple[str, ...]) -> settings.Config:
    return settings.Config({RECORDER: tests}, {}, re.compile("x"), 9.0, 60.0, 2**36)


def test_a_session_is_run_to_its_end(tmp_path: Path):
    """One mutant that its test notices, one that is words; the code itself is left as it is."""
    before = (ROOT / RECORDER).read_text()
    kept = mutants_of_the_recorder(
        tmp_path / "s", ("def item_name", "def item_nam"), ("are one record", "are two records")
    )
    running.run_all(config_of((NAMES,)), kept, [0, 1], running.Tests(2**36), 2)
    again = settings.Session(kept.path)
    assert [again.results[n]["outcome"] for n in (0, 1)] == ["does not import", "survived"]
    assert not again.awaits(0, config_of(()), again=True)
    assert again.awaits(1, config_of(()), again=True)
    assert not again.awaits(1, config_of(()), again=False)
    assert (ROOT / RECORDER).read_text() == before


@pytest.mark.parametrize(
    ("tests", "why"),
    [((NAMES, "-k", "nothing"), "no tests"), (("suites/absent.py",), "does not import")],
)
def test_a_selection_that_is_not_green_is_refused(tests: tuple[str, ...], why: str, tmp_path: Path):
    kept = mutants_of_the_recorder(tmp_path / "s", ("are one record", "are two records"))
    with pytest.raises(changes.Refusal, match=rf"not green on the code as it is \({why}"):
        running.run_all(config_of(tests), kept, [0], running.Tests(2**36), 1)
    assert not settings.Session(kept.path).results


def test_what_a_limit_cuts_off_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = mutants_of_the_recorder(tmp_path / "s", ("are one record", "are two records"))
    tests = running.Tests(2**36)

    def cut_off(*_: object) -> running.Outcome:
        tests.stop()
        return running.Outcome("crashed", "signal 9", 1.0)

    monkeypatch.setattr(running, "mutated", cut_off)
    running.run_all(config_of((NAMES,)), kept, [0], tests, 1)
    assert tests.stopped.is_set()
    assert not settings.Session(kept.path).results
    assert tests.run(tmp_path, ["absent"], 60).by == "signal 9"


def test_the_command_refuses_in_a_sentence(tmp_path: Path):
    def mutate(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / ".ci/mutate"), *words]
        return subprocess.run(command, text=True, capture_output=True)

    absent = mutate("run", "--session", str(tmp_path / "s"))
    assert absent.returncode == 2
    assert absent.stderr == (
        f"mutate: there is no session {tmp_path}/s; make one with: .ci/mutate init.\n"
    )
    kept = session(tmp_path / "s", ["killed", "survived"])
    given = mutate("report", "--session", str(kept.path), "--at-least", "51")
    assert (given.returncode, given.stderr) == (1, "")
    assert "-a = 1\n+a = 11" in given.stdout
    assert mutate("report", "--session", str(kept.path), "--at-least", "50").returncode == 0
