"""Outputs in a file: tensors of one's own and witnesses, what fits, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_parity.harness.cli import main
from moe_parity.harness.diagnosis.answer import identify
from moe_parity.harness.diagnosis.identify import Probe, Seen
from moe_parity.harness.evidence.dump import read_dump
from moe_parity.harness.evidence.witness import SHIPPED
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, ScaleFormat
from moe_parity.references.recipes.ours import NO_ROUNDING, OURS
from moe_parity.references.stages import STAGES
from moe_parity.suites.planted import CASES

SMALL = {name: dataclasses.replace(case, clamp=None) for name, case in CASES.items()}


def named(stage: str, case: Case) -> dict[str, Tensor]:
    """Return the inputs of a case as somebody would save them, by the names of the docs."""
    inputs = STAGES[stage].inputs(case)
    holders = [inputs.batch, inputs.experts] if stage == "layer" else [inputs]
    found = {n: t for h in holders for n, t in vars(h).items() if isinstance(t, Tensor)}
    left_out = {"expert", "counts", "expert_map"} - ({"expert"} if "swiglu" in stage else set())
    return {name: t.contiguous() for name, t in found.items() if name not in left_out}


def saved(stage: str, case: Case, path: Path, **changes: Tensor | None) -> Path:
    """Write a file with the inputs and the outputs of a stage as its recipe has them."""
    owner = STAGES[stage]
    inputs = owner.inputs(case)
    recipe = OURS if owner.acting else NO_ROUNDING
    made = owner.reference(case, inputs, recipe)
    if stage == "layer":
        made = {"out": made["out"]}
    own = {name: tensor.contiguous() for name, tensor in made.items()}
    # an input that is called like an output says that it is one
    given = {f"inputs.{n}" if n in own else n: t for n, t in named(stage, case).items()}
    tensors = given | own | {n: t for n, t in changes.items() if t is not None}
    for name in [n for n, t in changes.items() if t is None]:
        del tensors[name]
    save_file(tensors, path, metadata={"stage": stage})
    return path


@pytest.mark.parametrize("stage", STAGES)
def test_tensors_of_ones_own_are_judged(stage: str, tmp_path: Path):
    """The stage's own inputs and outputs, saved by their names, give its recipe."""
    dump = read_dump(saved(stage, SMALL[stage], tmp_path / "own.safetensors"))
    assert dump.stage is STAGES[stage]
    probe = Probe(stage=dump.stage, case=dump.case, inputs=dump.inputs)
    names = identify([Seen(probe, dump.outputs)]).names
    assert ("ours" if dump.stage.acting else "no_rounding") in names


def test_codes_may_come_in_torchs_type(tmp_path: Path):
    case = SMALL["act_quant"]
    plain = read_dump(saved("act_quant", case, tmp_path / "a.safetensors"))
    codes = plain.outputs["codes"].view(torch.float8_e4m3fn)
    typed = read_dump(saved("act_quant", case, tmp_path / "b.safetensors", codes=codes))
    assert torch.equal(typed.outputs["codes"], plain.outputs["codes"])


def test_the_words_of_the_case_come_with_the_command(tmp_path: Path):
    case = dataclasses.replace(SMALL["act_quant"], scale=ScaleFormat.UE8M0)
    path = saved("act_quant", case, tmp_path / "own.safetensors")
    dump = read_dump(path, case="ue8m0")
    assert dump.case.scale is ScaleFormat.UE8M0
    assert (dump.case.m, dump.case.h) == (24, 512)


REFUSED = [
    ("act_quant", {"x": None}, "act_quant needs the input x, and there is codes, scales."),
    ("act_quant", {"x": torch.zeros(24, 512, dtype=torch.float64)},
     "the input x is torch.float64 [24, 512], expected bfloat16 or float16 or float32 [any, any]"),
    ("act_quant", {"x": torch.zeros(24)}, "the input x is torch.float32 [24], expected"),
    ("act_quant", {"scales": torch.zeros(4, 24)},
     "holds scales as torch.float32 [4, 24], expected torch.float32 [24, 4]"),
    ("act_quant", {"codes": None, "scales": None}, "holds x, and no output of act_quant"),
    ("act_quant", {"scales": None}, "lacks scales"),
    ("fc1", {"a_scale": torch.ones(24, 3)},
     "the input a_scale is torch.float32 [24, 3], expected float32 [24, 4]"),
    ("fc1", {"w": torch.zeros(4, 256, 512)}, "the input w is torch.float32 [4, 256, 512]"),
    ("combine", {"weights": torch.ones(3, 8)}, "the input weights is torch.float32 [3, 8]"),
    ("layer", {"w13_scale": None}, "layer needs the input w13_scale"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "changes", "sentence"), REFUSED, ids=lambda v: str(v)[:20])
