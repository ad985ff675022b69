"""Programs that run as one on the virtual GPU give what they give one after another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux only")
import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_parity.kernels import virtual_gpu as vg
from moe_parity.kernels.virtual_gpu import abreast
from moe_parity.kernels.virtual_gpu.builder import VirtualBuilder
from moe_parity.kernels.virtual_gpu.memory import Memory

PROGRAMS = 24


@triton.jit
def straight(x_ptr, o_ptr, FORM: tl.constexpr):
    """One row of 8 for each program, with operations that know of shapes."""
    program = tl.program_id(0)
    lane = tl.arange(0, 8)
    x = tl.load(x_ptr + program * 8 + lane)
    if FORM == "sum":
        x = x + tl.sum(x, 0)
    elif FORM == "extremes":
        x = tl.max(x, 0) - x * tl.min(x, 0) + tl.argmax(x, 0)
    elif FORM == "scan":
        x = tl.cumsum(x, 0, reverse=True)
    elif FORM == "shapes":
        y = tl.trans(tl.reshape(x, (2, 4)))
        a, b = tl.split(y)
        x = tl.reshape(tl.trans(tl.join(b, a + program)), (8,))
    elif FORM == "gather":
        x = tl.gather(x, (lane + program) % 8, 0)
    elif FORM == "choice":
        x = tl.where(program % 3 == 1, x, tl.full((8,), 7, tl.int32))
    elif FORM == "same for all":
        x = tl.load(x_ptr + lane, mask=lane < program, other=-program)
    elif FORM == "two axes":
        whole = tl.load(x_ptr + tl.arange(0, 4)[:, None] * 8 + lane[None, :])
        x = x + tl.sum(whole * program, 0) + tl.sum(tl.max(whole, 1, keep_dims=True) + x, 0)
    elif FORM == "compared":
        x = (x > program).to(tl.int32) + ((x < 4) and (program > 2)).to(tl.int32)
    tl.store(o_ptr + program * 8 + lane, x)


FORMS = [
    "sum", "extremes", "scan", "shapes", "gather", "choice", "same for all", "two axes", "compared",
]  # fmt: skip


@triton.jit
def parting(x_ptr, o_ptr, count, FORM: tl.constexpr):
    """Every program adds to its own element, which it has changed before the ways part."""
    program = tl.program_id(0)
    own = o_ptr + program
    tl.store(own, tl.load(own) + 1)
    if FORM == "returns":
        if tl.load(x_ptr + program) > 4:
            return
    elif FORM == "nested":
        if program % 2 == 0:
            if program > 10:
                tl.store(own, tl.load(own) + 100)
            elif program > 5:
                tl.store(own, tl.load(own) + 200)
    elif FORM == "lengths":
        for n in range(program, count, 5):
            tl.store(own, tl.load(own) * 2 + n)
    elif FORM == "bounds":
        for n in range(program, program + 3):
            tl.store(own, tl.load(own) * 3 + n)
    elif FORM == "each its own":
        left = program
        while left > 0:
            tl.store(own, tl.load(own) + left)
            left -= 1
    tl.store(own, tl.load(own) + 1000)


@triton.jit
def products(a_ptr, b_ptr, o_ptr):
    """One block of 16 x 16 for each program, of its own a and everybody's b."""
    m, k = tl.arange(0, 16), tl.arange(0, 32)
    a = tl.load(a_ptr + tl.program_id(0) * 512 + m[:, None] * 32 + k[None, :])
    b = tl.load(b_ptr + m[None, :] * 32 + k[:, None])
    at = o_ptr + tl.program_id(0) * 256 + m[:, None] * 16 + m[None, :]
    tl.store(at, tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)))


@triton.jit
def meeting(x_ptr, o_ptr, FORM: tl.constexpr):
    """Programs that touch each other's elements."""
    program = tl.program_id(0)
    if FORM == "read after":
        tl.store(o_ptr + program, program)
        tl.store(x_ptr + program, tl.load(o_ptr + (program + 1) % 4))
    elif FORM == "read before":
        found = tl.load(o_ptr + (program + 1) % 4)
        tl.store(o_ptr + program, found + 1)
    elif FORM == "one for all":
        tl.store(o_ptr, program)
    elif FORM == "the same":
        tl.store(o_ptr, 7)
    elif FORM == "counted":
        tl.atomic_add(o_ptr, program)
    elif FORM == "read by many":
        found = tl.load(x_ptr)
        tl.store(x_ptr, found + program - program + 1, mask=program == 3)
        tl.store(o_ptr + program, found)


