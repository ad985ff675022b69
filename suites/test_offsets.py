"""Offsets past 2^31: rows far apart, weights of E * N * K elements; on a GPU M * H of them."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling.poison import GUARD
from moe_parity.harness.calling.run import run
from moe_parity.harness.cases import budget
from moe_parity.harness.cases.grid import params
from moe_parity.harness.checks.calls import cloned, poured
from moe_parity.harness.checks.compare import differences
from moe_parity.harness.checks.expect import Recorder, expect
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.replay import replay
from moe_parity.harness.checks.sequence import sequence
from moe_parity.kernels import Call, Kernel, find
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Check, Contract, Hazard, Routing
from moe_parity.references.language.stage import tensors_of
from moe_parity.references.stages import ACT_QUANT, FC1, STAGES
from moe_parity.references.stages.combine import ExpertRows
from moe_parity.references.stages.quant.stage import QuantInputs
from moe_parity.references.stages.swiglu.stage import GateUpRows
from moe_parity.suites.planted import kernel_of, red, right

offsetting = pytest.importorskip("moe_parity.suites.offsetting", reason="needs Triton")

PAST = 2**31
FAR = {
    "weight_quant": Case(i=130, h=128),
    "act_quant": Case(m=3, h=256),
    "permute": Case(m=3, e=4, k=2, h=256),
    "fc1": Case(m=3, e=3, k=2),
    "swiglu": Case(m=3, e=2),
    "swiglu_quant": Case(m=3, e=2),
    "fc2": Case(m=3, e=3, k=2),
    "combine": Case(m=3, e=4, k=2),
    "layer": Case(m=3, e=3, k=2, routing=Routing.LAST),
    "quant_gemm": Case(m=3, h=256),
}
FAR = {stage: dataclasses.replace(case, hazard=Hazard.FAR) for stage, case in FAR.items()}
CONTIGUOUS = Case(m=1, e=8200, h=1024, routing=Routing.LAST)
"""8200 experts of 256 x 1024: the last one begins at element 2,149,318,656."""
ONLY_BITS = Contract(checks=frozenset({Check.EXACT}))

# --- kernels ------------------------------------------------------------------------------------


def every() -> list[Any]:
    """Each kernel on its stage's far case, and the decode GEMM and layer on contiguous weights."""
    made = [entry for name, case in FAR.items() for entry in params(STAGES[name], [case])]
    return made + [
        pytest.param(find(name), CONTIGUOUS, id=f"{name}-{CONTIGUOUS.id}")
        for name in ("ours_fc1_decode", "ours_decode")
    ]


