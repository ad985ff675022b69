"""DeepGEMM as a system: one arithmetic in every layout, and the whole layer beside ours."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_parity.harness.checks.layer import check_layer, run_layer, words
from moe_parity.harness.checks.stage import run_stage
from moe_parity.harness.expect import Recorder, record_all
from moe_parity.harness.expect_layer import fields
from moe_parity.harness.layer_inputs import layer_inputs
from moe_parity.harness.stages import stage_inputs
from moe_parity.kernels import Kernel, KernelError, find
from moe_parity.kernels.stage_call import Fate
from moe_parity.kernels.vendors.deepgemm import api as deep_gemm
from moe_parity.references.language import Case, ScaleFormat, Stage, Values

GROUPED = (
    "deepgemm_contiguous", "deepgemm_contiguous_nopad", "deepgemm_psum", "deepgemm_psum_nopad",
    "deepgemm_masked",
)  # fmt: skip
CHAINS = ("deepgemm_chain_contiguous", "deepgemm_chain_masked", "deepgemm_chain_psum")
SEED_SHAPE = Case(e=32, k=8, h=7168, i=2048)
"""The shape of the seeds' benchmark."""


def needs(kernel: Kernel, case: Case, device: str) -> None:
    reason = kernel.why_not(case, device)
    if reason:
        pytest.skip(f"{kernel.name}: {reason}")


