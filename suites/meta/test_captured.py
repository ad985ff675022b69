"""Captured tensors as inputs: what is refused, whom they feed, what is made small."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_parity.harness import capture
from moe_parity.harness.captured import hook
from moe_parity.harness.captured.expect import expect_captured
from moe_parity.harness.captured.feed import INSIDE, case_from
from moe_parity.harness.captured.file import read
from moe_parity.harness.captured.shrink import kept_small, left_with, made_small
from moe_parity.harness.checks.flow import bits
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.cli import main
from moe_parity.harness.diagnosis.cause import CauseKind
from moe_parity.kernels import Call
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, ScaleFormat
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import STAGES
from moe_parity.references.stages.layer import reference as layers
from moe_parity.reports.results import read as read_results
from moe_parity.suites.meta.capturing import CASE, TENSORS, tensors_of
from moe_parity.suites.meta.outside import clean
from moe_parity.suites.planted import following, kernel_of, right

# --- what is refused ----------------------------------------------------------------------------


def dumped(path: Path, metadata: dict[str, str], **changes: Tensor | None) -> Path:
    """Write a file by hand: the layer's tensors with changes, None to leave one out."""
    held = (TENSORS | changes).items()
    made = {name: tensor.contiguous().clone() for name, tensor in held if tensor is not None}
    save_file(made, path, metadata={"stage": "layer", **metadata})
    return path


def _with(name: str, value: float, places: tuple[int, ...]) -> dict[str, Tensor]:
    tensor = TENSORS[name].clone()
    tensor[places] = value
    return {name: tensor}


HIT = int(TENSORS["ids"][0, 0])
UE8M0 = {
    name: torch.full_like(TENSORS[name], 0.25) for name in ("w13_scale", "w2_scale")
}  # fmt: skip
BAD: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"capture": "2"}, {}, "has capture schema '2', this version reads up to 1"),
    ({"capture": "one"}, {}, "has capture schema 'one'"),
    ({"stage": "fc3"}, {}, "its metadata say stage 'fc3', expected one of layer"),
    ({"case": "fp31"}, {}, "names no kernel and scale format"),
    ({"case": "fp32-g64"}, {}, "layer does not read the word group"),
    ({"origin": "[3]"}, {}, "origin is no JSON object"),
    ({}, {"w2_scale": None}, "layer needs the input w2_scale, and there is ids, w13,"),
    ({}, {"x": TENSORS["x"].double()}, "the input x is torch.float64 [12, 256]"),
    ({}, {"x": TENSORS["x"][:, :128]}, "layer: w2 is [8, 256, 256], expected [E, H, I]"),
    ({}, {"w13": TENSORS["w13"][:, :256]}, "layer: w13 is [8, 256, 256], expected [E, 2 * I, H]"),
    ({}, {"w13_scale": TENSORS["w13_scale"][:, :3]}, "expected [E, ceil(2 * I / 128), ceil(H"),
    ({}, {"weights": TENSORS["weights"][:9]}, "layer: weights is [9, 2], expected [M, k]"),
    ({}, _with("ids", 8, (4, 1)), "ids hold 8 at row 4, choice 1, and there are 8 experts"),
    ({}, _with("ids", -2, (0, 0)), "ids hold -2 at row 0, choice 0"),
    ({}, _with("w13_scale", float("nan"), (HIT, 1, 1)), "w13_scale holds nan at "),
    ({}, _with("w2_scale", float("inf"), (HIT, 0, 1)), "w2_scale holds inf at "),
    ({"case": "ue8m0"}, {}, "and the case says ue8m0: powers of two"),
    ({"case": "fp32-midue8m0"}, {"w13_scale": UE8M0["w13_scale"]}, "w2_scale holds "),
    ({}, {"out": torch.zeros(12, 128, dtype=torch.bfloat16)}, "layer: out is [12, 128]"),
    ({}, {"out": torch.zeros(12, 256)}, "holds out as torch.float32 [12, 256]"),
]