def test_what_does_not_fit_is_refused(stage, changes, sentence, tmp_path: Path, capsys):
    """In one sentence with what was got and expected, and status 2."""
    path = saved(stage, SMALL[stage], tmp_path / "own.safetensors", **changes)
    assert main(["identify", str(path)]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.startswith("parity: ")
    assert captured.err.count("\n") == 1


def test_files_that_are_none_are_refused(tmp_path: Path):
    (tmp_path / "text.safetensors").write_text("no")
    save_file({"x": torch.zeros(2, 128)}, tmp_path / "silent.safetensors")
    for name, words in (
        ("missing.safetensors", "does not exist"),
        ("text.safetensors", "is not a safetensors file"),
        ("silent.safetensors", "does not say its stage"),
    ):
        with pytest.raises(ParityError, match=words):
            read_dump(tmp_path / name)
    with pytest.raises(ParityError, match="nothing to identify"):
        read_dump(SHIPPED / "model-bf16.safetensors")


def test_a_mistake_in_a_file_is_named(tmp_path: Path, capsys):
    """None of the recipes, the nearest, and what the diagnosis says of the difference."""
    case = SMALL["combine"]
    inputs = STAGES["combine"].inputs(case)
    squared = dataclasses.replace(inputs, weights=inputs.weights * inputs.weights)
    out = STAGES["combine"].reference(case, squared, OURS)["out"]
    path = saved("combine", case, tmp_path / "own.safetensors", out=out)
    assert main(["identify", str(path)]) == 1
    said = capsys.readouterr().out
    assert "none: no recipe explains every bit" in said
    assert "the difference: The square of the routing weights" in said


def test_an_answer_is_status_0(tmp_path: Path, capsys):
    path = saved("combine", SMALL["combine"], tmp_path / "own.safetensors")
    assert main(["identify", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("combine of own.safetensors, ")
    assert "combine.order=ascending" in said


# --- kernels that take little -------------------------------------------------------------------

FILE = """
import torch
from moe_parity.kernels import register


@register("only64", stage="act_quant", recipes="vllm_cuda",
          supports=lambda case, device: None if (case.group, case.scale) == (64, "fp32") else "no.")
def only64(call):
    x = call.inputs.x.float().unflatten(1, (-1, 64))
    scales = x.abs().amax(2).clamp(1e-10) / torch.tensor(448.0)
    codes = (x / scales[..., None]).clamp(-448, 448).flatten(1)
    return {"codes": codes.to(torch.float8_e4m3fn), "scales": scales}
"""
PICKY = """
from moe_parity.kernels import register


@register("picky", stage="act_quant", recipes="vllm_cuda")
def picky(call):
    raise ValueError(f"never {call.case.dtype}")
"""


def test_a_kernel_is_asked_for_what_it_takes(tmp_path: Path, capsys):
    """Groups of 64 alone; no named recipe has its NaN, and the one with fewest changes is said."""
    (tmp_path / "mine.py").write_text(FILE)
    file = str(tmp_path / "mine.py")
    assert main(["identify", "only64", "--kernel", file, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("act_quant of only64, fp32 groups of 64 from f32, ")
    assert "no named recipe, but 2 explain every bit" in said
    assert "deepgemm with quant.floor=amax_1e-10 and quant.apply=divide" in said


def test_a_probe_that_fails_is_said_and_left_out(tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text(PICKY)
    file = str(tmp_path / "mine.py")
    assert main(["identify", "picky", "--kernel", file, "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7
    assert all("left out: ValueError: never" in line for line in lines[:-1])
    assert lines[-1].startswith("parity: picky ran on no probe: it fails on fp32-f32-aimed-pool2")