@pytest.mark.parametrize("scale", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_every_layout_gives_the_same_rows(
    scale: ScaleFormat, parity_device: str, parity_recorder: Recorder
):
    """Dense, contiguous, masked and prefix-sum rows, bit for bit: one expert, and several."""
    one = Case(m=200, e=1, k=1, h=1024, i=384, scale=scale, values=Values.AIMED)
    many = dataclasses.replace(one, e=6, k=2)
    for case, names in ((one, ("deepgemm_dense", *GROUPED)), (many, GROUPED)):
        needs(find(names[0]), case, parity_device)
        inputs = stage_inputs(Stage.FC1, case, parity_device)
        rows = [run_stage(find(n), case, inputs).produced.outputs["rows"] for n in names]
        for name, other in zip(names[1:], rows[1:], strict=True):
            wrong = int((words(other) != words(rows[0])).sum())
            message = f"{name} and {names[0]} differ in {wrong} of {other.numel()} outputs."
            parity_recorder.add(
                {
                    "check": "same_rows", "verdict": "fail" if wrong else "pass",
                    "kernel": name, "stage": "fc1", "scale": scale.value, "bound": "exact",
                    "shape": f"m{case.m}-e{case.e}-k{case.k}-h{case.h}-i{case.i}",
                    "device": parity_device, "compared": other.numel(), "differing": wrong,
                    "message": message if wrong else "",
                }
            )  # fmt: skip
            assert not wrong, message


@pytest.mark.parametrize("values", [Values.NORMAL, Values.AIMED])
@pytest.mark.parametrize("scale", [ScaleFormat.FP32, ScaleFormat.UE8M0])
@pytest.mark.parametrize("m", [1, 16, 96])
def test_the_whole_chain(
    m: int, scale: ScaleFormat, values: Values, parity_device: str, parity_recorder: Recorder
):
    """Every stage and the output exact at E=32 k=8 H=7168 I=2048, and equal to our kernels'."""
    case = dataclasses.replace(SEED_SHAPE, m=m, scale=scale, values=values)
    kernels = [find(name) for name in CHAINS]
    needs(kernels[0], case, parity_device)
    inputs = layer_inputs(case, parity_device)
    ours = run_layer(find("ours_decode"), case, inputs)
    for kernel in kernels:
        verdicts = check_layer(kernel, case, parity_device, power=m == 1, inputs=inputs)
        as_record = lambda verdict, seconds, kernel=kernel: fields(  # noqa: E731
            kernel, case, parity_device, verdict, seconds
        )
        record_all(verdicts, as_record, parity_recorder, kernel.name)
        trace = run_layer(kernel, case, inputs)
        for stage in ("fc1", "fc2", "out"):
            got, want = words(getattr(trace, stage)), words(getattr(ours, stage))
            assert torch.equal(got, want), f"{kernel.name} and ours differ in {stage}."


@pytest.mark.parametrize("max_m", [8, 64, 130])
def test_masked_wants_whole_tiles(max_m: int):
    """Another max_m overwrites the next expert's first rows, so it is refused, without a GPU."""
    a = torch.zeros((2, max_m, 128), dtype=torch.uint8)
    scale = torch.ones(2, max_m, 1)
    w, w_scale = torch.zeros((2, 128, 128), dtype=torch.uint8), torch.ones(2, 1, 1)
    out = torch.empty((2, max_m, 128), dtype=torch.bfloat16)
    with pytest.raises(KernelError, match=rf"multiple of 128, got {max_m}: .* pad to \d+"):
        deep_gemm.masked(a, scale, w, w_scale, out, torch.tensor([1, 1], dtype=torch.int32))


class FakeModule:
    """The alignment knob of DeepGEMM, without DeepGEMM."""

    def __init__(self) -> None:
        self.rows = 128

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        """Return the rows of a tile."""
        return self.rows

    def set_mk_alignment_for_contiguous_layout(self, rows: int) -> None:
        """Set the rows of a tile."""
        self.rows = rows


def _divide_under(fake: FakeModule) -> None:
    assert fake.rows == 64
    _ = 1 // (fake.rows - 64)


def test_alignment_is_put_back(monkeypatch: pytest.MonkeyPatch):
    """Also after an exception; an alignment that does not compile is refused."""
    fake = FakeModule()
    monkeypatch.setattr(deep_gemm, "module", lambda: fake)
    with pytest.raises(ZeroDivisionError), deep_gemm.alignment(64):
        _divide_under(fake)
    assert fake.rows == 128
    with pytest.raises(KernelError, match="not 96"), deep_gemm.alignment(96):
        pass


def test_operands_are_checked():
    """A wrong shape or dtype is one sentence, not a trap on the device."""
    a, scale = torch.zeros((4, 256), dtype=torch.uint8), torch.ones(4, 2)
    w, w_scale = torch.zeros((64, 256), dtype=torch.uint8), torch.ones(1, 2)
    deep_gemm.check_operands(a, scale, w, w_scale)
    with pytest.raises(KernelError, match=r"a_scale must be torch.float32 \[4, 2\]"):
        deep_gemm.check_operands(a, scale[:, :1], w, w_scale)
    with pytest.raises(KernelError, match="w must be"):
        deep_gemm.check_operands(a, scale, w.float(), w_scale)
    with pytest.raises(KernelError, match="multiple of 8"):
        deep_gemm.check_operands(a, scale, w[:60], w_scale)


def test_write_sets():
    """Live rows, products of padding, zeros and untouched rows of 3, 0 and 130 rows in tiles."""
    expert = torch.tensor([0] * 3 + [2] * 130 + [-1])
    placed = deep_gemm.place(expert, 3, 128)
    assert placed.ends.tolist() == [3, 128, 258]
    assert placed.rows == 3 * 128 + 128
    for skips, rest in ((True, Fate.UNTOUCHED), (False, Fate.ZERO)):
        fates = deep_gemm.row_fates(placed, skips=skips)
        spans = [(0, 3, Fate.LIVE), (3, 64, Fate.JUNK), (64, 128, Fate.ZERO), (128, 258, Fate.LIVE)]
        spans += [(258, 320, Fate.JUNK), (320, 384, Fate.ZERO), (384, 512, rest)]
        for start, end, fate in spans:
            assert set(fates[start:end].tolist()) == {fate}, (start, end, skips)
    masked = deep_gemm.masked_fates(torch.tensor([0, 3]), 256).view(2, 256)
    assert set(masked[0].tolist()) == {Fate.UNTOUCHED}
    assert set(masked[1, 3:128].tolist()) == {Fate.JUNK}
    assert set(masked[1, 128:].tolist()) == {Fate.UNTOUCHED}
