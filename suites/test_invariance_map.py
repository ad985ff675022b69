"""The invariance map: planted changes are found at their exact M, with the decision; others not."""

from __future__ import annotations

import dataclasses
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_parity.harness.cli import commands
from moe_parity.harness.evidence.invariance_map import map_of
from moe_parity.harness.evidence.map_cases import case_of
from moe_parity.harness.evidence.map_classes import Recognised, decision_between
from moe_parity.harness.evidence.map_records import records
from moe_parity.harness.evidence.map_values import InvarianceMap
from moe_parity.kernels import Call, registry
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Check, Contract, Recipe, Skip, Values, Why
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.recipes.vllm import VLLM_TRITON, VLLM_TRITON_SWAP
from moe_parity.references.stages import STAGES
from moe_parity.references.stages.gemm.decisions import DotUnit, GemmRecipe
from moe_parity.reports import html, maps, markdown
from moe_parity.reports.records import Run, RunEnd, RunInfo
from moe_parity.reports.results import read, write
from moe_parity.suites.meta import measured
from moe_parity.suites.planted import following, kernel_of, right

FC1 = Case(m=48, e=2, k=1, h=256, i=128, values=Values.AIMED)
ON_MMA = OURS.with_parts(
    gemm=dataclasses.replace(OURS.of("gemm", GemmRecipe), unit=DotUnit.MMA_F16)
)
SCALES = "gemm.scale_order: product_first -> a_then_b"


def switching(at: int, small: Recipe, large: Recipe) -> Callable[[Call], dict[str, Tensor]]:
    """Return a kernel that follows another recipe from a number of tokens on."""
    one, two = following(small), following(large)
    return lambda call: (one if call.case.m < at else two)(call)


def spans(made: InvarianceMap, words: str = "first of M") -> list[tuple[int, int, str, str]]:
    line = next(line for line in made.lines if line.words == words)
    return [(s.first, s.last, s.recipe, s.decision) for s in line.spans]


# --- what is planted ----------------------------------------------------------------------------


@pytest.mark.parametrize("at", [2, 43, 48])
def test_a_change_is_found_at_its_exact_number_of_tokens(at: int):
    made = map_of(kernel_of("fc1", switching(at, OURS, VLLM_TRITON)), FC1, "cpu", beside=0)
    assert spans(made) == [(1, at - 1, "ours", ""), (at, 48, "vllm_triton", SCALES)]
    assert made.broken
    assert f"change at M = {at} ({SCALES})" in made.sentence


def test_the_unit_of_the_dot_is_named():
    made = map_of(kernel_of("fc1", switching(32, ON_MMA, OURS)), FC1, "cpu", beside=0)
    assert [(s[0], s[3]) for s in spans(made)][1] == (32, "gemm.unit: mma_f16 -> wgmma_fp8")


def test_a_change_that_the_kernel_states_is_no_fault_and_one_it_does_not_promise_neither():
    recipes = lambda case, device: (OURS if case.m < 17 else VLLM_TRITON,)  # noqa: E731
    stated = kernel_of("fc1", switching(17, OURS, VLLM_TRITON), recipes)
    made = map_of(stated, FC1, "cpu", beside=0)
    assert (made.changes, made.broken, spans(made)[1][0]) == (True, False, 17)
    free = dataclasses.replace(stated, recipes=lambda case, device: (OURS,))
    assert map_of(free, FC1, "cpu", beside=0).broken
    free = dataclasses.replace(free, contract=Contract().without(Check.INVARIANCE))
    assert not map_of(free, FC1, "cpu", beside=0).broken


def test_a_recipe_that_comes_back_between_two_probed_sizes_is_met():
    inside = lambda m: 36 <= m < 44  # noqa: E731
    recipes = lambda case, device: (VLLM_TRITON if inside(case.m) else OURS,)  # noqa: E731

    def run(call: Call) -> dict[str, Tensor]:
        return following(VLLM_TRITON if inside(call.case.m) else OURS)(call)

    made = map_of(kernel_of("fc1", run, recipes), FC1, "cpu", beside=0)
    assert [s[:2] for s in spans(made)] == [(1, 35), (36, 43), (44, 48)]


