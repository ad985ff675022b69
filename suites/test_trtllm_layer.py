"""TensorRT-LLM's fused layer from FlashInfer's sources: its bits, ours beside them, its adapter.

On a Hopper GPU with the libraries: every output against its recipe and against our decode path, at
the rows where its GEMMs change, and how far TensorRT-LLM's own Triton decode path lies from it, by
decision.  Without: the adapter, by a stand-in that reads the addresses that it is handed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling.run import run
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim, expect, needs
from moe_parity.harness.diagnosis.chains import Chain
from moe_parity.kernels import find
from moe_parity.kernels.call import Call
from moe_parity.kernels.vendors.flashinfer import layer as adapter
from moe_parity.kernels.vendors.flashinfer.package import Build
from moe_parity.kernels.vendors.flashinfer.runner import sources
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Recipe, Routing, ScaleFormat, Values, Why
from moe_parity.references.recipes.tensorrt_llm import TRTLLM_DECODE, TRTLLM_FUSED
from moe_parity.references.stages import LAYER
from moe_parity.references.stages.layer.operands import Asked, Experts, LayerInputs, Routed
from moe_parity.suites.splitting import split

EXACT, SHIPPED = "trtllm_fused_moe", "flashinfer_fused_moe"
ROWS = (1, 31, 32, 33)
"""From 32 tokens on its GEMMs are the normal ones, below them the swapped ones."""
SHAPES = (
    Case(e=8, k=2, h=512, i=256),
    Case(e=8, k=8, h=1024, i=512),
    Case(e=16, k=4, h=2048, i=512),
)
CASES = [
    pytest.param(
        dataclasses.replace(shape, m=m, values=values),
        id=f"{values}-m{m}-e{shape.e}-k{shape.k}-h{shape.h}-i{shape.i}",
    )
    for shape in SHAPES
    for m in ROWS
    for values in (Values.NORMAL, Values.AIMED)
]


# --- its bits, on a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [EXACT, SHIPPED])
@pytest.mark.parametrize("case", CASES)
def test_the_fused_layer_follows_its_recipe(
    name: str, case: Case, parity_device: str, parity_recorder: Recorder
):
    expect(find(name), case, parity_device, parity_recorder, power=True)


@pytest.mark.parametrize("case", CASES)
def test_our_decode_path_has_the_bits_of_the_fused_layer(
    case: Case, parity_device: str, parity_recorder: Recorder
):
    """Each differing output is counted, its distance and the decision that gives it named."""
    fused, ours = find(EXACT), find("ours_decode")
    needs(fused, case, parity_device)
    inputs = LAYER.inputs(case, parity_device)
    got = run(fused, case, inputs).outputs["out"]
    mine = run(ours, case, inputs).outputs["out"]
    wrong = int((comparable(got) != comparable(mine)).sum())
    fault = ""
    if wrong:
        seen = split(Chain(case, inputs), TRTLLM_FUSED, got)
        fault = (
            f"{wrong} of {got.numel()} outputs of ours_decode differ from {EXACT}; {seen.words}."
        )
    claim(
        parity_recorder, "vendor_agrees", fault, kernel="ours_decode", stage="layer",
        compared=got.numel(), differing=wrong, device=parity_device, shape=LAYER.size_words(case),
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_how_far_the_triton_decode_path_lies_from_the_fused_layer(
    case: Case, parity_device: str, parity_recorder: Recorder
):
    """PR 21250 says none at one token and one ulp otherwise; the record says what was met."""
    fused = find(EXACT)
    needs(fused, case, parity_device)
    inputs = LAYER.inputs(case, parity_device)
    got = run(fused, case, inputs).outputs["out"]
    chain = Chain(case, inputs)
    seen = split(chain, TRTLLM_DECODE, got, toward=TRTLLM_FUSED)
    print(f"trtllm_decode {LAYER.size_words(case)} {case.values}: {seen.words}")
    # With every decision as the fused layer has it, nothing is left of the distance.
    whole = split(chain, TRTLLM_FUSED, got)
    claim(
        parity_recorder, "ulp_split", f"{whole.words}." if whole.differing else "", kernel=EXACT,
        stage="layer", recipe="trtllm_decode", compared=seen.of, could_show=seen.differing,
        shape=f"{LAYER.size_words(case)} {case.values}: {seen.words}", device=parity_device,
    )  # fmt: skip


# --- how far layers lie apart ---------------------------------------------------------------------


def test_a_split_names_the_decision_and_the_distance():
    """An output moved by hand by three ulp is no decision's; the others are those of one change."""
    case = Case(m=4, e=4, k=2, h=256, i=128, values=Values.AIMED)
    inputs = LAYER.inputs(case)
    chain = Chain(case, inputs)
    label, changed = next(
        (label, one)
        for label, one in LAYER.neighbours(TRTLLM_FUSED)
        if label == "gemm.scale_order=a_then_b"
    )
    got, want = chain.trace(changed)["out"].clone(), chain.trace(TRTLLM_FUSED)["out"]
    differing = int((comparable(got) != comparable(want)).sum())
    assert differing > 1
    seen = split(chain, TRTLLM_FUSED, got)
    assert (seen.differing, seen.by_decision[label], seen.left) == (differing, differing, 0)
    row, column = (comparable(got) == comparable(want)).nonzero()[0].tolist()
    got[row, column] = (got[row, column].view(torch.int16) + 3).view(torch.bfloat16)
    seen = split(chain, TRTLLM_FUSED, got)
    assert (seen.differing, seen.by_decision[label], seen.left) == (differing + 1, differing, 1)
    assert seen.ulps[3] >= 1
    got[row, column] = float("nan")
    seen = split(chain, TRTLLM_FUSED, got)
    assert seen.ulps[-1] == 1
    assert "1 by a NaN" in seen.words
    toward = split(chain, TRTLLM_FUSED, got, toward=changed)
    assert toward.by_decision == {label: differing}


