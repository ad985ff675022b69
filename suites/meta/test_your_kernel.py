"""docs/your-kernel.md as a stranger reads it: its blocks run, `new-kernel` writes what it shows."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_parity.harness.checks.flow import check
from moe_parity.harness.cli import commands, new_kernel
from moe_parity.harness.cli.commands import main
from moe_parity.kernels import all_kernels, beside, load_file, registry
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Recipe, Values
from moe_parity.references.recipes import ALL, recipe_named
from moe_parity.references.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/your-kernel.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SMALL = {
    "weight_quant": Case(i=130, h=140, values=Values.AIMED),
    "act_quant": Case(m=9, h=256, values=Values.AIMED),
    "align": Case(m=9, e=5, k=3),
    "permute": Case(m=5, e=5, k=3, h=128),
    "fc1": Case(m=5, e=4, k=2, h=200, i=72, values=Values.AIMED),
    "fc2": Case(m=5, e=4, k=2, h=72, i=200, values=Values.AIMED),
    "swiglu": Case(m=7, i=200, clamp=7.0, values=Values.AIMED),
    "swiglu_quant": Case(m=17, i=256, values=Values.AIMED),
    "combine": Case(m=24, e=8, k=8, h=256, values=Values.AIMED),
    "layer": Case(m=4, e=4, k=2, h=256, i=128, values=Values.AIMED),
    "quant_gemm": Case(m=5, h=256, i=72, values=Values.AIMED),
}
RED = {"my_op": "combine.step=mul_add"}
"""Kernels of the page that show a red check, and its cause."""
RUN = ("new-kernel my_combine", "repro 'my_fc1-fp32", "identify", "fuzz my_combine.py")
"""How the commands begin that are cheap enough to be run here; the others are parsed."""


def blocks(language: str) -> list[str]:
    """Return the page's blocks of a language."""
    return [text for word, text in FENCE.findall(PAGE.read_text()) if word == language]


def named(text: str) -> str:
    return re.search(r'@register\(\s*"(\w+)"', text)[1]


@pytest.fixture(autouse=True)
def _kernels_go_with_their_test() -> Iterator[None]:
    all_kernels()
    before = dict(registry._KERNELS)
    for name, kernel in before.items():
        if not registry.builtin(kernel):  # of an example that another test has loaded
            del registry._KERNELS[name]
    yield
    registry._KERNELS.clear()
    registry._KERNELS.update(before)


KERNELS = [text for text in blocks("python") if "@register(" in text]


@pytest.mark.parametrize("text", KERNELS, ids=named)
def test_a_kernel_of_the_page_does_what_the_page_says(text: str, tmp_path: Path):
    if "import triton" in text:
        pytest.importorskip("triton", reason="needs Triton")
    file = tmp_path / "mine.py"
    file.write_text(text)
    (kernel,) = load_file(file)
    verdicts = {v.check: v for v in check(kernel, SMALL[kernel.stage.name], "cpu")}
    red = [v for v in verdicts.values() if v.failed]
    if kernel.name in RED:
        assert {v.cause for v in red} == {RED[kernel.name]}
        shown = " ".join(PAGE.read_text().split())
        assert verdicts["exact"].message in shown, verdicts["exact"].message
    else:
        assert not red, [v.message for v in red]
        passed = [v for v in verdicts.values() if v.verdict == "pass"]
        assert len(passed) >= 3
        assert max(v.compared for v in passed) > 0


def test_the_other_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    others = [text for text in blocks("python") if "@register(" not in text]
    assert len(others) >= 2
    for text in others:
        exec(compile(text, PAGE.name, "exec"), {"__name__": "block"})


def test_the_cheap_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for text in KERNELS:
        if named(text) == "my_fc1":
            Path("my_fc1.py").write_text(text)
    (captured,) = (text for text in blocks("python") if "with capture(" in text)
    exec(compile(captured, PAGE.name, "exec"), {"__name__": "block"})
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    ran = [line for line in lines if line.startswith(tuple(f"parity {start}" for start in RUN))]
    for line in ran:
        assert main(shlex.split(line)[1:]) == 0, line
    assert len(ran) >= 4


# --- parity new-kernel ---------------------------------------------------------------------------


def test_the_page_has_a_kernel_of_every_stage_in_every_form():
    shown = {named(text) for text in KERNELS}
    forms = {"": STAGES, "_triton": STAGES.keys() - new_kernel.NO_TRITON.keys()}
    assert shown >= {f"my_{stage}{suffix}" for suffix, own in forms.items() for stage in own}