def changed(out: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    list(out.values())[-1].view(torch.uint8)[rows, 0] ^= 1
    return out


def test_positions_in_a_tile_are_listed():
    def run(call: Call) -> dict[str, Tensor]:
        rows = torch.arange(call.inputs.expert.numel())
        return changed(right(call), rows[rows % 16 == 15])

    made = map_of(kernel_of("fc1", run), FC1, "cpu", beside=0)
    assert spans(made) == [(1, 48, "ours", "")]
    assert [(p.m, p.positions) for p in made.places] == [
        (48, "0 to 46 (45 of them)"), (48, "15 to 47 in steps of 16"),
    ]  # fmt: skip
    assert made.broken
    assert "no decision" in made.places[1].decision


def test_a_change_with_the_rows_of_an_expert_is_that_of_its_neighbours():
    def run(call: Call) -> dict[str, Tensor]:
        expert = call.inputs.expert
        crowded = torch.bincount(expert)[expert] > 20
        return changed(right(call), crowded.nonzero()[:, 0])

    made = map_of(kernel_of("fc1", run), FC1, "cpu", beside=1e9)
    assert [s[:2] for s in spans(made, "beside tokens of the same experts alone")] == [
        (1, 20), (21, 48),
    ]  # fmt: skip
    assert len(spans(made, "beside tokens of other experts alone")) == 1
    # among drawn tokens it takes more of them until its expert has that many rows
    assert spans(made)[1][0] > 21
    assert made.broken


def test_an_expert_that_nobody_else_takes_is_told_from_one_that_others_take():
    def run(call: Call) -> dict[str, Tensor]:
        empty = int((torch.bincount(call.inputs.expert, minlength=2) == 0).sum())
        return following(VLLM_TRITON if empty else OURS)(call)

    made = map_of(kernel_of("fc1", run), FC1, "cpu")
    assert len(spans(made, "beside tokens of the same experts alone")) == 1
    assert [s[2] for s in spans(made, "beside tokens of other experts alone")] == [
        "vllm_triton", "ours",
    ]  # fmt: skip


def test_rows_of_no_number_beside_a_token_are_named():
    def run(call: Call) -> dict[str, Tensor]:
        out = right(call)
        out["rows"] += 0 * out["rows"].float().sum().to(out["rows"].dtype)
        return out

    made = map_of(kernel_of("fc1", run), FC1, "cpu", beside=200)
    assert [x.words for x in made.said][1:] == [
        "beside rows of NaN", "beside rows of infinities", "beside rows of the largest numbers",
    ]  # fmt: skip
    assert "beside rows of NaN at M = 2" in made.sentence


# --- what is clean ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "case"),
    [
        ("act_quant", Case(m=40, h=256, values=Values.AIMED)),
        ("swiglu_quant", Case(m=20, e=3, i=256, values=Values.AIMED)),
        ("combine", Case(m=40, e=6, k=3, h=256, values=Values.AIMED)),
        ("permute", Case(m=40, e=5, k=3, h=256)),
        ("weight_quant", Case(i=384, h=256, values=Values.AIMED)),
        ("layer", Case(m=2, e=4, k=2, h=256, i=256, values=Values.AIMED)),
    ],
)
def test_a_clean_kernel_of_any_stage_has_one_span(stage: str, case: Case):
    made = map_of(kernel_of(stage, right), case, "cpu", beside=100)
    assert (made.changes, made.broken) == (False, False)
    assert "the same for M = 1 to" in made.sentence
    assert 0 < made.could_show <= made.compared
    if stage != "weight_quant":
        assert made.lines[0].called[-1] == case.m


def test_what_could_have_shown_is_what_differs_under_some_mutant():
    """Counted by hand for the token, on the rows of the whole case's references."""
    made = map_of(kernel_of("fc1", right), FC1, "cpu")
    inputs, stage = made.kernel.stage.inputs(FC1), made.kernel.stage
    want = stage.reference(FC1, inputs, OURS)["rows"].view(torch.int16)
    row = made.lines[0].unit
    shown = torch.zeros(want.shape[1], dtype=torch.bool)
    for _, mutant in stage.neighbours(OURS):
        shown |= stage.reference(FC1, inputs, mutant)["rows"].view(torch.int16)[row] != want[row]
    own = [line for line in made.lines if line.unit == row]
    others = sum(len(line.called) for line in made.lines if line.unit != row)
    times = sum(len(line.called) for line in own) + 48
    assert made.compared == (times + others) * 256
    assert made.could_show >= times * int(shown.sum())


def test_of_all_recipes_of_both_sides_the_smallest_change_is_named():
    before, after = Recognised((OURS,), ("ours",)), Recognised((VLLM_TRITON, ON_MMA), ("a", "b"))
    both = {recipe: Recognised((recipe,), ("",)) for recipe in (VLLM_TRITON_SWAP, VLLM_TRITON)}
    mma = VLLM_TRITON.with_parts(
        gemm=dataclasses.replace(VLLM_TRITON.of("gemm", GemmRecipe), unit=DotUnit.MMA_F16)
    )
    several = Recognised((mma, ON_MMA), ("a", "b"))
    said = decision_between(STAGES["fc1"], before, several)
    assert said == "gemm.unit: wgmma_fp8 -> mma_f16"
    assert decision_between(STAGES["fc1"], *both.values()) == (
        "gemm.scale_order: b_then_a -> a_then_b"
    )
    assert decision_between(STAGES["fc1"], before, after).count("->") == 1


def test_sizes_that_a_kernel_does_not_take_are_said():
    kernel = kernel_of("act_quant", right)
    whole = lambda case, device: Skip(Why.UNSUPPORTED, "no.") if case.m % 16 else None  # noqa: E731
    kernel = dataclasses.replace(kernel, supports=whole)
    case = case_of(kernel, "cpu", None, 40, 0)
    assert case.m == 128
    made = map_of(kernel, dataclasses.replace(case, m=32, h=256), "cpu", beside=0)
    assert made.lines[0].called == (16, 32)
    assert "the same for M = 16 to 32" in made.sentence
    assert made.refused == (1, 2, 3, 4, 5, 8, 9, 17)
    assert "; not taken: M = 1 to 17 (8 of them)" in made.sentence