# --- the adapter ----------------------------------------------------------------------------------


def held(address: int | None, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return the memory at an address."""
    assert address
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


class StandIn:
    """A library of the CPU that reads what the adapter hands over, as ``runner.cu`` says it."""

    def __init__(self, recipe: Recipe = TRTLLM_FUSED) -> None:
        self.recipe, self.stream = recipe, None

    def workspace(self, layer: Any) -> int:
        return 128 * int(layer.rows)

    def run(self, layer: Any, stream: int) -> None:
        """Compute the layer from addresses: gate last in FC1, ids of all ranks."""
        m, h, i, k = layer.rows, layer.hidden, layer.inter, layer.top_k
        e = layer.experts // layer.ep_size
        assert not layer.swiglu_alpha
        assert not layer.swiglu_beta
        assert not layer.swiglu_limit
        assert held(layer.workspace, torch.uint8, 128 * m).numel()
        assert layer.dependent_launch == 1
        w31 = held(layer.fc1, torch.uint8, e, 2 * i, h)
        w31_scale = held(layer.fc1_scales, torch.float32, e, 2 * i // 128, h // 128)
        inputs = LayerInputs(
            batch=Routed(
                x=held(layer.input, torch.bfloat16, m, h),
                ids=held(layer.selected, torch.int32, m, k),
                weights=held(layer.final_scales, torch.float32, m, k)
                if layer.final_scales
                else None,
            ),
            experts=Experts(
                w13=w31.roll(i, 1), w13_scale=w31_scale.roll(i // 128, 1),
                w2=held(layer.fc2, torch.uint8, e, h, i),
                w2_scale=held(layer.fc2_scales, torch.float32, e, h // 128, i // 128),
                first=layer.ep_rank * e,
            ),
            asked=Asked(),
        )  # fmt: skip
        made = LAYER.reference(Case(), inputs, self.recipe)["out"]
        held(layer.output, torch.bfloat16, m, h).copy_(made)
        self.stream = stream


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Return a library in the place of each build, beside a stream for a CPU."""
    made = StandIn()
    monkeypatch.setattr(adapter, "loaded", lambda build: made)
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return made


def called(name: str, case: Case, inputs: Any) -> Any:
    """Run a kernel that needs a GPU, on a CPU, with memory of no poison."""

    def allocate(name, shape, strides, dtype):
        return torch.empty_strided(shape, strides, dtype=dtype)

    made: Tensor = find(name).run(Call(case=case, stage=LAYER, inputs=inputs, allocate=allocate))
    return made


@pytest.mark.parametrize(
    "case",
    [
        Case(m=1, e=4, k=2, h=256, i=128, values=Values.AIMED),
        Case(m=33, e=4, k=2, h=128, i=256),
        Case(m=5, e=6, k=3, h=256, i=256, ep_size=3, ep_rank=1),
        Case(m=6, e=4, k=2, h=128, i=128, routing=Routing.HOLES),
    ],
    ids=lambda c: c.id,
)
def test_the_adapter_hands_over_what_the_layer_reads(stand_in: StandIn, case: Case):
    inputs = LAYER.inputs(case)
    want = LAYER.reference(case, inputs, TRTLLM_FUSED)["out"]
    got = called(EXACT, case, inputs)
    assert torch.equal(comparable(got), comparable(want))
    assert stand_in.stream == 77


def test_the_adapter_takes_no_weights_and_wide_ids(stand_in: StandIn):
    case = Case(m=3, e=4, k=2, h=128, i=128)
    made = LAYER.inputs(case)
    batch = dataclasses.replace(made.batch, ids=made.batch.ids.long(), weights=None)
    inputs = dataclasses.replace(made, batch=batch)
    want = LAYER.reference(case, inputs, TRTLLM_FUSED)["out"]
    assert torch.equal(comparable(called(EXACT, case, inputs)), comparable(want))


def test_each_kernel_asks_for_its_build(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(adapter, "fused_moe", lambda build, *rest, **more: asked.append(build))
    case = Case(m=2, e=4, k=2)
    for name in (EXACT, SHIPPED):
        called(name, case, LAYER.inputs(case))
    assert asked == [Build.EXACT, Build.SHIPPED]
    assert [r.name for n in (EXACT, SHIPPED) for r in find(n).recipes(case, "cuda")] == [
        "trtllm_fused", "flashinfer_cutlass",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(2, 128)}, "x must be torch.bfloat16 [2, 128], got torch.float32"),
        ({"ids": torch.zeros(2, 2).long()}, "ids must be torch.int32 [2, 2], got torch.int64"),
        ({"weights": torch.zeros(2, 3)}, "weights must be torch.float32 [2, 2], got"),
        ({"w31": torch.zeros(4, 128, 128).byte()}, "w31 must be torch.uint8 [4, 256, 128]"),
        ({"w31_scale": torch.zeros(4, 1, 1)}, "w31_scale must be torch.float32 [4, 2, 1]"),
        ({"w2_scale": torch.zeros(4, 2, 1)}, "w2_scale must be torch.float32 [4, 1, 1]"),
        ({"out": torch.zeros(2, 256).bfloat16()[:, ::2]}, "out takes contiguous input"),
        ({"x": torch.zeros(257).bfloat16()[1:].view(2, 128)}, "got one 2 past it"),
    ],
)
def test_operands_that_would_be_read_wrong_are_refused(stand_in, change, said: str):
    right = {
        "x": torch.zeros(2, 128).bfloat16(), "ids": torch.zeros(2, 2).int(),
        "weights": torch.zeros(2, 2), "w31": torch.zeros(4, 256, 128).byte(),
        "w31_scale": torch.zeros(4, 2, 1), "w2": torch.zeros(4, 128, 128).byte(),
        "w2_scale": torch.zeros(4, 1, 1), "out": torch.zeros(2, 128).bfloat16(),
    }  # fmt: skip
    adapter.fused_moe(Build.EXACT, **right)
    with pytest.raises(ParityError, match=re.escape(said)):
        adapter.fused_moe(Build.EXACT, **(right | change))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case(m=2), None),
        (Case(m=0), "it refuses a batch of no tokens."),
        (Case(m=2, scale=ScaleFormat.UE8M0), "it quantizes with fp32 scales"),
        (Case(m=2, mid_scale=ScaleFormat.UE8M0), "it quantizes with fp32 scales"),
        (Case(m=2, clamp=7.0), "the adapter asks for the plain SwiGLU"),
    ],
)
def test_what_the_layer_declines(case: Case, said: str | None):
    declined = find(EXACT).declines(case, "cuda")
    assert declined is None if said is None else str(declined).startswith(said)


