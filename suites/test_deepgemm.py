"""DeepGEMM as a system: one arithmetic in every layout, and the whole layer beside ours."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_parity.harness.calling.run import run
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim, needs, record
from moe_parity.harness.checks.flow import check
from moe_parity.kernels import Fate, find
from moe_parity.kernels.vendors.deepgemm import api as deep_gemm
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, ScaleFormat, Values
from moe_parity.references.stages import FC1, LAYER
from moe_parity.references.stages.routing import place

GROUPED = (
    "deepgemm_contiguous", "deepgemm_contiguous_nopad", "deepgemm_psum", "deepgemm_psum_nopad",
    "deepgemm_masked",
)  # fmt: skip
CHAINS = ("deepgemm_chain_contiguous", "deepgemm_chain_masked", "deepgemm_chain_psum")
SEED_SHAPE = Case(e=32, k=8, h=7168, i=2048)
"""The shape of the seeds' benchmark."""


@pytest.mark.parametrize("scale", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_every_layout_gives_the_same_rows(
    scale: ScaleFormat, parity_device: str, parity_recorder: Recorder
):
    """Dense, contiguous, masked and prefix-sum rows, bit for bit: one expert, and several."""
    one = Case(m=200, e=1, k=1, h=1024, i=384, scale=scale, values=Values.AIMED)
    many = dataclasses.replace(one, e=6, k=2)
    for case, names in ((one, ("deepgemm_dense", *GROUPED)), (many, GROUPED)):
        needs(find(names[0]), case, parity_device)
        inputs = FC1.inputs(case, parity_device)
        rows = [run(find(name), case, inputs).outputs["rows"] for name in names]
        live = inputs.expert >= 0
        for name, other in zip(names[1:], rows[1:], strict=True):
            wrong = int((comparable(other)[live] != comparable(rows[0])[live]).sum())
            of = int(live.sum()) * other.shape[1]
            fault = f"{name} and {names[0]} differ in {wrong} of {of} outputs." if wrong else ""
            claim(
                parity_recorder, "same_rows", fault, kernel=name, stage="fc1", scale=scale.value,
                shape=FC1.size_words(case), device=parity_device, compared=of, differing=wrong,
            )  # fmt: skip


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
    inputs = LAYER.inputs(case, parity_device)
    ours = run(find("ours_decode"), case, inputs).outputs
    live = inputs.expert >= 0
    for kernel in kernels:
        verdicts = check(kernel, case, parity_device, power=m == 1, inputs=inputs)
        record(kernel, case, parity_device, verdicts, parity_recorder)
        trace = run(kernel, case, inputs).outputs
        for name in ("fc1", "fc2", "out"):
            got, want = comparable(trace[name]), comparable(ours[name])
            if name != "out":
                got, want = got[live], want[live]
            assert torch.equal(got, want), f"{kernel.name} and ours differ in {name}."


@pytest.mark.parametrize("max_m", [8, 64, 130])
def test_masked_wants_whole_tiles(max_m: int):
    """Another max_m overwrites the next expert's first rows, so it is refused, without a GPU."""
    a = torch.zeros((2, max_m, 128), dtype=torch.uint8)
    scale = torch.ones(2, max_m, 1)
    w, w_scale = torch.zeros((2, 128, 128), dtype=torch.uint8), torch.ones(2, 1, 1)
    out = torch.empty((2, max_m, 128), dtype=torch.bfloat16)
    counts = torch.tensor([1, 1], dtype=torch.int32)
    with pytest.raises(ParityError, match=rf"multiple of 128, got {max_m}: .* pad to \d+"):
        deep_gemm.masked(a, scale, w, w_scale, out, counts, expected=1)


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
    with pytest.raises(ParityError, match="not 96"), deep_gemm.alignment(96):
        pass


def test_operands_are_checked():
    """A wrong shape or dtype is one sentence, not a trap on the device."""
    a, scale = torch.zeros((4, 256), dtype=torch.uint8), torch.ones(4, 2)
    w, w_scale = torch.zeros((64, 256), dtype=torch.uint8), torch.ones(1, 2)
    deep_gemm.check_operands(a, scale, w, w_scale)
    with pytest.raises(ParityError, match=r"a_scale must be torch.float32 \[4, 2\]"):
        deep_gemm.check_operands(a, scale[:, :1], w, w_scale)
    with pytest.raises(ParityError, match="w must be"):
        deep_gemm.check_operands(a, scale, w.float(), w_scale)
    with pytest.raises(ParityError, match="multiple of 8"):
        deep_gemm.check_operands(a, scale, w[:60], w_scale)


def test_write_sets():
    """Live rows, products of padding, zeros and untouched rows of 3, 0 and 130 rows in tiles."""
    expert = torch.tensor([0] * 3 + [2] * 130 + [-1])
    placed = place(expert, 3, 128)
    assert placed.ends.tolist() == [3, 128, 258]
    assert placed.used == 3 * 128
    # 134 pairs may fill a tile of each expert and one more; the last is nobody's.
    assert deep_gemm.rows_of(placed) == (3 + 1) * 128 + 128
    for skips, rest in ((True, Fate.UNTOUCHED), (False, Fate.ZERO)):
        fates = deep_gemm.row_fates(placed, skips=skips)
        spans = [(0, 3, Fate.LIVE), (3, 64, Fate.JUNK), (64, 128, Fate.ZERO), (128, 258, Fate.LIVE)]
        spans += [(258, 320, Fate.JUNK), (320, 384, Fate.ZERO), (384, 640, rest)]
        for start, end, fate in spans:
            assert set(fates[start:end].tolist()) == {fate}, (start, end, skips)
    masked = deep_gemm.masked_fates(torch.tensor([0, 3]), 256).view(2, 256)
    assert set(masked[0].tolist()) == {Fate.UNTOUCHED}
    assert set(masked[1, 3:128].tolist()) == {Fate.JUNK}
    assert set(masked[1, 128:].tolist()) == {Fate.UNTOUCHED}