def test_a_stage_without_units_is_refused_in_a_sentence():
    with pytest.raises(ParityError, match="align of faulty has no rows that can be called alone"):
        map_of(kernel_of("align", right), Case(m=20, e=5, k=3), "cpu")


# --- records, reports, the command --------------------------------------------------------------


def run_of(*made: InvarianceMap) -> Run:
    found = [r for one in made for r in records(one, "cpu", "parity map")]
    return Run(RunInfo(started="now"), tuple(found), RunEnd(collected=1, ran=1, exitstatus=0))


def test_the_report_shows_the_table_and_a_picture():
    made = map_of(kernel_of("fc1", switching(17, OURS, VLLM_TRITON)), FC1, "cpu")
    run = run_of(made)
    assert [r.verdict for r in run.records] == ["fail", "pass"]
    assert run.records[0].cause == "depends_on_other_rows"
    assert [row[4:9] for row in maps.rows(run)] == [
        ("1", "16", "A", "ours", ""), ("17", "48", "B", "vllm_triton", SCALES),
    ]  # fmt: skip
    (picture,) = maps.pictures(run)
    (lane,) = picture.lanes
    assert [(box.letter, box.inside) for box in lane.boxes] == [("A", "ours"), ("B", "vllm_triton")]
    assert lane.edges == ((lane.boxes[1].x, "17"),)
    assert lane.boxes[0].x + lane.boxes[0].width == pytest.approx(lane.boxes[1].x, abs=0.11)
    page = html.render(run)
    assert 'id="maps"' in page
    assert "<svg viewBox" in page
    assert "| 17 | 48 | B |" in markdown.render(run)
    assert 'id="maps"' not in html.render(Run(run.info, (), run.end))


FILE = """
from moe_parity.kernels import register
from moe_parity.references.recipes.vllm import VLLM_TRITON, VLLM_TRITON_SWAP
from moe_parity.suites.planted import following

def stated(case, device):
    return (VLLM_TRITON_SWAP if case.m < 9 else VLLM_TRITON,)

@register("stating", stage="fc1", recipes=stated)
def stating(call):
    return following(stated(call.case, "cpu")[0])(call)

@register("breaking", stage="fc1", recipes="vllm_triton")
def breaking(call):
    return following(stated(call.case, "cpu")[0])(call)

@register("raising", stage="fc1", recipes="vllm_triton")
def raising(call):
    if call.case.m > 4:
        raise RuntimeError("no more than four")
    return following(VLLM_TRITON)(call)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the folder of a file whose kernels are registered while this module runs."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "mine.py").write_text(FILE)
    yield folder
    for name in ("stating", "breaking", "raising"):
        registry._KERNELS.pop(name, None)


@pytest.mark.parametrize(("name", "status"), [("stating", 0), ("breaking", 1), ("raising", 1)])
def test_the_command_prints_the_table_and_writes_everything(
    name: str, status: int, kernels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = kernels / "mine.py"
    words = ["map", name, "--kernel", str(file), "-m", "12", "--device", "cpu"]
    assert commands.main([*words, "-o", str(tmp_path / "out")]) == status
    said = capsys.readouterr().out
    found = read(tmp_path / "out/results.jsonl")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "results.jsonl", "report.html", "summary.md",
    }  # fmt: skip
    assert [r.verdict for r in found.tests] == ["fail" if status else "pass"]
    if name == "raising":
        assert "no more than four" in found.tests[0].message
    else:
        assert "gemm.scale_order: b_then_a -> a_then_b" in said
        bands = [(r.band["first"], r.band["last"]) for r in maps.bands(found)]
        assert bands == [("1", "8"), ("9", "12")]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no kernel to map: name one"),
        (["ours_act_quant", "--case", "m4"], "names no kernel and scale format"),
        (["ours_act_quant", "--case", "fp32-e4"], "does not read the word e"),
        (["ours_fc1_decode", "--config", "huge"], "no configuration 'huge'; it has block16"),
        (["--stage", "fc3"], "fc3"),
        (["ours_act_quant", "-m", "0"], "'0' is not a number of tokens"),
    ],
)
def test_what_cannot_be_mapped_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    try:
        status = commands.main(["map", *words, "--device", "cpu", "-o", str(tmp_path / "out")])
    except SystemExit as left:
        status = int(left.code or 0)
    said = capsys.readouterr().err
    assert status == commands.BAD_INPUT
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_the_table_of_a_run_has_its_bands(tmp_path: Path):
    made = map_of(kernel_of("fc1", switching(17, OURS, VLLM_TRITON)), FC1, "cpu", beside=0)
    write(run_of(made), tmp_path / "results.jsonl")
    packed = tmp_path / "results.jsonl.xz"
    packed.write_bytes(lzma.compress((tmp_path / "results.jsonl").read_bytes()))
    lines = measured.invariance_measurements(packed).splitlines()
    assert len(lines) == 4
    assert f"| 17 | 48 | B | vllm_triton | {SCALES} |" in lines[3]