@pytest.mark.parametrize(("metadata", "changes", "sentence"), BAD, ids=lambda v: str(v)[:24])
def test_a_bad_file_is_one_sentence_and_status_2(metadata, changes, sentence, tmp_path, capsys):
    path = dumped(tmp_path / "bad.safetensors", metadata, **changes)
    assert main(["check", "--case-from", str(path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith(f"parity: {path}")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_is_no_capture_is_refused_everywhere(tmp_path: Path, capsys):
    torn, path = tmp_path / "torn.safetensors", dumped(tmp_path / "d.safetensors", {})
    torn.write_bytes(path.read_bytes()[:5000])
    witness = Path(__file__).parents[1] / "witnesses/ours_act_quant-fp32-aimed-m24-h512.safetensors"
    for file, words in (
        (torn, "is not a safetensors file"),
        (tmp_path / "none.safetensors", "does not exist"),
        (witness, "is a witness, not captured tensors"),
    ):
        for command in (["check"], ["identify", "ours_act_quant"]):
            assert main([*command, "--case-from", str(file)]) == 2
            assert words in capsys.readouterr().err
    newer = dumped(tmp_path / "new.safetensors", {"capture": "2"}, out=TENSORS["x"])
    assert main(["identify", str(newer)]) == 2
    assert "has capture schema '2'" in capsys.readouterr().err
    assert main(["identify", "ours_weight_quant", "--case-from", str(path)]) == 2
    assert "ours_weight_quant is a kernel of weight_quant" in capsys.readouterr().err


def test_powers_of_two_are_taken_where_the_case_says_so(tmp_path: Path):
    """The least one too, 2^-127; and scales of experts that nobody takes are not looked at."""
    scales = UE8M0["w13_scale"].clone()
    scales[HIT] = 2.0**-127
    nobody = TENSORS["ids"].clone()
    nobody[nobody == 3] = HIT
    scales[3] = float("nan")
    changes = UE8M0 | {"w13_scale": scales, "ids": nobody}
    read_back = read(dumped(tmp_path / "d.safetensors", {"case": "ue8m0-c7"}, **changes))
    assert (read_back.case.scale, read_back.case.clamp) == (ScaleFormat.UE8M0, 7.0)


# --- stages -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a capture of four rows, of the inputs alone."""
    path = tmp_path_factory.mktemp("captured") / "dump.safetensors"
    capture.write(path, count=4, case="fp32-c7", **TENSORS)
    return path


def handed(name: str, inputs: Any) -> dict[str, Tensor]:
    """Return what a stage inside was handed, by the names of the layer's own trace."""
    held = vars(inputs)
    names = {
        "act_quant": {"x": "x"}, "permute": {"codes": "act_codes", "scales": "act_scales"},
        "fc1": {"a": "act_codes", "a_scale": "act_scales", "w": "w13", "w_scale": "w13_scale"},
        "swiglu": {"rows": "fc1"}, "swiglu_quant": {"rows": "fc1"},
        "fc2": {"a": "mid_codes", "a_scale": "mid_scales", "w": "w2", "w_scale": "w2_scale"},
        "combine": {"rows": "fc2", "weights": "weights"}, "align": {"ids": "ids"},
        "quant_gemm": {"x": "x"}, "layer": {},
    }  # fmt: skip
    return {theirs: held[ours] for ours, theirs in names[name].items()}


@pytest.mark.parametrize("name", INSIDE)
def test_every_stage_is_fed(name: str, dump: Path):
    """With what the layer hands it; the kernel that is right is green, one that is wrong is not."""
    case, inputs = case_from(dump, kernel_of(name, right), "cpu")
    whole, given = case_from(dump, kernel_of("layer", right), "cpu")
    trace = {**vars(layers.layer(given, OURS)), **vars(given.batch), **vars(given.experts)}
    for theirs, tensor in handed(name, inputs).items():
        assert torch.equal(tensor, trace[theirs].reshape(tensor.shape)), theirs
    assert whole.clamp == 7.0
    assert getattr(inputs, "limit", 7.0) == 7.0
    verdict = bits(kernel_of(name, right), case, "cpu", inputs)
    assert not verdict.message
    assert verdict.compared > 8
    if name not in ("align", "act_quant", "combine"):
        return  # to find out why a kernel is wrong costs seconds

    def wrong(call: Call) -> dict[str, Tensor]:
        made = following()(call)
        for tensor in made.values():
            tensor.view(-1)[-1:].view(torch.uint8)[-1:] ^= 1
        return made

    assert bits(kernel_of(name, wrong), case, "cpu", inputs).failed


def test_what_the_model_gave_is_handed_on(tmp_path: Path):
    """The captured rows of fc1 are what SwiGLU is fed with, not ours."""
    fc1 = torch.arange(24 * 512).view(24, 512).remainder(97).bfloat16()
    file = capture.write(tmp_path / "d.safetensors", row_numbers=[1, 4], fc1=fc1, **TENSORS)
    _, inputs = case_from(file.path, kernel_of("swiglu", right), "cpu")
    assert torch.equal(inputs.rows, fc1[[2, 3, 8, 9]])


def test_a_stage_is_captured_alone(tmp_path: Path):
    """The second GEMM, whose rows are pairs."""
    case = Case(m=6, e=4, k=2, h=256, i=256)
    inputs = STAGES["fc2"].inputs(case)
    names = ("a", "a_scale", "w", "w_scale", "ids", "weights")
    made = {name: getattr(inputs, name) for name in names}
    rows = STAGES["fc2"].reference(case, inputs, OURS)["rows"]
    file = capture.write(
        tmp_path / "d.safetensors", stage="fc2", row_numbers=[0, 5], **made, rows=rows
    )
    again, given = case_from(file.path, kernel_of("fc2", right), "cpu")
    made_again = STAGES["fc2"].reference(again, given, OURS)["rows"]
    assert torch.equal(made_again, rows[[0, 1, 10, 11]])
    assert torch.equal(read(file.path).seen["rows"], made_again)


# --- commands -----------------------------------------------------------------------------------

FILE = '''
"""Our quantizer with one code wrong, where the largest number of a group is above a bound."""

import torch
from moe_parity.kernels import register
from moe_parity.references.recipes.ours import OURS


@register("too_large", stage="act_quant", recipes="ours")
def too_large(call):
    made = call.stage.reference(call.case, call.inputs, OURS)
    codes, scales = call.new("codes").copy_(made["codes"]), call.new("scales").copy_(made["scales"])
    groups = call.inputs.x.float().abs().unflatten(1, (-1, 128)).amax(2)
    codes.unflatten(1, (-1, 128))[..., 5][groups > {bound}] ^= 1
    return codes, scales


@register("right", stage="act_quant", recipes="ours")
def right(call):
    made = call.stage.reference(call.case, call.inputs, OURS)
    return call.new("codes").copy_(made["codes"]), call.new("scales").copy_(made["scales"])
'''


@pytest.fixture
def faulty(dump: Path, tmp_path: Path) -> tuple[Path, Path, int, int]:
    """Return a kernel file that is wrong for one group, a capture, and the row and the block."""
    here = tmp_path / "dump.safetensors"
    here.write_bytes(dump.read_bytes())
    groups = load_file(here)["x"].float().abs().unflatten(1, (-1, 128)).amax(2)
    largest, second = (float(n) for n in groups.flatten().sort(descending=True).values[:2])
    assert largest > second
    row, block = (int(n) for n in (groups == largest).nonzero()[0])
    path = tmp_path / "mine.py"
    path.write_text(FILE.replace("{bound}", repr(second)))
    return path, here, row, block


def test_a_failure_is_made_small_and_written_beside(faulty, tmp_path, monkeypatch, capsys):
    """By the command: one row and one block are left, and the line that is printed is red too."""
    file, dumped_at, row, block = faulty
    monkeypatch.chdir(tmp_path)
    command = ["check", "--kernel", str(file), "--case-from", dumped_at.name, "--device", "cpu"]

    done = subprocess.run(
        [sys.executable, "-m", "moe_parity.harness", *command, "-n", "0", "--out", "out"],
        env=clean(), capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    run = read_results(tmp_path / "out" / "results.jsonl")
    assert {r.kernel: r.verdict for r in run.tests} == {"right": "pass", "too_large": "fail"}
    [red] = [record for record in run.records if record.check == "exact" and record.differing]
    assert red.repro in done.stdout
    small = read(Path(shlex.split(red.repro)[-1]))
    original = read(dumped_at)
    assert small.path.name == "dump-small-too_large.safetensors"
    assert (small.case.m, small.case.h) == (1, 128)
    assert small.origin["rows"] == [original.origin["rows"][row]]
    assert small.origin["h_blocks"] == [block]
    assert torch.equal(small.given["x"], original.given["x"][row : row + 1, 128 * block :][:, :128])


class Records(list):
    """A recorder."""

    def add(self, record_fields: dict[str, Any]) -> None:
        self.append(record_fields)


def _judged(run: Any, path: Path, records: Records | None = None) -> str:
    found = Records() if records is None else records
    with pytest.raises(AssertionError) as refuted:
        expect_captured(kernel_of("layer", run), read(path), "cpu", found)
    return str(refuted.value)


def squared(call: Call) -> Tensor:
    """Return a layer that squares the routing weights."""
    batch = call.inputs.batch
    wrong = dataclasses.replace(batch, weights=batch.weights * batch.weights)
    inputs = dataclasses.replace(call.inputs, batch=wrong)
    return call.new("out").copy_(call.stage.reference(call.case, inputs, OURS)["out"])


def test_a_layer_is_made_small_for_the_same_cause(tmp_path: Path):
    """Rows, choices, experts and blocks go."""
    path = tmp_path / "dump.safetensors"
    small_case = dataclasses.replace(CASE, m=3, e=3, i=128)
    capture.write(path, **tensors_of(small_case))
    records = Records()
    said = _judged(squared, path, records)
    small = read(tmp_path / "dump-small.safetensors")
    assert said.startswith("The square of the routing weights")
    assert said.endswith(f"--case-from {small.path}")
    red = [r for r in records if r["verdict"] == "fail"]
    assert [r["repro"].endswith("dump-small.safetensors") for r in red] == [True]
    assert (small.case.m, small.case.k, small.case.h, small.case.i) == (1, 1, 128, 128)
    assert small.given["w13"].shape == (1, 256, 128)
    assert small.rows_said.endswith(f"is row {small.origin['rows'][0]} of 3 captured ones.")
    # what is small is judged, and not made small again
    assert made_small(small, Verdict(check="exact", verdict="fail"), None, "cpu") is small


def test_only_a_file_that_was_made_small_is_replaced(dump: Path, tmp_path: Path):
    kernel, path = kernel_of("layer", right), tmp_path / "dump.safetensors"
    path.write_bytes(dump.read_bytes())
    captured = read(path)
    smaller = left_with(captured, "rows", [2])
    beside = tmp_path / "dump-small.safetensors"
    beside.write_text("somebody's")
    with pytest.raises(ParityError, match="was not made small by us: left alone"):
        kept_small(smaller, captured, kernel, True)
    assert beside.read_text() == "somebody's"
    beside.unlink()
    for rows in ([2], [1]):
        assert kept_small(left_with(captured, "rows", rows), captured, kernel, True) == beside
        assert read(beside).origin["rows"] == [captured.origin["rows"][rows[0]]]
    assert torch.equal(read(path).given["x"], captured.given["x"])


def test_a_kernel_that_raises_is_told_with_the_capture(dump: Path):
    def raises(call: Call) -> Tensor:
        raise ValueError("no such layout")

    records = Records()
    said = _judged(raises, dump, records)
    assert "ValueError: no such layout" in said
    assert records[0]["cause_kind"] == CauseKind.CALL
    (dump.parent / "dump-small.safetensors").unlink()


def test_a_kernel_is_identified_on_captured_tensors(dump: Path, capsys):
    assert main(["identify", "ours_combine", "--case-from", str(dump), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("combine of ours_combine, dump.safetensors, fp32-m4-")
    assert "ours" in said.splitlines()[1]
    assert main(["identify", str(dump), "--case-from", str(dump)]) == 2


def test_a_capture_says_what_it_is(dump: Path):
    """In words of ours that any reader of the format sees, and in json."""
    from safetensors import safe_open

    with safe_open(dump, framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["capture"], metadata["stage"], metadata["case"]) == ("1", "layer", "fp32-c7")
    origin = json.loads(metadata["origin"])
    assert origin.keys() == {"call", "module", "sizes", "rows", "experts", "whole", "seed"}
    assert hook.capture is capture
