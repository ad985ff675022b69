"""`parity fuzz`: what it finds, how small it makes it, what it keeps and tries again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from moe_parity.harness.cli import commands as cli
from moe_parity.harness.cli import fuzz
from moe_parity.harness.fuzz import corpus, loop
from moe_parity.harness.fuzz.draw import Enough, derived, draw
from moe_parity.harness.fuzz.loop import Fuzzer, Limits
from moe_parity.harness.fuzz.reason import Failure, Reason
from moe_parity.harness.fuzz.team import Team
from moe_parity.harness.fuzz.telling import Telling
from moe_parity.kernels import Call, Kernel, registry
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Skip, Why
from moe_parity.suites.meta.test_cli import refused
from moe_parity.suites.planted import Run, kernel_of, right

REASON = Reason("exact", "fc1", "k_tail")


# --- a run ---------------------------------------------------------------------------------------


def plainly(stage: str, run: Run) -> Kernel:
    """Return a kernel that takes fp32 scales in rows: what a planted one writes is not packed."""
    plain = Skip(Why.UNSUPPORTED, "fp32 scales in rows only")

    def supports(case: Case, device: str) -> Skip | None:
        return None if (case.scale, case.layout) == ("fp32", "row") else plain

    return dataclasses.replace(kernel_of(stage, run), supports=supports)


def fuzzed(kernel: Kernel, tmp_path: Path, **options: Any) -> tuple[Telling, list[str]]:
    """Fuzz a kernel in this process; return what was found and what was said."""
    said: list[str] = []
    telling = Telling(kernel=kernel, folder=tmp_path / "corpus", say=said.append)
    limits = Limits(cases=options.pop("cases", 4))
    Fuzzer(
        kernel=kernel, device="cpu", seed=1, limits=limits, send=telling.hear, **options
    ).run()  # fmt: skip
    telling.close()
    return telling, said


def two_faults(call: Call) -> Any:
    """Raise for two reasons: calls that say themselves why they fail are judged fast."""
    if call.case.m > 8:
        raise ValueError("too many rows")
    if call.case.h > 128:
        raise IndexError("too many columns")
    return right(call)


def test_every_reason_is_told_once_and_kept(tmp_path: Path):
    kernel = plainly("act_quant", two_faults)
    telling, said = fuzzed(kernel, tmp_path, cases=12)
    causes = {reason.cause for reason in telling.found}
    assert causes == {"ValueError", "IndexError"}
    assert len(said) == len(telling.found)
    raised = next(text for text in said if "ValueError" in text)
    assert "parity repro 'faulty-fp32-m9-h128' --seed " in raised
    assert telling.red >= len(said)
    entries = [corpus.load(path) for path in corpus.files(tmp_path / "corpus", "faulty")]
    assert {entry.failure.reason for entry in entries} == set(telling.found)
    assert all(str(entry.path) in "\n".join(said) for entry in entries)


def test_a_right_kernel_is_not_accused(tmp_path: Path):
    for stage in ("act_quant", "align", "combine"):
        telling, said = fuzzed(plainly(stage, right), tmp_path, cases=6)
        assert telling.judged == 6
        assert not said
    assert not corpus.files(tmp_path / "corpus")


def test_what_fails_only_after_other_calls_is_said_so(tmp_path: Path):
    """With the calls before it, and the case as it was drawn: alone there is nothing to shrink."""
    calls: list[Case] = []

    def leaky(call: Call) -> Any:
        calls.append(call.case)
        if len(calls) == 7:
            raise ValueError("seven")
        return right(call)

    telling, said = fuzzed(plainly("act_quant", leaky), tmp_path, cases=8)
    failure = next(iter(telling.found.values()))
    assert "faulty fails only after other calls" in said[0]
    assert failure.case in calls
    assert failure.after
    assert all(f"{case.id} (seed {case.seed})" in said[0] for case in failure.after)
    entry = corpus.load(corpus.files(tmp_path / "corpus")[0])
    assert entry.failure.after == failure.after


def test_what_passes_in_a_process_of_its_own_is_a_leak(tmp_path: Path):
    kernel = plainly("act_quant", two_faults)
    telling, said = fuzzed(kernel, tmp_path, cases=3, alone=lambda case: False)
    assert all("fails only after other calls" in text for text in said)
    assert telling.found


def test_a_check_that_breaks_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No traceback ends a run, whoever raised."""
    kernel = plainly("act_quant", right)
    monkeypatch.setattr(type(kernel.stage), "inputs", lambda *_: 1 / 0)
    telling, said = fuzzed(kernel, tmp_path, cases=2)
    assert "cannot be judged on fp32-m0-h128: ZeroDivisionError" in said[0]
    assert len(telling.found) == 1


