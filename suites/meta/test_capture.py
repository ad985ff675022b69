"""Capturing one layer of a running model: what a file holds, and what cannot be held."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_parity.harness import capture
from moe_parity.harness.captured.feed import case_from
from moe_parity.harness.captured.file import read
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import LAYER
from moe_parity.suites.meta.capturing import CASE, TENSORS, tensors_of
from moe_parity.suites.planted import kernel_of, right

RANK = dataclasses.replace(CASE, ep_rank=1, ep_size=2)


class Layer(nn.Module):
    """A layer with the names of vLLM, which writes into its input."""

    def __init__(self, case: Case = CASE):
        super().__init__()
        made = tensors_of(case)
        self.w13_weight = made["w13"].view(torch.float8_e4m3fn)
        self.w2_weight = made["w2"].view(torch.float8_e4m3fn)
        self.w13_weight_scale_inv, self.w2_weight_scale_inv = made["w13_scale"], made["w2_scale"]
        self.case = case
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        made = {**tensors_of(self.case), "x": hidden_states.flatten(0, -2), "weights": topk_weights}
        case, inputs = LAYER.given(dataclasses.replace(self.case, e=1), made | {"ids": topk_ids})
        out = LAYER.reference(case, inputs, OURS)["out"]
        self.seen.append((hidden_states.clone(), out))
        hidden_states.fill_(7)
        return out.view(hidden_states.shape)

    def run(self, factor: float = 1.0) -> Any:
        made = tensors_of(self.case)
        return self((made["x"] * factor).clone(), made["weights"], topk_ids=made["ids"])


def test_a_file_holds_what_the_call_had(tmp_path: Path):
    """The second call, rows of a batch with a sequence, before the layer wrote into them."""
    layer, path = Layer(), tmp_path / "dump.safetensors"
    with capture(layer, path, call=2, count=4):
        layer.run()
        made = tensors_of(CASE)
        layer((made["x"] * 2).view(3, 4, -1), made["weights"], made["ids"])
        layer.run(4.0)
    dump, found = read(path), load_file(path)
    rows, experts = dump.origin["rows"], dump.origin["experts"]
    assert len(rows) == 4
    assert experts == sorted({int(e) for e in TENSORS["ids"][rows].flatten()})
    assert torch.equal(found["x"], layer.seen[1][0].flatten(0, 1)[rows])
    assert torch.equal(found["out"], layer.seen[1][1][rows])
    assert torch.equal(found["weights"], TENSORS["weights"][rows])
    assert torch.equal(torch.tensor(experts)[found["ids"].long()].int(), TENSORS["ids"][rows])
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        assert torch.equal(found[name], TENSORS[name][experts])
    assert dump.origin["sizes"] == {"m": 12, "e": 8, "k": 2, "h": 256, "i": 256}


@pytest.mark.parametrize("case", [CASE, RANK], ids=["alone", "ep1of2"])
def test_rows_and_experts_that_are_left_out_change_no_bit(case: Case, tmp_path: Path):
    """The layer on the file gives the rows that it gave on all of them."""
    words = "fp32-ep1of2" if case is RANK else "fp32"
    out = LAYER.reference(case, LAYER.inputs(case), OURS)["out"]
    dump = capture.write(
        tmp_path / "d.safetensors", case=words, count=3, seed=5, **tensors_of(case), out=out
    )
    kernel = kernel_of("layer", right)
    again, inputs = case_from(dump.path, kernel, "cpu")
    assert again.e < case.e
    assert (again.m, again.ep_size) == (3, case.ep_size)
    made = LAYER.reference(again, inputs, OURS)["out"]
    assert torch.equal(made, out[dump.origin["rows"]])
    assert torch.equal(dump.seen["out"], made)


def test_experts_that_are_not_asked_for_are_nobodys(tmp_path: Path):
    """Their pairs are left out, and so is an output that they were part of."""
    out = LAYER.reference(CASE, LAYER.inputs(CASE), OURS)["out"]
    dump = capture.write(tmp_path / "d.safetensors", expert_numbers=[5], **TENSORS, out=out)
    ids = TENSORS["ids"][dump.origin["rows"]]
    assert bool((ids == 5).any(1).all())
    assert torch.equal(read(dump.path).given["ids"], torch.where(ids == 5, 0, -1).int())
    assert not dump.seen
    assert dump.words == "fp32-holes"


def test_a_file_keeps_to_its_limit_or_says_what_a_row_needs(tmp_path: Path):
    path = tmp_path / "d.safetensors"
    for limit in (430_000, 700_000, 1_300_000):
        origin = capture.write(path, limit=limit, **TENSORS).origin
        size, kept = path.stat().st_size, set(origin["experts"])
        assert size <= limit
        # no row that was left out would have fitted, but for a header
        left = set(range(CASE.m)) - set(origin["rows"])
        more = [len(set(TENSORS["ids"][row].tolist()) - kept) for row in left]
        assert all(size + count * EXPERT + 4096 + 600 > limit for count in more)
    path.unlink()
    with pytest.raises(ParityError, match="H and I stay whole") as refused:
        capture.write(path, limit=100_000, **TENSORS)
    assert not path.exists()
    needed = int(str(refused.value).partition("limit=")[2].partition(",")[0])
    assert len(capture.write(path, limit=needed, **TENSORS).origin["rows"]) == 1
    with pytest.raises(ParityError, match="3 rows need"):
        capture.write(path, limit=needed, row_numbers=[1, 2, 3], **TENSORS)
    assert capture.write(path, row_numbers=[9, 2], **TENSORS).origin["rows"] == [2, 9]


EXPERT = (2 * 256 + 256) * 256
"""Bytes of an expert's codes."""


