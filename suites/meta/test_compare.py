"""`parity compare` of two kernels: each in its own process, bits against bits, and why they differ.

One command compares a file of many kernels with a candidate in which each has one change; what is
found is looked at kernel by kernel.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_parity.harness import capture
from moe_parity.harness.cli import commands as cli
from moe_parity.harness.evidence import compare_process
from moe_parity.harness.evidence.compare_bits import Explainer, Pair
from moe_parity.harness.evidence.compare_given import read
from moe_parity.harness.evidence.compare_process import served
from moe_parity.harness.evidence.compare_side import Request, chosen, serve
from moe_parity.kernels import find
from moe_parity.references.language import Case, Recipe, Values
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import STAGES
from moe_parity.suites.meta.compared_kernels import written
from moe_parity.suites.planted import CASES

CASE = "fp32-wide-m33-h256"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Compare the two files once, and return what was written as JSON."""
    folder = tmp_path_factory.mktemp("compare")
    base, candidate = written(folder)
    files = ["--json", str(folder / "c.json"), "--markdown", str(folder / "c.md")]
    sides = ["--kernel", str(base), "--against", str(candidate), "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        status = cli.main(["compare", *sides, "--case", CASE, "--case", "ue8m0-m2-h128", *files])
    told = json.loads((folder / "c.json").read_text())
    assert sorted(p.name for p in folder.iterdir()) == ["base", "c.json", "c.md", "candidate"]
    assert not list(folder.glob("*/__pycache__")), "a file that changes soon again would be stale"
    return dict(told) | {"exit": status, "markdown": (folder / "c.md").read_text()}


def item(found: dict, kernel: str) -> dict:
    own = [one for one in found["items"] if one["kernel"] == kernel]
    assert len(own) == 1
    return dict(own[0])


def test_one_rounding_is_named_and_the_status_says_that_something_changed(found):
    one = item(found, "rounding")
    assert (found["exit"], found["status"]) == (1, "changed")
    assert (one["state"], one["cause_kind"]) == ("changed bits", "decision")
    assert one["cause"] == "quant.apply=divide"
    assert one["case"] == f"{CASE}@0"
    assert "quant.apply=divide instead of mul_recip in act_quant of rounding" in one["sentence"]
    assert "all 66 scales equal" in one["sentence"]
    assert 0 < one["differing"] < one["compared"] == 33 * 256 + 33 * 2


def test_a_remark_changes_nothing(found):
    one = item(found, "remark")
    assert (one["state"], one["compared"], one["differing"]) == ("same bits", 33 * 258, 0)


def test_a_block_that_is_left_out_is_named(found):
    one = item(found, "block")
    assert (one["state"], one["cause"]) == ("new failure", "unwritten")
    assert "column 128 of codes unwritten" in one["sentence"]


def test_a_new_nan_is_named_with_its_place(found):
    one = item(found, "new_nan")
    assert (one["state"], one["cause"], one["differing"]) == ("changed bits", "nan", 1)
    assert "at token 1, scale 1 got 0x7fc00000 (nan)" in one["sentence"]


def test_another_type_of_an_output_is_a_failure_with_both_types(found):
    one = item(found, "other_type")
    assert (one["state"], one["cause"]) == ("new failure", "bad_output")
    assert "scales as torch.float64 [33, 2], expected torch.float32 [33, 2]" in one["sentence"]


def test_each_side_has_the_module_beside_its_own_file(found):
    one = item(found, "sibling")
    assert (one["state"], one["differing"]) == ("changed bits", 66)
    assert "scales" in one["sentence"]


def test_what_the_base_failed_at_is_fixed(found):
    one = item(found, "mended")
    assert one["state"] == "fixed"
    assert "the base failed: act_quant of mended fails" in one["sentence"]
    assert "ValueError: not yet" in one["sentence"]


def test_what_cannot_run_on_one_side_says_why(found):
    one = item(found, "away")
    assert one["state"] == "not comparable"
    assert one["reason"] == "the candidate cannot run here: No such chip"


def test_a_side_that_dies_says_at_which_case_and_keeps_what_it_had(found):
    assert item(found, "zz_dies")["reason"] == "the candidate did not come to it"
    how = f"the candidate: it was killed by SIGKILL at zz_dies-{CASE}@0"
    assert found["unfinished"] == how
    assert found["sentence"].endswith(f"; {how}")


def test_the_comment_has_a_table_for_a_stage_and_no_raw_markup(found):
    text = found["markdown"]
    assert text.startswith("### ✗ something changed: ")
    assert "| kernel | same bits | changed bits | new failure | fixed | not comparable |" in text
    assert "| rounding | 0 | 1 | 0 | 0 | 0 |" in text
    assert "- **changed bits** `quant.apply=divide`: quant.apply=divide instead of" in text
    assert "\\[33, 2\\]" in text
    assert len(text.encode()) <= 60 << 10


# --- a side that never comes back ----------------------------------------------------------------

SLEEPS = """
import json, subprocess, sys, time
request = json.load(open(sys.argv[1]))
file = open(request["told"], "a")
def tell(**what):
    print(json.dumps(what), file=file, flush=True)
tell(kind="kernel", kernel="k", stage="align", unavailable="", versions={})
tell(kind="case", kernel="k", case="a@0", declined="no")
tell(kind="begin", kernel="k", case="b@0")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(request["folder"] + "/child", "w").write(str(child.pid))
time.sleep(600)
"""


def test_a_side_that_hangs_is_killed_with_its_children(tmp_path, monkeypatch):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    monkeypatch.setattr(compare_process, "ENTRY", "sleeps")
    variables = {"PYTHONPATH": str(tmp_path)}
    side = served("candidate", {}, tmp_path, seconds=5.0, variables=variables)
    assert side.lost == "it ran longer than the limit of 5 s at k-b@0"
    assert list(side.cases) == [("k", "a@0")]
    child = int((tmp_path / "candidate/child").read_text())
    deadline = time.monotonic() + 10
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)  # a signal is on its way
    assert not runs(child)