@triton.jit
def changing(o_ptr, LATER: tl.constexpr):
    """One program stores what all store, and then something else; its part runs last."""
    tl.device_assert(tl.num_programs(0) > 1)
    if tl.program_id(0) == LATER:
        tl.store(o_ptr, 5)
        tl.store(o_ptr, 6)
    else:
        tl.store(o_ptr, 5)


@triton.jit
def rounding(x_ptr, count_ptr, o_ptr):
    """Scale an element of its own, then count with an atomic."""
    program = tl.program_id(0)
    tl.store(o_ptr + program, tl.load(x_ptr + program) * 1.5)
    tl.atomic_add(count_ptr, 1)


@triton.jit
def talking(o_ptr):
    """Let the last program print, and then meet the first."""
    program = tl.program_id(0)
    if program == 3:
        tl.device_print("last", program)
    tl.store(o_ptr + program % 3, program)


@triton.jit
def counting(x_ptr, o_ptr):
    """Numbers as conditions, each its own."""
    program = tl.program_id(0)
    if tl.load(x_ptr + program):
        tl.store(o_ptr + program, program)


@triton.jit
def again(o_ptr, limit):
    """Store many times over, the last programs outside."""
    own = o_ptr + tl.program_id(0)
    for n in range(40):
        tl.store(own, tl.load(own) * 3 + n)
    tl.device_assert(tl.program_id(0) < limit)


