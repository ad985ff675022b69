"""The down projection on sorted rows: the bits of the route-major one, padding, planted faults."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux only")
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.kernels import find
from moe_parity.kernels import virtual_gpu as vg
from moe_parity.kernels.ours import moe, sorted_kernels, sorted_rows, steps
from moe_parity.kernels.ours.activation import Activation, swiglu_quant
from moe_parity.kernels.ours.dispatch import Down
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.chips.hopper import WGMMA_FP8
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Check, Contract, Routing, Values
from moe_parity.references.stages import FC2
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.references.stages.layer.operands import LayerInputs, Trace

SMALL = Case(m=6, e=4, k=2, h=128, i=128, values=Values.AIMED)


def ran(made: LayerInputs, down: str, **options: Any) -> Trace:
    batch = made.batch
    return moe.run_stages(
        batch.x, batch.ids, batch.weights, made.experts, path="large", down=down, **options
    )


def assert_alike(made: LayerInputs, **options: Any) -> Trace:
    """Run both layouts; everything of the rank's own pairs has the same bits."""
    route, by_slot = ran(made, "route_major", **options), ran(made, "sorted", **options)
    assert torch.equal(comparable(route.out), comparable(by_slot.out))
    own = made.expert >= 0
    experts, ids = made.experts, made.batch.ids
    aligned = steps.align(ids, experts.first, experts.count, 64)
    codes, scales = sorted_rows.in_pair_order(
        by_slot.mid_codes, by_slot.mid_scales, aligned, ids.numel()
    )
    assert torch.equal(route.mid_codes[own], codes[own])
    assert torch.equal(comparable(route.mid_scales[own]), comparable(scales[own]))
    assert torch.equal(comparable(route.fc2[own]), comparable(by_slot.fc2[own]))
    return by_slot


FORMATS = {
    "fp32": {},
    "ue8m0": {"power_of_two": True},
    "fp32-ue8m0": {"mid_power_of_two": True},
    "ue8m0-fp32": {"power_of_two": True, "mid_power_of_two": False},
}
ROUTED = {
    "a few tokens": dataclasses.replace(SMALL, i=256, values=Values.NORMAL),
    "one token": dataclasses.replace(SMALL, m=1),
    "empty experts": dataclasses.replace(SMALL, m=2, e=16),
    "one expert for all": dataclasses.replace(SMALL, m=66, k=1, routing=Routing.ONE),
    "rank 1 of 2": dataclasses.replace(SMALL, ep_rank=1, ep_size=2, routing=Routing.HOLES),
    "nobody's": dataclasses.replace(SMALL, m=1, k=1, e=4, ep_rank=3, ep_size=4),
}
TRIED = [
    *itertools.product(ROUTED, ("fp32", "ue8m0")),
    ("one token", "fp32-ue8m0"),
    ("rank 1 of 2", "ue8m0-fp32"),
]


@pytest.mark.parametrize(("name", "formats"), TRIED)
def test_sorted_rows_give_the_bits_of_route_major_ones(
    name: str, formats: str, parity_device: str
) -> None:
    made = layer_inputs(ROUTED[name], parity_device)
    out = assert_alike(made, **FORMATS[formats]).out
    assert bool(out.any()) == bool((made.expert >= 0).any())


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 0.5},
        {"limit": 0.5, "clamp": "after", "power_of_two": True},
        {"alpha": 1.702, "beta": 1.0, "limit": 7.0},
        {"limit": [0.25, 0.5, 1.0, 2.0]},
    ],
    ids=["before", "after", "alpha and beta", "a limit for each expert"],
)
def test_sorted_rows_take_what_else_is_asked(options: dict[str, Any], parity_device: str) -> None:
    made = layer_inputs(dataclasses.replace(SMALL, m=3), parity_device, spoil=False)
    plain = ran(made, "sorted").out
    if isinstance(options["limit"], list):
        options = {"limit": torch.tensor(options["limit"], device=parity_device)}
    assert not torch.equal(comparable(assert_alike(made, **options).out), comparable(plain))