def test_a_seed_draws_the_same_cases():
    """And the workers of a run draw others."""

    def drawn(base: int) -> list[Case]:
        cases: list[Case] = []

        def take(case: Case) -> None:
            cases.append(case)
            if len(cases) == 8:
                raise Enough

        draw(loop.cases(kernel_of("align", right), "cpu"), base, take)
        return cases

    assert drawn(7) == drawn(7) != drawn(derived(7, 1, 0))
    assert derived(7, 0, 0) == 7
    assert len({derived(7, worker, life) for worker in range(8) for life in range(5)}) == 40


# --- the corpus ----------------------------------------------------------------------------------


def kept(folder: Path, kernel: str = "faulty", **words: Any) -> Path:
    failure = Failure(case=Case(m=2, **words), reason=REASON, sentence="It differs.")
    return corpus.save(folder, kernel, failure)


def test_an_entry_says_the_same_again(tmp_path: Path):
    """Byte for byte, and what is read is what was written."""
    path = kept(tmp_path / "a", seed=9)
    assert path.read_bytes() == kept(tmp_path / "b", seed=9).read_bytes()
    assert path.name != kept(tmp_path / "a", seed=10).name
    entry = corpus.load(path)
    assert (entry.kernel, entry.case, entry.failure.reason) == ("faulty", Case(m=2, seed=9), REASON)
    assert corpus.files(tmp_path / "a", "other") == []


BROKEN = {
    "json": (lambda text: text[:-9], "is no entry of a corpus: it is not JSON"),
    "list": (lambda text: "[]", "it is no object"),
    "schema": (lambda text: text.replace('"schema": 1', '"schema": 2'), "has schema 2"),
    "word": (lambda text: text.replace("fp32-m2", "fp32-q2"), "'q2' is not a word of the id"),
    "type": (lambda text: text.replace('"seed": 9', '"seed": "9"'), "seed is '9', expected int"),
    "lacks": (lambda text: text.replace('"cause"', '"because"'), "cause is None, expected str"),
    "after": (lambda text: text.replace('"after": []', '"after": [3]'), "is no entry of a corpus"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_entry_is_one_sentence(tmp_path: Path, name):
    """Read alone, and in a run, which goes on to the next."""
    damage, phrase = BROKEN[name]
    path = kept(tmp_path / "corpus", seed=9)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ParityError) as error:
        corpus.load(path)
    assert phrase in str(error.value)
    assert str(error.value).startswith(str(path))
    said: list[str] = []
    telling = Telling(kernel=plainly("act_quant", right), folder=tmp_path, say=said.append)
    replay(telling, [path])
    assert len(said) == 1
    assert said[0].startswith("! ")
    assert not telling.replayed


def replay(telling: Telling, paths: list[Path]) -> Fuzzer:
    made = Fuzzer(
        kernel=telling.kernel, device="cpu", seed=1, limits=Limits(cases=3), send=telling.hear
    )
    made.replay(paths)
    return made


def test_an_entry_is_tried_first_and_told_once(tmp_path: Path):
    """What it fails for is not found once more; a mended kernel says so, and the file stays."""
    kernel = plainly("act_quant", two_faults)
    fuzzed(kernel, tmp_path, cases=12)
    paths = corpus.files(tmp_path / "corpus")
    said: list[str] = []
    telling = Telling(kernel=kernel, folder=tmp_path / "corpus", say=said.append)
    fuzzer = replay(telling, paths)
    assert telling.replayed.keys() == set(map(str, paths))
    assert telling.judged == 0
    assert all("still fails: " in text for text in said)
    fuzzer.run()
    assert telling.red
    assert len(said) == len(paths)
    said.clear()
    mended = Telling(
        kernel=plainly("act_quant", right), folder=tmp_path / "corpus", say=said.append
    )
    replay(mended, paths)
    assert not mended.replayed
    assert all("passes now; the file stays" in text for text in said)
    assert corpus.files(tmp_path / "corpus") == paths


def test_an_entry_repeats_the_calls_before_it(tmp_path: Path):
    seen: list[Case] = []

    def watched(call: Call) -> Any:
        seen.append(call.case)
        return right(call)

    before = (Case(m=3, seed=1), Case(m=4, seed=2))
    failure = Failure(case=Case(m=2), reason=REASON, sentence="It differs.", after=before)
    path = corpus.save(tmp_path, "faulty", failure)
    kernel = plainly("act_quant", watched)
    replay(Telling(kernel=kernel, folder=tmp_path, say=lambda text: None), [path])
    first = [case for case in dict.fromkeys(seen) if case.seed or case.m == 2]
    assert [case for case in first if case in (*before, Case(m=2))] == [*before, Case(m=2)]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path):
    """One note that nothing is kept, and all failures are told."""
    (tmp_path / "corpus").write_text("a file where the folder would be")
    telling, said = fuzzed(plainly("act_quant", two_faults), tmp_path, cases=12)
    assert len(telling.found) >= 2
    assert "\n".join(said).count("! nothing that was found is kept: cannot write") == 1


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Register kernels for a test, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)

    def add(name: str, run: Run, **options: Any) -> None:
        kernel = dataclasses.replace(plainly("act_quant", run), name=name, **options)
        monkeypatch.setitem(registry._KERNELS, name, kernel)

    monkeypatch.setattr(fuzz, "in_a_process", lambda *_: lambda case: None)
    registry.all_kernels()
    return add