def runs(child: int) -> bool:
    try:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="signals are named as on Linux")
def test_how_a_side_ended_is_said_with_its_last_words(tmp_path, monkeypatch):
    code = "import os, sys\nprint('out of memory', file=sys.stderr, flush=True)\nos._exit(9)\n"
    (tmp_path / "ends.py").write_text(code)
    monkeypatch.setattr(compare_process, "ENTRY", "ends")
    side = served("base", {}, tmp_path, seconds=60.0, variables={"PYTHONPATH": str(tmp_path)})
    assert side.lost == "it exited with 9 while it was loaded: out of memory"


# --- explanations --------------------------------------------------------------------------------


def pair(stage: str, case: Case, base: Recipe, candidate: Recipe) -> Pair:
    own = STAGES[stage]
    inputs = own.inputs(case)
    made = [own.reference(case, inputs, recipe) for recipe in (base, candidate)]
    return Pair(
        who="mine", stage=own, case=case, inputs=inputs, base=made[0], candidate=made[1],
        settled=True,
    )  # fmt: skip


@pytest.mark.parametrize("stage", ["swiglu_quant", "layer"])
def test_the_decision_that_changed_is_among_the_causes(stage):
    """Of a layer it is looked for in the stages inside."""
    case = CASES[stage]
    every = ((name, pair(stage, case, OURS, r)) for name, r in STAGES[stage].neighbours(OURS))
    label, one = next((n, p) for n, p in every if any(d.wrong for d in p.differences()))
    verdict = Explainer().explain(one)
    names = [name.rpartition(": ")[2] for name in verdict.causes]
    assert label.rpartition(": ")[2] in names
    assert (verdict.stage in STAGES) == (stage == "layer"), "the stage inside where it starts"


def test_a_base_of_no_known_recipe_says_where_bits_first_differ():
    case = Case(m=3, h=256, values=Values.AIMED)
    one = pair("act_quant", case, OURS, OURS)
    base = {"codes": one.base["codes"], "scales": one.base["scales"] * 1.7}
    candidate = {name: tensor.clone() for name, tensor in base.items()}
    candidate["scales"][1, 1] *= 2
    odd = Pair(
        who="mine", stage=one.stage, case=case, inputs=one.inputs, base=base, candidate=candidate
    )
    message = Explainer().explain(odd).message
    assert "whose base follows no known recipe: at token 1, scale 1 of scales the base" in message
    assert "1 of 6 scales" in message


# --- a side, in this process ---------------------------------------------------------------------


def test_cases_are_the_same_at_every_call_and_another_seed_draws_others():
    kernel = find("ours_swiglu_quant")
    cases = chosen(kernel, "cpu")
    assert cases == chosen(kernel, "cpu")
    assert len({(case.id, case.seed) for case in cases}) == len(cases) > 20
    assert {case.scale for case in cases} == set(type(cases[0].scale))
    assert {case.seed for case in chosen(kernel, "cpu", 5)} >= {5}


def test_kernels_of_ours_give_the_same_bits_twice(tmp_path):
    """What is no function of its inputs would be accused by every comparison."""
    given = [("", "fp32-m3-e4-k2-h128@1", ""), ("", "fp32-m3-h128@0", "")]
    names = ("ours_combine", "ours_act_quant")
    request = Request(
        targets=names, device="cpu", cases=tuple(given), told="", folder=str(tmp_path)
    )
    told = [line for line in serve(request) if line["kind"] == "case"]
    assert len(told) == 4
    ran = [line for line in told if "file" in line]
    assert {line["kernel"] for line in ran} == set(names)
    assert all("file" in line or "declined" in line for line in told)
    assert all(os.path.getsize(line["file"]) for line in ran)


def test_both_sides_are_called_with_what_was_captured(tmp_path):
    """The base takes its inputs from the capture, the candidate those of the base."""
    dump, x = tmp_path / "dump.safetensors", torch.arange(3 * 256).view(3, 256).bfloat16()
    capture.write(dump, stage="act_quant", x=x)
    asked = {"targets": ("ours_act_quant", "ours_combine"), "device": "cpu", "told": ""}
    base = serve(Request(**asked, folder=str(tmp_path), case_from=str(dump)))
    one, other = (line for line in base if line["kind"] == "case")
    assert "ours_combine is a kernel of combine" in other["declined"]
    told = (("", one["case"], one["given"]),)
    (tmp_path / "candidate").mkdir()
    dump.unlink()
    candidate = serve(Request(**asked, folder=str(tmp_path / "candidate"), cases=told))
    two, *_ = (line for line in candidate if line["kind"] == "case")
    codes = [load_file(side["file"])["codes"] for side in (one, two)]
    assert torch.equal(codes[0], codes[1])
    want = STAGES["act_quant"].reference(*read(Path(one["given"]), STAGES["act_quant"]), OURS)
    assert torch.equal(codes[0], want["codes"])
    assert torch.equal(read(Path(one["given"]), STAGES["act_quant"])[1].x, x)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--case", CASE], "--case-from and --case both say the inputs"),
        ([], "nope.safetensors does not exist"),
    ],
)
def test_captured_tensors_that_say_nothing_are_one_sentence(more, said, capsys):
    sides = ["--kernel", "ours_act_quant", "--against", "ours_act_quant"]
    assert cli.main(["compare", *sides, "--case-from", "nope.safetensors", *more]) == 2
    assert said in capsys.readouterr().err