@pytest.mark.parametrize(("kernel", "case"), every())
def test_offsets(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Bits, and inputs that are as they were."""
    kept = Contract(checks=frozenset({Check.EXACT, Check.INPUT_KEPT}))
    expect(dataclasses.replace(kernel, contract=kept), case, parity_device, parity_recorder)


@pytest.mark.parametrize("name", ["ours_act_quant", "ours_fc1_decode", "ours_decode"])
def test_our_kernels_that_read_by_strides_refuse_nothing(name: str):
    """Experts of ``run_moe`` at any distance from each other among it."""
    kernel = dataclasses.replace(find(name), contract=ONLY_BITS)
    verdicts = list(check(kernel, FAR[kernel.stage.name], "cpu"))
    assert {v.verdict for v in verdicts} == {"pass"}


def test_a_gpu_with_little_memory_takes_no_far_case(monkeypatch: pytest.MonkeyPatch):
    """Where memory is real; and no GPU keeps several of them, call after call."""
    monkeypatch.setattr(budget.environment, "gpu", lambda: object())
    for gigabytes, skipped in ((24, True), (80, False)):
        memory = gigabytes << 30, 139 << 30
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda memory=memory: memory)
        assert bool(budget._memory(FAR["fc1"])) is skipped
        assert budget._memory(CONTIGUOUS) is None
    far = FAR["act_quant"]
    (verdict,) = sequence(kernel_of("act_quant", right), [far, far], "cuda")
    assert verdict.reason == "the kernel takes no two cases of the sequence"


# --- the inputs ---------------------------------------------------------------------------------


def spread(inputs: Any) -> list[Tensor]:
    """Return the tensors that lie far apart."""
    return [t for t in tensors_of(inputs) if t.untyped_storage().nbytes() > PAST]


@pytest.mark.parametrize("stage", FAR)
def test_the_last_row_is_the_first_past_the_end_of_an_int32(stage: str):
    """The same values, rows that are whole, and the wrapped offset inside of the storage."""
    case = FAR[stage]
    plain = tensors_of(STAGES[stage].inputs(dataclasses.replace(case, hazard=Hazard.NONE)))
    made = STAGES[stage].inputs(case)
    for one, other in zip(tensors_of(made), plain, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    far = spread(made)
    assert len(far) == {"fc1": 2, "fc2": 2, "layer": 3}.get(stage, 1)
    for tensor in far:
        rows, step = tensor.shape[0], tensor.stride(0)
        assert (rows - 2) * step < PAST <= (rows - 1) * step
        assert tensor[0].is_contiguous()
        assert tensor.data_ptr() % 16 == step * tensor.element_size() % 16 == 0
        at_wrapped = offsetting.short(tensor, [rows - 1]).view(torch.uint8)
        assert bool((at_wrapped == 0x7F).all())


@pytest.mark.parametrize("m", [0, 1])
def test_few_rows_start_far_behind_the_start_of_their_storage(m: int):
    for stage in ("act_quant", "fc1", "combine"):
        made = tensors_of(STAGES[stage].inputs(dataclasses.replace(FAR[stage], m=m)))[0]
        assert made.shape[0] == m
        assert made.storage_offset() == (PAST if m else 0)


@pytest.mark.parametrize("stage", ["act_quant", "fc1", "swiglu", "combine", "layer"])
def test_rows_alone_do_not_overflow(stage: str):
    """So that a row that reads something else among others differs from itself alone."""
    case = FAR[stage]
    for part in STAGES[stage].subsets(case, STAGES[stage].inputs(case)):
        first = tensors_of(part.inputs)[0]
        assert first.is_contiguous()
        assert first.untyped_storage().nbytes() < 4096


def test_contiguous_weights_past_the_end_cost_what_is_hit():
    made = FC1.inputs(CONTIGUOUS)
    assert made.w.is_contiguous()
    assert 8199 * made.w.stride(0) > PAST > 0
    few = FC1.inputs(dataclasses.replace(CONTIGUOUS, e=200))
    assert bool((few.w[0] == 0x7F).all())  # NaN where it is cheap
    assert not bool(made.w[0].any())
    assert bool(made.w[-1].any())
    handed = FC1.handed(made)
    assert sum(t.numel() for t in handed) < 2 * made.w[0].numel()


def test_large_weights_are_copied_where_they_are_not_zero():
    """Into memory of their own, and over what lay there."""
    made = FC1.inputs(dataclasses.replace(CONTIGUOUS, e=1025))
    copied = cloned(made)
    assert copied.w.data_ptr() != made.w.data_ptr()
    assert torch.equal(copied.w[-1], made.w[-1])
    copied.w[7] = 1
    again = poured(copied, made)
    assert again.w.data_ptr() == copied.w.data_ptr()
    assert not bool(again.w[7].any())


def test_no_memory_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    from moe_parity.references.stages import sparse

    def full(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(sparse.mmap, "mmap", full)
    with pytest.raises(ParityError, match=r"need 8 GiB of addresses.*ulimit -v"):
        ACT_QUANT.inputs(FAR["act_quant"])


# VmHWM, not getrusage: the latter begins with the peak of the process that started this one
PEAK = r"""
import re
from pathlib import Path
from moe_parity.harness.checks.flow import check
from moe_parity.kernels import find
from moe_parity.suites.test_offsets import CONTIGUOUS, FAR
for name, case in (("ours_act_quant", FAR["act_quant"]), ("ours_fc1_decode", CONTIGUOUS),
                   ("ours_decode", FAR["layer"])):
    assert not any(v.failed for v in check(find(name), case, "cpu"))
print(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
"""


def test_a_worker_needs_less_than_two_gigabytes():
    """All checks of a far quantizer, GEMM and layer, and of contiguous weights."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert 100 << 10 < int(done.stdout.split()[-1]) < 2 << 20


# --- planted faults -----------------------------------------------------------------------------

Fault = Callable[[Any], dict[str, Any]]


def reading(fault: Fault) -> Callable[[Call], dict[str, Tensor]]:
    """Return what is right on inputs that it has read wrong."""

    def wraps(call: Call) -> dict[str, Tensor]:
        changed = dataclasses.replace(call.inputs, **fault(call.inputs))
        return right(dataclasses.replace(call, inputs=changed))

    return wraps


def rows_of(field: str, unit: int = 1) -> Fault:
    """Return what reads the rows of a field at offsets in 32 bits."""

    def changed(inputs: Any) -> dict[str, Any]:
        tensor = getattr(inputs, field)
        return {field: offsetting.short(tensor, list(range(tensor.shape[0])), unit)}

    return changed


def last_expert(inputs: Any) -> dict[str, Any]:
    """Return the one expert that is hit, alone, read at an offset in 32 bits."""
    last = inputs.w.shape[0] - 1
    w = offsetting.short(inputs.w, [last])
    return {"w": w, "w_scale": inputs.w_scale[-1:], "expert": torch.zeros_like(inputs.expert)}


def of_layer(inputs: Any) -> dict[str, Any]:
    experts = inputs.experts
    w13 = offsetting.short(experts.w13, list(range(experts.count)))
    return {"experts": dataclasses.replace(experts, w13=w13)}


PLANTED: list[tuple[str, Case, Fault]] = [
    ("act_quant", FAR["act_quant"], rows_of("x")),
    ("act_quant", dataclasses.replace(FAR["act_quant"], m=4), rows_of("x", 2)),
    ("weight_quant", FAR["weight_quant"], rows_of("x")),
    ("permute", FAR["permute"], rows_of("codes")),
    ("fc1", FAR["fc1"], rows_of("a")),
    ("fc2", FAR["fc2"], rows_of("w")),
    ("fc1", CONTIGUOUS, last_expert),
    ("swiglu", FAR["swiglu"], rows_of("rows")),
    ("swiglu_quant", FAR["swiglu_quant"], rows_of("rows")),
    ("combine", FAR["combine"], rows_of("rows")),
    ("layer", FAR["layer"], of_layer),
]


@pytest.mark.parametrize(
    ("stage", "case", "fault"), PLANTED, ids=[f"{n}-{p[0]}" for n, p in enumerate(PLANTED)]
)
def test_an_offset_that_wraps_is_red_and_named(stage: str, case: Case, fault: Fault):
    bits = dataclasses.replace(kernel_of(stage, reading(fault)), contract=ONLY_BITS)
    first = next(v for v in check(bits, case, "cpu") if v.failed)
    assert "offset_wraps" in first.causes, first.message
    assert not red(dataclasses.replace(kernel_of(stage, right), contract=ONLY_BITS), case)


def test_rows_alone_differ_where_an_offset_wraps():
    """The check that compares rows among others with the same alone."""
    case = dataclasses.replace(FAR["act_quant"], m=4)
    assert "row_subset" in red(kernel_of("act_quant", reading(rows_of("x"))), case)


@pytest.mark.parametrize("made", [offsetting.quantizer, offsetting.weighing])
def test_an_int32_offset_in_triton_is_out_of_bounds(made: Callable[..., Kernel]):
    """With the line that loads; the same kernel that counts in 64 bits is green."""
    kernel = made(wide=False)
    case = dataclasses.replace(FAR[kernel.stage.name], k=1, e=1)
    (verdict,) = (v for v in check(kernel, case, "cpu") if v.failed)
    assert (verdict.cause_kind, verdict.cause) == ("memory", "out_of_bounds")
    words = r"program \(2, 0, 0\): a load of 2 bytes .* is 4294967296 bytes before the start of"
    assert re.search(words, verdict.message), verdict.message
    assert "offsetting.py)" in verdict.message
    assert not red(made(wide=True), case)


def test_a_kernel_that_changes_a_far_row_is_seen_and_undone():
    def writes(call: Call) -> dict[str, Tensor]:
        made = right(call)
        call.inputs.x[-1, 5] += 1
        return made

    inputs = ACT_QUANT.inputs(FAR["act_quant"])
    before = inputs.x.clone()
    assert not run(kernel_of("act_quant", writes), FAR["act_quant"], inputs).input_kept
    assert torch.equal(inputs.x, before)
    assert run(kernel_of("act_quant", right), FAR["act_quant"], inputs).input_kept


def test_a_kernel_that_changes_the_expert_that_is_hit_is_seen():
    def writes(call: Call) -> dict[str, Tensor]:
        made = right(call)
        call.inputs.w[-1, 3, 3] ^= 1
        return made

    assert not run(kernel_of("fc1", writes), CONTIGUOUS, FC1.inputs(CONTIGUOUS)).input_kept


def test_large_weights_are_not_replayed_on_a_cpu():
    verdict = replay(kernel_of("fc1", right), CONTIGUOUS, "cpu")
    assert (verdict.verdict, verdict.reason) == (
        "skip", "a CPU keeps no second copy of weights of 268435456 elements and more",
    )  # fmt: skip


# --- real memory --------------------------------------------------------------------------------

WIDE = 7168


def around(row: int, rows: int) -> Tensor:
    """Return the first and last row, and those on both sides of 2^31 elements, ``row`` in each."""
    return torch.tensor([0, PAST // row - 1, PAST // row, PAST // row + 1, rows - 1])


def looked_at(kernel: Kernel, case: Case, inputs: Any, chosen: Tensor) -> None:
    """Call once; compare some rows with the recipe of those rows alone, and look at the guards."""
    ran = run(kernel, case, inputs)
    chosen = chosen.to(kernel.stage.handed(inputs)[0].device)
    part = kernel.stage.some(case, inputs, chosen)
    (recipe,) = kernel.recipes(part.case, "cuda")
    want = kernel.stage.reference(part.case, part.inputs, recipe)
    got = {name: ran.outputs[name][part.rows[name]] for name in want}
    outputs = kernel.stage.outputs(part.case, part.inputs)
    assert not [d.words for d in differences(outputs, got, want, {}) if d.wrong]
    for output in ran.memory:
        for guard in (output.storage[:GUARD], output.storage[-GUARD:]):
            assert bool((guard == output.poison).all())
    assert torch.cuda.max_memory_allocated() < 60 << 30


def numbers(rows: int, columns: int, device: str) -> Tensor:
    """Return BF16 rows, those that are looked at among them, without a wider copy."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    made = torch.empty((rows, columns), dtype=torch.bfloat16, device=device)
    return made.normal_(generator=torch.Generator(device).manual_seed(7))


def test_a_quantizer_of_more_than_2_to_the_31_elements(parity_gpu: str):
    rows = PAST // WIDE + 300
    case = Case(m=rows, h=WIDE)
    inputs = QuantInputs(x=numbers(rows, WIDE, parity_gpu))
    looked_at(find("ours_act_quant"), case, inputs, around(WIDE, rows))


def test_an_activation_of_more_than_2_to_the_31_elements(parity_gpu: str):
    """In its input, and in its output."""
    for width in (WIDE // 2, WIDE):
        rows = PAST // WIDE + 300
        case = Case(m=rows, i=width)
        expert = torch.zeros(rows, dtype=torch.int64, device=parity_gpu)
        counts = torch.tensor([rows], dtype=torch.int32, device=parity_gpu)
        inputs = GateUpRows(
            rows=numbers(rows, 2 * width, parity_gpu), counts=counts, expert=expert, limit=None,
            alpha=1.0, beta=0.0,
        )  # fmt: skip
        chosen = torch.cat([around(2 * width, rows), around(width, rows)[1:4]]).clamp(max=rows - 1)
        looked_at(find("ours_swiglu_quant"), case, inputs, chosen)


def test_a_sum_of_more_than_2_to_the_31_elements(parity_gpu: str):
    tokens, k = PAST // WIDE // 2 + 300, 2
    case = Case(m=tokens, k=k, h=WIDE)
    ids = torch.zeros((tokens, k), dtype=torch.int32, device=parity_gpu)
    weights = torch.rand((tokens, k), device=parity_gpu)
    inputs = ExpertRows(
        rows=numbers(tokens * k, WIDE, parity_gpu).view(tokens, k, WIDE), weights=weights, ids=ids,
        expert_map=None, expert=torch.zeros(tokens * k, dtype=torch.int64, device=parity_gpu),
    )  # fmt: skip
    looked_at(find("ours_combine"), case, inputs, around(k * WIDE, tokens))


@pytest.mark.parametrize("name", ["ours_decode", "ours_large"])
def test_every_token_to_the_last_of_256_experts_at_full_size(name: str, parity_gpu: str):
    """E * N * K = 6,442,450,944: an int32 offset wraps to a positive one, of another expert."""
    case = Case(m=4, e=256, k=2, h=6144, i=2048, routing=Routing.LAST)
    assert (255 * 4096 * 6144) % 2**32 < PAST < 255 * 4096 * 6144
    kernel = dataclasses.replace(find(name), contract=ONLY_BITS)
    verdicts = list(check(kernel, case, parity_gpu))
    assert verdicts[-1].compared == 4 * 6144
    assert not [v.message for v in verdicts if v.failed]
