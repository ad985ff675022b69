"""Races, memory that nobody wrote and the orders of programs: what the virtual GPU sees happen."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux only")
import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_parity.kernels import virtual_gpu as vg
from moe_parity.kernels import written
from moe_parity.kernels.shadow import zeros
from moe_parity.kernels.virtual_gpu import spans
from moe_parity.suites import racing

THIS = Path(__file__).name


@triton.jit
def touch(a_ptr, b_ptr, FIRST: tl.constexpr, SECOND: tl.constexpr, VALUE: tl.constexpr):
    """Program 0 does FIRST to a[1], program 1 does SECOND to b[1], program 2 stores to a[0]."""
    program = tl.program_id(0)
    if program == 0:
        if FIRST == "load":
            tl.load(a_ptr + 1)
        elif FIRST == "store":
            tl.store(a_ptr + 1, 5)
        elif FIRST == "atomic":
            tl.atomic_add(a_ptr + 1, 5)
    elif program == 1:
        if SECOND == "load":
            tl.load(b_ptr + 1)
        elif SECOND == "store":
            tl.store(b_ptr + 1, VALUE)
        elif SECOND == "atomic":
            tl.atomic_add(b_ptr + 1, 5)
        elif SECOND == "in place":
            tl.store(b_ptr + 1, tl.sum(tl.load(b_ptr + tl.arange(0, 4))))
    else:
        tl.store(a_ptr, 9)


@triton.jit
def several(x_ptr, o_ptr, EACH: tl.constexpr):
    """Eight lanes store to eight / EACH elements."""
    lane = tl.arange(0, 8)
    tl.store(o_ptr + lane // EACH, tl.load(x_ptr + lane))


@triton.jit
def last_adds_up(parts_ptr, count_ptr, o_ptr, SEM: tl.constexpr):
    """Each of four programs stores a part; the last to come, by a counter, adds them up."""
    program = tl.program_id(0)
    tl.store(parts_ptr + program, program + 1)
    if tl.atomic_add(count_ptr, 1, sem=SEM) == 3:
        tl.store(o_ptr, tl.sum(tl.load(parts_ptr + tl.arange(0, 4))))


@triton.jit
def narrow_and_wide(wide_ptr, narrow_ptr):
    """Program 0 stores the words 0 and 1, program 1 the byte 6."""
    if tl.program_id(0) == 0:
        tl.store(wide_ptr + tl.arange(0, 2), 7)
    else:
        tl.store(narrow_ptr + 6, 1)


@triton.jit
def own_bytes(wide_ptr, narrow_ptr):
    """Program 0 stores the word 0, program 1 the bytes 4 and 5, program 2 the byte 6."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(wide_ptr, 7)
    elif program == 1:
        tl.store(narrow_ptr + 4 + tl.arange(0, 2), 1)
    else:
        tl.store(narrow_ptr + 6, 1)


@triton.jit
def bump(x_ptr, step):
    """Each program adds 1 to its own element."""
    place = x_ptr + tl.program_id(0).to(tl.int64) * step
    tl.store(place, tl.load(place) + 1)


@triton.jit
def copy(x_ptr, o_ptr, n, STEP: tl.constexpr):
    """Copy elements 0 to n - 1 of every STEP."""
    i = tl.arange(0, 16)
    tl.store(o_ptr + i, tl.load(x_ptr + i * STEP, mask=i < n), mask=i < n)