# --- where it cannot run, in one sentence ---------------------------------------------------------


def test_why_the_fused_layer_cannot_run_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Each thing that it needs, in the order in which it is asked for."""

    def why() -> tuple[Why, str] | None:
        found = find(EXACT).unavailable()
        return None if found is None else (found.why, str(found))

    install = "pip install --no-deps flashinfer-python==0.6.18."

    def distribution(name):
        raise sources.PackageNotFoundError

    monkeypatch.setattr(sources, "distribution", distribution)
    assert why() == (Why.ABSENT, f"FlashInfer is not installed; {install}")
    other = SimpleNamespace(version="0.7.4", locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(sources, "distribution", lambda name: other)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    absent = why()
    assert absent is not None
    assert absent[1].startswith(f"FlashInfer 0.7.4 has no {tmp_path}/flashinfer/data/csrc/nv_inte")
    for source in sources.SOURCES:
        file = source.located(tmp_path / "flashinfer/data/csrc")
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    # another version with the same sources is built: the compiler says whether it can be
    assert why() == (Why.NEEDS_GPU, adapter.HOPPER)
    other.version = "0.6.18"
    assert why() == (Why.NEEDS_GPU, adapter.HOPPER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert why() == (Why.NEEDS_CHIP, adapter.HOPPER)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert why() == (Why.ABSENT, adapter.NVCC)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv(sources.CACHE, str(tmp_path))
    found = why()
    assert found is not None
    assert found[0] is Why.ABSENT
    assert found[1].endswith("runner.build exact.")
    (tmp_path / "fused_moe_exact.so").touch()

    def refuses(build):
        raise ParityError("FlashInfer's fused layer does not load: of no use.")

    monkeypatch.setattr(adapter, "loaded", refuses)
    assert why() == (Why.ABSENT, "FlashInfer's fused layer does not load: of no use.")
    monkeypatch.setattr(adapter, "loaded", lambda build: None)
    assert why() is None