def test_the_command_fails_and_keeps(registered, capsys, tmp_path: Path):
    """Its seed is printed where none is given, and the second run begins with what was kept."""
    registered("mine", two_faults)
    assert cli.main(["fuzz", "mine", "--cases", "3", "-n", "0"]) == cli.FAILED
    out = capsys.readouterr().out
    seed = out.splitlines()[0].partition("seed ")[2]
    assert f"drawn with seed {seed}" in out.splitlines()[-1]
    assert list((tmp_path / "parity-corpus").glob("mine-*.json"))
    again = ["fuzz", "mine", "--cases", "1", "-n", "0", "--seed", seed]
    assert cli.main(again) == cli.FAILED
    assert "of parity-corpus first" in capsys.readouterr().out.splitlines()[1]


def test_the_command_passes(registered, capsys, tmp_path: Path):
    registered("mine", right)
    assert cli.main(["fuzz", "mine", "--cases", "2", "-n", "0", "--seed", "5"]) == cli.OK
    assert capsys.readouterr().out.splitlines()[-1] == "✓ passed: 2 cases drawn with seed 5"
    assert not (tmp_path / "parity-corpus").exists()


def test_the_command_of_nothing_is_incomplete(registered, capsys):
    """No case that runs, and an interrupt before anything was found."""
    registered("mine", right, supports=lambda case, device: Skip(Why.UNSUPPORTED, "no"))  # fmt: skip  # noqa: E501
    assert cli.main(["fuzz", "mine", "--minutes", "0.001", "-n", "0"]) == cli.INCOMPLETE
    assert "! nothing ran" in capsys.readouterr().out

    def interrupted(call: Call) -> Any:
        raise KeyboardInterrupt

    registered("mine", interrupted)
    assert cli.main(["fuzz", "mine", "--cases", "2", "-n", "0"]) == cli.INCOMPLETE
    assert "! incomplete: interrupted after 0 cases" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_found(registered, capsys, tmp_path: Path):
    """As small as it is by then."""
    calls: list[Case] = []

    def run(call: Call) -> Any:
        calls.append(call.case)
        if len(calls) > 3:
            raise KeyboardInterrupt
        raise ValueError("no")

    registered("mine", run)
    assert cli.main(["fuzz", "mine", "--cases", "9", "-n", "0"]) == cli.FAILED
    assert "interrupted" in capsys.readouterr().out.splitlines()[-1]
    assert len(corpus.files(tmp_path / "parity-corpus")) == 1


def test_bad_input_is_one_sentence(registered, capsys, tmp_path: Path):
    (tmp_path / "two.py").write_text(
        "from moe_parity.kernels import register\n"
        "for name in ('fuzz_a', 'fuzz_b'):\n"
        "    @register(name, stage='act_quant', recipes='deepgemm')\n"
        "    def run(call): ...\n"
    )
    known = set(registry._KERNELS)
    assert "unknown kernel 'nosuch'" in refused(capsys, "fuzz", "nosuch")
    assert "say two.py:NAME" in refused(capsys, "fuzz", "two.py")
    assert "registers no kernel 'c'" in refused(capsys, "fuzz", "two.py:c")
    assert "nosuch.py does not exist" in refused(capsys, "fuzz", "nosuch.py:a")
    assert "is not a number of minutes" in refused(capsys, "fuzz", "x", "--minutes", "-1")
    assert fuzz.chosen("two.py:fuzz_b")[0].name == "fuzz_b"
    for name in set(registry._KERNELS) - known:
        del registry._KERNELS[name]


def test_a_worker_that_dies_is_a_finding(tmp_path: Path):
    """It has the case that it was at, is kept, and the run ends by itself."""
    file = tmp_path / "dies.py"
    file.write_text(
        "import os, signal\n"
        "from moe_parity.kernels import register\n"
        "@register('dies', stage='align', recipes='no_rounding')\n"
        "def dies(call):\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    kernel, path = fuzz.chosen(str(file))
    said: list[str] = []
    telling = Telling(kernel=kernel, folder=tmp_path / "corpus", say=said.append)
    try:
        Team(
            telling=telling, file=path, device="cpu", seed=1, workers=1, cases=1, seconds=None,
            timeout=60.0, folder=tmp_path,
        ).run([])  # fmt: skip
    finally:
        del registry._KERNELS["dies"]
    (failure,) = telling.found.values()
    assert failure.reason == Reason("exact", "align", "crash")
    assert "took its process down (dies.py, line 5): segmentation fault" in said[0]
    assert f"parity repro 'dies-{failure.case.id}' --seed {failure.case.seed}" in said[0]
    data = json.loads(corpus.files(tmp_path / "corpus")[0].read_text())
    assert (data["kernel"], data["cause"]) == ("dies", "crash")
