"""Memory from torch.empty in Triton kernels on the virtual GPU: left, read, written past."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux only")
import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.kernels import Call
from moe_parity.kernels import virtual_gpu as vg
from moe_parity.references.language import Case
from moe_parity.references.recipes.ours import OURS
from moe_parity.suites.planted import Run, kernel_of

CASES = {
    "act_quant": Case(m=3, h=256),
    "fc1": Case(m=3, e=2, k=1, h=128, i=64),
    "layer": Case(m=2, e=2, k=1, h=128, i=128),
}
WIDTH = 64


@triton.jit
def copy(x_ptr, o_ptr, n, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + i + shift, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def copied(value: Tensor, out: Tensor, count: int | None = None, shift: int = 0) -> Tensor:
    count = value.numel() if count is None else count
    vg.dispatch(copy, (-(-count // WIDTH),), value.contiguous(), out, count, shift, BLOCK=WIDTH)
    return out


def right(call: Call) -> dict[str, Tensor]:
    made = call.stage.reference(call.case, call.inputs, OURS)
    return {name: copied(value, torch.empty_like(value)) for name, value in made.items()}


def leaves_the_last_number(call: Call) -> dict[str, Tensor]:
    out = right(call)
    name, value = list(out.items())[-1]
    return out | {name: copied(value, torch.empty_like(value), value.numel() - 1)}


def writes_past(call: Call) -> dict[str, Tensor]:
    out = right(call)
    value = list(out.values())[-1]
    copied(value, torch.empty_like(value), shift=1)
    return out


def reads_scratch(call: Call) -> dict[str, Tensor]:
    """Copy all of a buffer of which torch has filled the first half."""
    out, scratch = right(call), torch.empty(2 * WIDTH)
    scratch[:WIDTH] = 0
    copied(scratch, torch.empty_like(scratch))
    return out


def reads_what_torch_wrote(call: Call) -> dict[str, Tensor]:
    """Every byte has the value of the poison, and torch wrote it: nobody's fault."""
    out, ids = right(call), torch.empty(WIDTH, dtype=torch.int32)
    torch.full((WIDTH,), -1, dtype=torch.int32, out=ids)
    columns = torch.empty(4, WIDTH, dtype=torch.int32)
    for column in columns.unbind(1):
        column.fill_(-1)
    own = call.new("scratch", (WIDTH,), dtype=torch.int32)
    own[: WIDTH // 2] = -1
    own[WIDTH // 2 :].copy_(ids[WIDTH // 2 :])
    for filled in (ids, columns, own):
        copied(filled, torch.empty_like(filled))
    return out


def judged(stage: str, run: Run) -> dict[str, Verdict]:
    kernel = dataclasses.replace(kernel_of(stage, run), triton=True)
    return {v.check: v for v in check(kernel, CASES[stage], "cpu") if v.failed}


@pytest.mark.parametrize("stage", CASES)
def test_a_launch_into_memory_from_torch_is_green(stage: str):
    assert not judged(stage, right)
    assert not judged(stage, reads_what_torch_wrote)


@pytest.mark.parametrize("stage", CASES)
def test_a_number_that_a_launch_leaves_is_unwritten(stage: str):
    found = judged(stage, leaves_the_last_number)
    assert found["write_set"].cause == "unwritten"
    assert "; 1 of " in found["write_set"].message


@pytest.mark.parametrize("stage", CASES)
@pytest.mark.parametrize(
    ("fault", "cause"), [(writes_past, "out_of_bounds"), (reads_scratch, "unwritten_read")]
)
def test_a_launch_that_leaves_its_memory_ends_there(stage: str, fault: Run, cause: str):
    found = judged(stage, fault)
    assert (found["exact"].cause_kind, found["exact"].cause) == ("memory", cause)