class Ops(TorchDispatchMode):
    """Notes which ops are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the op and call it."""
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_hook_waits_for_no_gpu(tmp_path: Path):
    """While the model runs nothing reads a value, and no index is made on the host."""
    made = {name: tensor.clone() for name, tensor in TENSORS.items()}

    def model(**given: Tensor) -> Tensor:
        return given["x"]

    owner = type("Owner", (), {"layer": staticmethod(model)})
    with capture((owner, "layer"), tmp_path / "d.safetensors", rows=[3, 8]), Ops() as ops:
        owner.layer(**made)
    assert ops.names <= {"aten::detach", "aten::select", "aten::stack", "aten::cat", "aten::view"}
    assert owner.layer is model
    assert read(tmp_path / "d.safetensors").origin["rows"] == [3, 8]


def _graph(monkeypatch: pytest.MonkeyPatch, layer: Layer) -> Layer:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return layer


def _compiled(monkeypatch: pytest.MonkeyPatch, layer: Layer) -> Layer:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return layer


def _meta(_: pytest.MonkeyPatch, layer: Layer) -> Layer:
    layer.w2_weight = layer.w2_weight.to("meta")
    return layer


def _without(_: pytest.MonkeyPatch, layer: Layer) -> Layer:
    del layer.w13_weight_scale_inv
    return layer


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_graph, "call 1 was recorded into a CUDA graph, where nothing can be held"),
        (_compiled, "the layer ran inside torch.compile, where nothing can be held"),
        (_meta, "w2 has no values: it is a meta tensor"),
        (_without, "w13_scale is neither an argument nor an attribute of Layer"),
    ],
)
def test_what_cannot_be_captured_is_said_and_the_model_runs(
    spoil, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    layer = spoil(monkeypatch, Layer())
    with (
        pytest.raises(ParityError, match=words),
        capture(layer, tmp_path / "d.safetensors"),
    ):
        out = layer.run()
    assert torch.equal(out, layer.seen[0][1])
    assert not list(tmp_path.iterdir())
    assert not layer._forward_hooks


def test_a_call_that_did_not_come_is_said(tmp_path: Path):
    layer = Layer()
    with (
        pytest.raises(ParityError, match="call 3 was asked for, and there were 1"),
        capture(layer, tmp_path / "d.safetensors", call=3),
    ):
        layer.run()
    with (
        pytest.raises(ZeroDivisionError),  # what the body raises is not covered up
        capture(layer, tmp_path / "d.safetensors"),
    ):
        layer.run(1 / 0)
    recording = capture(layer, tmp_path / "d.safetensors").attach()
    layer.run()
    layer.w2_weight.view(torch.uint8).fill_(0)
    with pytest.raises(ParityError, match="w2 was written after the call"):
        recording.close()
    with pytest.raises(ParityError, match="is no folder that can be written to"):
        capture(layer, tmp_path / "nowhere" / "d.safetensors").attach()


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file before stays as it was, nothing else is left, and what is held can be written."""
    layer, path = Layer(), tmp_path / "d.safetensors"
    path.write_text("before")
    recording = capture(layer, path).attach()
    layer.run()

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(ParityError, match="No space left"):
            recording.close()
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    recording.path = tmp_path / "other.safetensors"
    recording.close()
    assert torch.equal(read(recording.path).seen["out"], layer.seen[0][1])


def test_a_sum_alone_takes_no_rank(tmp_path: Path):
    rows = torch.zeros(2, 2, 256, dtype=torch.bfloat16)
    ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ParityError, match="combine alone does not say how many experts"):
        capture.write(
            tmp_path / "d.safetensors", stage="combine", case="fp32-ep1of2", rows=rows, ids=ids
        )
    made = capture.write(tmp_path / "d.safetensors", stage="combine", rows=rows, ids=ids)
    assert case_from(made.path, kernel_of("combine", right), "cpu")[0].k == 2