@triton.jit
def outside(o_ptr, limit):
    """Program ``limit`` leaves the tensor, after it and those before have stored."""
    program = tl.program_id(0)
    tl.store(o_ptr + program, program)
    tl.device_assert(program < limit)
    tl.store(o_ptr + program, -program)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the groups that begin."""
    sizes: list[int] = []
    take = VirtualBuilder.take

    def noted(builder: VirtualBuilder, programs: Any) -> None:
        sizes.append(len(programs))
        take(builder, programs)

    monkeypatch.setattr(VirtualBuilder, "take", noted)
    return sizes


def both(kernel: Any, count: int, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """Launch as one and one after another; return what it leaves in its tensors and says."""

    def ran() -> tuple[list[Tensor], Any]:
        mine = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        try:
            said: Any = asdict(vg.launch(kernel, (count,), *mine, **options))
        except (vg.Race, vg.OutOfBounds, AssertionError) as error:
            said = str(error)
        return [a for a in mine if isinstance(a, Tensor)], said

    together = ran()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(abreast, "run", lambda *_: False)
        singly = ran()
    for one, other in zip(together[0], singly[0], strict=True):
        assert torch.equal(one, other)
    assert together[1] == singly[1]
    return together


def numbers(count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.int32) * 37 % 11) - 3


@pytest.mark.parametrize("form", FORMS)
def test_a_group_computes_what_its_programs_compute(form: str, groups: list[int]) -> None:
    out, _ = both(
        straight, PROGRAMS, numbers(8 * PROGRAMS), torch.zeros(8 * PROGRAMS, dtype=torch.int32),
        FORM=form,
    )  # fmt: skip
    assert groups == [PROGRAMS, *[1] * PROGRAMS]
    rows = out[1].reshape(PROGRAMS, 8)
    assert len({tuple(row.tolist()) for row in rows}) > 2, "the programs have results of their own"


@pytest.mark.parametrize(
    ("form", "begun"),
    [
        ("returns", 3),
        ("bounds", 1),
        ("nested", 7),
        ("lengths", 6),
    ],
)
def test_where_ways_part_each_group_begins_anew(form: str, begun: int, groups: list[int]) -> None:
    x, out = numbers(PROGRAMS), torch.zeros(PROGRAMS, dtype=torch.int32)
    both(parting, PROGRAMS, x, out, 24, FORM=form)
    assert len(groups) == begun + PROGRAMS


def test_programs_that_all_part_run_singly_in_the_end(groups: list[int]) -> None:
    out = torch.zeros(PROGRAMS, dtype=torch.int32)
    both(parting, PROGRAMS, numbers(PROGRAMS), out, 24, FORM="each its own")
    assert len(groups) - PROGRAMS < 2 * abreast.PARTINGS + PROGRAMS + 2


def test_dots_of_a_group_are_those_of_its_programs(groups: list[int]) -> None:
    a = (torch.arange(6 * 512) * 89 % 120).to(torch.uint8)
    b = (torch.arange(512) * 57 % 110).to(torch.uint8)
    both(products, 6, a, b, torch.zeros(6 * 256))
    assert groups[0] == 6


@pytest.mark.parametrize(
    "form", ["read after", "read before", "one for all", "the same", "counted", "read by many"]
)
def test_what_programs_share_is_judged_one_after_another(form: str) -> None:
    out = torch.zeros(4, dtype=torch.int32)
    _, said = both(meeting, 4, torch.full((4,), 3, dtype=torch.int32), out, FORM=form)
    judged = {"the same", "counted"}
    assert isinstance(said, str) == (form not in judged)


@pytest.mark.parametrize("order", [{}, {"backwards": True}, {"order_seed": 5}])
def test_an_error_leaves_what_the_programs_before_it_left(order: dict[str, Any]) -> None:
    out, said = both(outside, PROGRAMS, torch.zeros(32, dtype=torch.int32), 9, **order)
    assert "device_assert" in said
    assert 0 < int((out[0] < 0).sum()) < 9 or order


def test_blocks_decide_how_many_programs_fit(
    groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abreast, "ELEMENTS", 32)
    out = torch.zeros(8 * PROGRAMS, dtype=torch.int32)
    both(straight, PROGRAMS, numbers(8 * PROGRAMS), out, FORM="sum")
    assert groups[: 1 + PROGRAMS // 4] == [PROGRAMS, *[4] * (PROGRAMS // 4)]


def test_memory_that_a_group_undid_is_as_nobody_had_written_it() -> None:
    out = torch.zeros(PROGRAMS, dtype=torch.int32)
    with vg.watching():
        vg.unwritten(out)
        with pytest.raises(vg.UnwrittenRead, match=r"element \[0\] of o_ptr"):
            vg.launch(parting, (PROGRAMS,), numbers(PROGRAMS), out, 24, FORM="nested")
        with pytest.raises(AssertionError, match="device_assert"):
            vg.launch(outside, (PROGRAMS,), out, 9)  # writes elements 0 to 9
        with pytest.raises(vg.UnwrittenRead, match=r"element \[2\] of x_ptr"):
            vg.launch(straight, (1,), out[8:16], torch.zeros(8, dtype=torch.int32), FORM="sum")


@pytest.mark.parametrize("order", [{}, {"backwards": True}])
@pytest.mark.parametrize("later", [0, 3])
def test_the_order_of_groups_hides_no_race(later: int, order: dict[str, Any]) -> None:
    _, said = both(changing, 4, torch.zeros(1, dtype=torch.int32), LATER=later, **order)
    first = later == (3 if order else 0)  # then the others, which store 5, find 6
    assert isinstance(said, str) == first or "both store" in said


def test_what_a_launch_has_used_is_said_though_it_began_again() -> None:
    count = torch.zeros(1, dtype=torch.int32)
    _, said = both(rounding, 4, torch.ones(4), count, torch.zeros(4))
    assert [name.split(":")[0] for name in said["operations"]] == ["fmul fp32 fp32 -> fp32"]


def test_a_launch_that_prints_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(vg.Race):
        vg.launch(talking, (4,), torch.zeros(3, dtype=torch.int32))
    assert capsys.readouterr().out.count("last") == 1


def test_numbers_part_programs_by_their_truth(groups: list[int]) -> None:
    both(counting, PROGRAMS, numbers(PROGRAMS), torch.zeros(PROGRAMS, dtype=torch.int32))
    assert len(groups) == 3 + PROGRAMS


@pytest.mark.parametrize("limit", [PROGRAMS, PROGRAMS - 1])
def test_many_stores_are_undone_from_copies(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, settle = [], Memory.settle

    def settled(memory: Memory) -> None:
        settle(memory)
        lengths.append(len(memory.undo or ()))

    monkeypatch.setattr(Memory, "settle", settled)
    monkeypatch.setattr(abreast, "MOST", 4)
    monkeypatch.setattr(abreast, "NOTED", 0)
    start = torch.arange(PROGRAMS, dtype=torch.int32)
    out, _ = both(again, PROGRAMS, start, limit)
    assert lengths
    assert set(lengths) == {1}
    assert (out[0] != start).all()