def ints(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


# --- races between programs ----------------------------------------------------------------------

ACCESSES = ("load", "store", "atomic")


@pytest.mark.parametrize("backwards", [False, True], ids=["ascending", "backwards"])
@pytest.mark.parametrize("second", ACCESSES)
@pytest.mark.parametrize("first", ACCESSES)
def test_two_programs_race_unless_both_load_or_both_are_atomic(
    first: str, second: str, backwards: bool
) -> None:
    memory = ints(4)
    options: dict[str, Any] = {"FIRST": first, "SECOND": second, "VALUE": 6}
    options["backwards"] = backwards
    if first == second != "store":
        vg.launch(touch, (3,), memory, memory, **options)
        return
    with pytest.raises(vg.Race) as error:
        vg.launch(touch, (3,), memory, memory, **options)
    text = str(error.value)
    assert "touch" in text
    assert "(0, 0, 0)" in text
    assert "(1, 0, 0)" in text
    assert len(set(re.findall(rf"line (\d+) of {THIS}", text))) == 2
    assert re.search(r"element \[1\] of [ab]_ptr \(int32 \[4\]\)", text)


def test_a_program_may_do_anything_to_its_own_element() -> None:
    x = ints(8)
    vg.launch(bump, (8,), x, 1)
    vg.launch(bump, (8,), x, 1, backwards=True)
    assert (x == 2).all()


def test_a_load_of_its_own_does_not_hide_that_of_another() -> None:
    memory = ints(4)
    with pytest.raises(
        vg.Race, match=r"stores element \[1\] .*, which program \(0, 0, 0\) .*loads"
    ):
        vg.launch(touch, (2,), memory, memory, FIRST="load", SECOND="in place", VALUE=0)


def test_arguments_that_overlap_are_one_memory() -> None:
    pool = ints(8)
    options: dict[str, Any] = {"FIRST": "store", "SECOND": "load", "VALUE": 0}
    vg.launch(touch, (2,), pool[:4], pool[4:], **options)
    with pytest.raises(vg.Race, match=r"element \[1\] of b_ptr \(int32 \[2\]\), which program"):
        vg.launch(touch, (2,), pool[2:], pool[2:4], **options)
    vg.launch(touch, (2,), pool[2:], pool[1:4], **options)


def test_an_element_in_two_sizes_is_one_memory() -> None:
    words = ints(4)
    narrow = words.view(torch.uint8)
    for backwards in (False, True):
        with pytest.raises(vg.Race, match="narrow_and_wide"):
            vg.launch(narrow_and_wide, (2,), words, narrow, backwards=backwards)
        vg.launch(own_bytes, (3,), words, narrow, backwards=backwards)


def test_equal_bits_of_two_stores_are_no_race_where_the_first_was_one_of_the_launch() -> None:
    options: dict[str, Any] = {"FIRST": "store", "SECOND": "store"}
    memory = ints(4)
    vg.launch(touch, (2,), memory, memory, VALUE=5, **options)
    with pytest.raises(vg.Race, match="both store element"):
        vg.launch(touch, (2,), memory, memory, VALUE=6, **options)
    memory[1] = 5  # as it was before, by chance
    options = {"FIRST": "store", "SECOND": "load", "VALUE": 0, "backwards": True}
    for programs in (2, 3):
        with pytest.raises(vg.Race, match="loads"):
            vg.launch(touch, (programs,), memory, memory, **options)


@pytest.mark.parametrize("backwards", [False, True], ids=["ascending", "backwards"])
def test_what_an_atomic_hands_over_is_no_race(backwards: bool) -> None:
    out = ints(1)
    vg.launch(last_adds_up, (4,), ints(4), ints(1), out, SEM="acq_rel", backwards=backwards)
    assert out == 10
    with pytest.raises(vg.Race, match="parts_ptr"):
        vg.launch(last_adds_up, (4,), ints(4), ints(1), out, SEM="relaxed", backwards=backwards)


# --- races between lanes -------------------------------------------------------------------------


def test_lanes_that_store_different_values_to_one_element_race() -> None:
    vg.launch(several, (1,), torch.arange(8), torch.zeros(8, dtype=torch.int64), EACH=1)
    vg.launch(several, (1,), torch.arange(8) // 2, torch.zeros(4, dtype=torch.int64), EACH=2)
    nan = torch.full((8,), torch.nan)
    vg.launch(several, (1,), nan, torch.zeros(4), EACH=2)
    with pytest.raises(vg.Race, match=r"different values to element \[0\] of o_ptr .* several lan"):
        vg.launch(several, (1,), torch.arange(8), torch.zeros(4, dtype=torch.int64), EACH=2)
    # zeros of both signs are equal numbers and different bits
    with pytest.raises(vg.Race, match="several lanes"):
        vg.launch(several, (1,), torch.tensor([0.0, -0.0] * 4), torch.zeros(4), EACH=2)


# --- what it costs -------------------------------------------------------------------------------


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_tensor_of_gigabytes_costs_what_is_touched() -> None:
    x = torch.from_numpy(zeros(6 << 30, np.dtype(np.uint8)))
    before = _resident()
    with vg.watching():
        vg.unwritten(x)
        for start in (0, 3 << 30):
            vg.mark(x[start : start + 4])
        vg.launch(bump, (2,), x, 3 << 30)
        # the same memory in another size
        vg.launch(bump, (2,), x.view(torch.int32)[: (3 << 28) + 1], 3 << 28, backwards=True)
        assert x[0] == x[3 << 30] == 2
    finer = spans._finer(zeros(1 << 28, np.dtype(np.int32)), 4)
    assert not finer[:: 1 << 20].any()
    assert _resident() - before < 64 << 20


# --- memory that nobody wrote --------------------------------------------------------------------


def test_a_load_of_what_nobody_wrote_is_named() -> None:
    x, o = torch.ones(4, 4), torch.zeros(16)
    vg.unwritten(x)  # nobody watches
    with vg.watching():
        vg.launch(copy, (1,), x, o, 16, STEP=1)
        vg.unwritten(x)
        vg.mark(x[0])
        vg.launch(copy, (1,), x, o, 4, STEP=1)
        with pytest.raises(vg.UnwrittenRead) as error:
            vg.launch(copy, (1,), x, o, 6, STEP=1)
    text = str(error.value)
    assert re.match(rf"copy \(line \d+ of {THIS}\), program \(0, 0, 0\): element \[1, 0\] of", text)
    assert "x_ptr (float32 [4, 4])" in text
    vg.launch(copy, (1,), x, o, 16, STEP=1)
    assert written.current() is None


def test_what_a_launch_stores_is_written() -> None:
    x, o, p = torch.ones(16), torch.zeros(16), torch.zeros(16)
    with vg.watching():
        vg.unwritten(o)
        with pytest.raises(vg.UnwrittenRead):
            vg.launch(copy, (1,), o, p, 5, STEP=1)
        vg.launch(copy, (1,), x, o, 5, STEP=1)
        vg.launch(copy, (1,), o, p, 5, STEP=1)
        with pytest.raises(vg.UnwrittenRead, match=r"element \[5\]"):
            vg.launch(copy, (1,), o, p, 6, STEP=1)


def test_an_atomic_reads_as_well() -> None:
    counts = ints(4)
    with vg.watching():
        vg.unwritten(counts)
        with pytest.raises(vg.UnwrittenRead, match=r"element \[0\] of count_ptr"):
            vg.launch(racing.ranks, (1,), counts, ints(4))
        vg.mark(counts[:1])
        vg.launch(racing.ranks, (2,), counts, ints(8))


def test_marks_of_a_strided_view_are_those_of_its_elements() -> None:
    x, o = torch.ones(64), torch.zeros(16)
    with vg.watching():
        vg.unwritten(x[7:9])  # the whole storage
        vg.mark(x[::2][:16])
        vg.launch(copy, (1,), x, o, 16, STEP=2)
        with pytest.raises(vg.UnwrittenRead, match=r"element \[1\]"):
            vg.launch(copy, (1,), x, o, 2, STEP=1)
        with pytest.raises(vg.UnwrittenRead, match=r"element \[32\]"):
            vg.launch(copy, (1,), x[:46], o, 12, STEP=4)


def test_a_byte_that_has_changed_was_written_by_somebody() -> None:
    x, o = ints(16).fill_(-1), ints(16)
    with vg.watching():
        vg.unwritten(x, fill=0xFF)
        x[:3] = 0
        vg.launch(copy, (1,), x, o, 3, STEP=1)
        with pytest.raises(vg.UnwrittenRead, match=r"element \[3\]"):
            vg.launch(copy, (1,), x, o, 4, STEP=1)


def test_memory_that_was_freed_is_nobodys() -> None:
    with vg.watching():
        watch = written.current()
        assert watch is not None
        x, kept = torch.empty(16), torch.empty(16)
        vg.unwritten(x)
        vg.unwritten(kept)
        place, size = x.data_ptr(), x.nbytes
        assert watch.touched(place, place + size)
        del x
        gc.collect()
        assert not watch.touched(place, place + size)
        assert len(watch.blocks) == 1


# --- orders --------------------------------------------------------------------------------------


def test_programs_and_lanes_run_backwards() -> None:
    seen = []
    for context in (None, vg.reversed_order()):
        count, out = ints(1), ints(8)
        if context is None:
            vg.dispatch(racing.ranks, (2,), count, out)
        else:
            with context:
                vg.dispatch(racing.ranks, (2,), count, out)
        seen.append(out.tolist())
    assert seen == [list(range(8)), list(range(7, -1, -1))]
    with pytest.raises(ValueError, match="not both"):
        vg.launch(racing.ranks, (1,), ints(1), ints(8), backwards=True, order_seed=3)


def test_no_shuffled_order_is_the_ascending_one() -> None:
    """Of two programs, half of the permutations are."""
    for seed in range(12):
        count, out = ints(1), ints(8)
        with vg.shuffled(seed):
            vg.dispatch(racing.ranks, (2,), count, out)
        assert sorted(out.tolist()) == list(range(8))
        assert min(out[4:]) < min(out[:4])