def test_sorted_rows_take_a_bias(parity_device: str) -> None:
    made = layer_inputs(dataclasses.replace(SMALL, m=3), parity_device, spoil=False)
    bias = random_bits.normal(1, "bias2", 4, 128, device=parity_device)
    biased = dataclasses.replace(made, experts=dataclasses.replace(made.experts, bias2=bias))
    plain = ran(made, "sorted").out
    assert not torch.equal(comparable(assert_alike(biased).out), comparable(plain))


def test_no_tokens_are_no_sorted_rows(parity_device: str) -> None:
    made = layer_inputs(dataclasses.replace(SMALL, m=0), parity_device)
    assert ran(made, "sorted").out.shape == (0, 128)


# --- what is launched -----------------------------------------------------------------------------


def names(made: LayerInputs, **options: Any) -> list[str]:
    batch = made.batch
    with vg.record() as tape, vg.dry():
        moe.run_moe(batch.x, batch.ids, batch.weights, made.experts, **options)
    return [item.kernel.__name__ for item in tape.launches]


def test_the_large_path_alone_is_sorted_and_only_where_that_is_asked_for() -> None:
    made = layer_inputs(SMALL)
    assert names(made, down="sorted") == names(made)
    route, by_slot = (names(made, path="large", down=down) for down in Down)
    assert route == names(made, path="large")
    assert not any("sorted" in name for name in route)
    assert len(by_slot) == len(route)
    assert [name for name in by_slot if "sorted" in name] == [
        "swiglu_quant_sorted_kernel", "sorted_gemm_kernel",
    ]  # fmt: skip


def test_prewarming_meets_the_sorted_kernels() -> None:
    experts = layer_inputs(SMALL).experts
    with vg.record() as tape, vg.dry():
        moe.prewarm(experts, topk=2, tokens=(3,), down="sorted")
    assert {"swiglu_quant_sorted_kernel", "sorted_gemm_kernel"} <= {
        item.kernel.__name__ for item in tape.launches
    }


@pytest.mark.parametrize("block", [64, 128])
def test_the_sorted_gemm_loads_boxes_and_runs_on_fp8_wgmma(block: int) -> None:
    made = FC2.inputs(dataclasses.replace(SMALL, e=1, k=1))
    aligned = steps.align(made.ids, 0, 1, block)
    rows = sorted_rows.sort_rows(made.a, made.a_scale, aligned)
    with vg.record() as tape, vg.dry():
        sorted_rows.sorted_gemm(rows, made.w, made.w_scale, aligned, 6)
    (launch,) = tape.launches
    assert vg.dot_unit(launch.kernel, *launch.args, **launch.options) is WGMMA_FP8
    text = vg.ptx(launch.kernel, *launch.args, **launch.options)
    assert "cp.async.bulk.tensor.2d.shared::cta.global" in text.replace("cluster", "cta")


# --- slots without a pair -------------------------------------------------------------------------