@pytest.mark.parametrize("form", new_kernel.FORMS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_new_file_is_short_marked_and_says_what_it_gets(stage: str, form: str):
    if form == "triton" and stage in new_kernel.NO_TRITON:
        with pytest.raises(ParityError, match=f"^{stage} has no triton form: .*[.]$"):
            new_kernel.starter("mine", stage, form)
        return
    text = new_kernel.starter("mine", stage, form)
    head, _, code = text.partition("@register(")
    assert len(code.strip().splitlines()) <= 15
    assert f"# {new_kernel.MARK}: " in text
    assert max(map(len, new_kernel.starter("a_longer_kernel", stage, form).splitlines())) <= 100
    inputs = STAGES[stage].inputs(SMALL[stage])
    fields = re.findall(r"^    ([\w.]+)  (?:\w+) \[|^    ([\w.]+) = ", head, re.MULTILINE)
    assert {a or b for a, b in fields} >= set(vars(inputs)) - {"batch", "experts", "asked"}


def test_every_starter_is_one_of_a_stage():
    folder = ROOT / "harness/cli/starters"
    for file in folder.iterdir():
        stage, form, _ = file.name.split(".")
        assert stage in STAGES
        assert form in new_kernel.FORMS


@pytest.mark.parametrize("stage", ["fc1", "swiglu_quant", "combine", "layer"])
def test_an_example_is_what_new_kernel_writes(stage: str):
    written = (ROOT / f"examples/torch_{stage}.py").read_text()
    assert written == new_kernel.starter(f"torch_{stage}", stage)


def test_a_file_that_exists_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "own.py"
    file.write_text("mine")
    assert main(["new-kernel", "own", "--stage", "combine", "-o", str(file)]) == commands.BAD_INPUT
    assert file.read_text() == "mine"
    assert "exists and is not overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["Mine", "--stage", "fc1"], "use lower-case letters, digits and _, a letter first."),
        (["1st", "--stage", "fc1"], "use lower-case letters, digits and _, a letter first."),
        (["class", "--stage", "fc1"], "means something else in the file"),
        (["torch", "--stage", "fc1"], "means something else in the file"),
        (["ours_combine", "--stage", "combine"], "there is a kernel 'ours_combine' already"),
        (["mine", "--stage", "fc3"], f"unknown stage 'fc3'; stages: {', '.join(STAGES)}."),
        (["mine", "--stage", "fc1", "--form", "cuda"], "forms: torch, triton."),
        (["mine", "--stage", "fc1", "-o", "mine.txt"], "a kernel file ends in .py"),
        (["mine", "--stage", "fc1", "-o", "no/mine.py"], "cannot write no/mine.py"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    arguments, sentence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["new-kernel", *arguments]) == commands.BAD_INPUT
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


# --- a recipe of one's own -----------------------------------------------------------------------


def test_a_recipe_is_changed_by_words():
    ours = recipe_named("ours")
    mine = ours.changed("mine", {"quant.apply": "divide", "combine.step": "mul_add"})
    differ = list(ours.changes(mine, dict.fromkeys(ours.parts)))
    assert [(name, str(after)) for name, _, after in differ] == [
        ("quant.apply", "divide"), ("quant.apply", "divide"), ("quant.apply", "divide"),
        ("combine.step", "mul_add"),
    ]  # fmt: skip
    assert mine.name == "mine"
    assert mine.source == "ours with quant.apply=divide, combine.step=mul_add"
    one = ours.changed("one", {"act_quant: quant.apply": "divide"})
    assert one.parts["act_quant"] == mine.parts["act_quant"]
    assert one.parts["swiglu_quant"] == ours.parts["swiglu_quant"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"quant.aply": "divide"},
            "recipe deepgemm makes no decision 'quant.aply'; it makes quant.",
        ),
        ({"gemm.unit": "exact"}, "recipe deepgemm makes no decision 'gemm.unit'"),
        ({"swiglu_quant: quant.apply": "divide"}, "no decision 'swiglu_quant: quant.apply'"),
        ({"quant.apply": "guess"}, "quant.apply cannot be 'guess'; its options are: "),
    ],
)
def test_a_change_that_is_none_is_refused(options, sentence):
    with pytest.raises(ParityError, match=re.escape(sentence)):
        recipe_named("deepgemm").changed("mine", options)


def test_a_recipe_with_nothing_changed_has_the_same_parts():
    for recipe in ALL.values():
        again = recipe.changed("again", {})
        assert again.parts == dict(recipe.parts)
        assert isinstance(again, Recipe)
        assert dataclasses.replace(again, name=recipe.name, source=recipe.source) == recipe


# --- what lies beside a file ---------------------------------------------------------------------

BESIDE = """from helper import NAME
from moe_parity.kernels import register

@register(NAME, stage="combine", recipes="ours")
def kernel(call):
    from other import later
    return call.stage.reference(call.case, call.inputs, later)
"""


def test_a_file_imports_what_lies_beside_it_and_not_what_lies_beside_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(beside, "_FOLDERS", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "k.py").write_text(BESIDE)
        (tmp_path / folder / "helper.py").write_text(f"NAME = 'of_{folder}'\n")
    later = "from moe_parity.references.recipes.ours import OURS as later\n"
    (tmp_path / "one" / "other.py").write_text(later)
    (kernel,) = load_file(tmp_path / "one" / "k.py")
    assert kernel.name == "of_one"
    verdicts = check(kernel, SMALL["combine"], "cpu")
    assert {v.check for v in verdicts if v.verdict == "pass"} >= {"exact", "row_subset"}
    with pytest.raises(ParityError, match=r"two/k.py has helper.py beside it, and .*one/helper"):
        load_file(tmp_path / "two" / "k.py")
    for name in ("helper", "other"):
        sys.modules.pop(name)