def poisoned(aligned: steps.Alignment, width: int) -> sorted_rows.SortedRows:
    """Return memory whose every byte is a NaN's."""
    blocks, block = aligned.block_expert.numel(), aligned.block
    return sorted_rows.SortedRows(
        codes=torch.full((blocks * block, width), 0x7F, dtype=torch.uint8),
        scales=torch.full((blocks, width // 128, block), torch.nan),
    )


def _from_rows(aligned: steps.Alignment, rows: Tensor, ids: Tensor) -> sorted_rows.SortedRows:
    codes, scales = swiglu_quant(rows, ids, 0, 3, Activation())
    return sorted_rows.sort_rows(codes, scales, aligned)


def _fused(aligned: steps.Alignment, rows: Tensor, ids: Tensor) -> sorted_rows.SortedRows:
    return sorted_rows.swiglu_quant_sorted(rows, aligned, Activation(), False)


@pytest.mark.parametrize("make", [_fused, _from_rows], ids=["fused", "sorted afterwards"])
def test_slots_of_sorted_rows_without_a_pair_are_zeros_of_scale_one(
    make: Callable[..., sorted_rows.SortedRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert 0 has a full block of 16 and a row more, expert 1 none, expert 2 two rows.

    One pair is foreign; blocks that are not used keep what memory held.
    """
    ids = torch.tensor([0] * 17 + [2, 9, 2], dtype=torch.int32)[:, None]
    rows = random_bits.normal(1, "rows", 20, 256).to(torch.bfloat16)
    aligned = steps.align(ids, 0, 3, 16)
    monkeypatch.setattr(sorted_rows.SortedRows, "empty", staticmethod(poisoned))
    made = make(aligned, rows, ids)
    assert aligned.block_expert.tolist() == [0, 0, 2, -1]
    order = [*range(17), *[None] * 15, 17, 19, *[None] * 14]
    codes, scales = swiglu_quant(rows, ids, 0, 3, Activation())
    flat = made.scales[:, 0].flatten()
    for slot, pair in enumerate(order):
        if pair is None:
            assert not made.codes[slot].any()
            assert flat[slot] == 1
        else:
            assert torch.equal(made.codes[slot], codes[pair])
            assert flat[slot] == scales[pair, 0]
    assert (made.codes[48:] == 0x7F).all()
    assert flat[48:].isnan().all()


# --- refusals -------------------------------------------------------------------------------------


def test_what_sorted_rows_cannot_be_is_one_sentence() -> None:
    made = layer_inputs(SMALL)
    with pytest.raises(
        ParityError, match=r"run_moe: down must be one of 'route_major', 'sorted', got 'rows'\."
    ):
        ran(made, "rows")
    aligned = steps.align(torch.zeros(2, 1, dtype=torch.int32), 0, 1, 64)
    codes, scale = torch.zeros(2, 128, dtype=torch.uint8), torch.ones(2, 1)
    with pytest.raises(ParityError, match=r"sort_rows: rows of a must be contiguous, .*\(1, 2\)"):
        sorted_rows.sort_rows(codes.t().contiguous().t(), scale, aligned)
    for width in (0, 192):
        with pytest.raises(ParityError, match=f"sorted rows: K = {width} must be a positive mult"):
            sorted_rows.SortedRows.empty(aligned, width)
    rows = sorted_rows.sort_rows(codes, scale, aligned)
    w = torch.zeros(1, 128, 256, dtype=torch.uint8)[:, :, ::2]
    with pytest.raises(ParityError, match=r"sorted_gemm: rows of w must be contiguous"):
        sorted_rows.sorted_gemm(rows, w, scale[None, :1], aligned, 2)
    with pytest.raises(ParityError, match="swiglu_quant_sorted's rows"):
        sorted_rows.swiglu_quant_sorted(torch.zeros(256, 2).t(), aligned, Activation(), False)
    bias = torch.zeros(1, 256)[:, ::2]
    with pytest.raises(ParityError, match="sorted_gemm's bias"):
        sorted_rows.sorted_gemm(rows, w.contiguous(), scale[None, :1], aligned, 2, bias)


def test_a_sorted_gemm_declines_a_ragged_k_by_its_sentence() -> None:
    kernel = find("ours_fc2_sorted")
    assert kernel.declines(SMALL, "cpu") is None
    reason = kernel.declines(dataclasses.replace(SMALL, i=180), "cpu")
    assert str(reason) == "K = 180 must be a multiple of 128."


# --- planted faults -------------------------------------------------------------------------------

FAULTY = dataclasses.replace(SMALL, m=12, i=256)


def failures(name: str = "ours_fc2_sorted") -> list[Verdict]:
    """Return what the checks of bits and of what is written say where they are red."""
    bits = Contract(checks=frozenset({Check.EXACT, Check.WRITE_SET}))
    kernel = dataclasses.replace(find(name), contract=bits)
    return [verdict for verdict in check(kernel, FAULTY, "cpu") if verdict.failed]


def test_sorted_rows_as_they_are_show_no_fault() -> None:
    assert not failures()


@dataclasses.dataclass(frozen=True)
class Strided:
    """A descriptor's class that takes another stride for the rows, and as many as lie inside."""

    change: Callable[[int], int]
    fewer: bool = False

    def from_tensor(self, tensor: Tensor, box: list[int]) -> TensorDescriptor:
        (rows, width), stride = tensor.shape, self.change(tensor.stride(0))
        if self.fewer:
            rows = (tensor.numel() - width) // stride + 1
        return TensorDescriptor(tensor, [rows, width], [stride, 1], box)


def test_a_stride_of_the_sorted_rows_that_leaves_their_tensor_is_out_of_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sorted_rows, "TensorDescriptor", Strided(lambda s: 2 * s))
    first = failures()[0]
    assert (first.check, first.cause) == ("exact", "out_of_bounds")
    assert "sorted_gemm_kernel (line" in first.message
    assert "past the end of a (uint8 [256, 256])" in first.message


STRIDES = {
    "half": (Strided(lambda s: s // 2), "half their row stride (128 instead of 256)"),
    "16 too small": (
        Strided(lambda s: s - 16), "a row stride that is 16 too small (240 instead of 256)"
    ),
    "twice, of fewer rows": (
        Strided(lambda s: 2 * s, fewer=True), "twice their row stride (512 instead of 256)"
    ),
    "16 too large, of fewer rows": (
        Strided(lambda s: s + 16, fewer=True), "a row stride that is 16 too large (272 instead"
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", STRIDES)
@pytest.mark.parametrize(
    ("name", "judged"), [("ours_fc2_sorted", "exact"), ("ours_sorted", "exact_fc2")],
    ids=["sorted afterwards", "fused"],
)  # fmt: skip
def test_a_wrong_outer_stride_inside_the_sorted_rows_is_red_and_named(
    name: str, judged: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = STRIDES[wrong]
    monkeypatch.setattr(sorted_rows, "TensorDescriptor", change)
    (found,) = (verdict for verdict in failures(name) if verdict.check == judged)
    assert "row_stride" in found.causes, found.message
    assert f"sorted by expert in blocks of 64, read at {words}" in found.message


numbers = itertools.count()


def mutant(tmp_path: Path, old: str, new: str) -> ModuleType:
    """Return the module of the kernels with one place of its source changed."""
    source = Path(sorted_kernels.__file__).read_text()
    assert source.count(old) == 1
    path = tmp_path / f"mutant_sorted_{next(numbers)}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sorted_rows_past_an_experts_count_are_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored, they lie past the output; where their slots name a pair, two programs store it."""
    wrong = mutant(
        tmp_path, "mask=(pair < pairs)[None, :] & (n < N)[:, None]", "mask=(n < N)[:, None]"
    )
    with monkeypatch.context() as patch:
        patch.setattr(sorted_rows, "sorted_kernels", wrong)
        assert {v.cause for v in failures()} == {"out_of_bounds"}

    align = steps.align

    def full(ids: Tensor, *given: Any, **words: Any) -> steps.Alignment:
        made = align(ids, *given, **words)
        slots = made.slots.where(made.slots != ids.numel(), 0)
        return dataclasses.replace(made, slots=slots)

    monkeypatch.setattr(steps, "align", full)
    assert {v.cause for v in failures()} == {"race"}


def test_slots_of_sorted_rows_off_by_one_are_red_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    align = steps.align

    def shifted(ids: Tensor, *given: Any, **words: Any) -> steps.Alignment:
        made = align(ids, *given, **words)
        own = (made.slots >= 0) & (made.slots < ids.numel())
        return dataclasses.replace(
            made, slots=made.slots.where(~own, (made.slots + 1) % ids.numel())
        )

    with monkeypatch.context() as patch:
        patch.setattr(steps, "align", shifted)
        assert "expert_of_neighbour" in failures()[0].causes
    shift = "slots_ptr + first + lane + 1, mask=lane + 1 < BLOCK, other=pairs)"
    wrong = mutant(tmp_path, "slots_ptr + first + lane)", shift)
    monkeypatch.setattr(sorted_rows, "sorted_kernels", wrong)
    assert failures()[0].cause == "unwritten"


def test_a_sorted_layer_that_drops_the_second_format_is_red_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused = sorted_rows.swiglu_quant_sorted

    def dropped(rows: Tensor, aligned: steps.Alignment, how: Activation, _: bool) -> Any:
        return fused(rows, aligned, how, True)

    monkeypatch.setattr(sorted_rows, "swiglu_quant_sorted", dropped)
    causes = {verdict.check: verdict.causes for verdict in failures("ours_sorted")}
    assert "power_unasked" in causes["exact_swiglu_quant"]
    assert set(causes) == {"exact_swiglu_quant", "exact_layer"}
