"""Tensor descriptors on the virtual GPU: boxes over every edge, and what no descriptor may be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux only")
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_parity.harness.calling.recording import Recording
from moe_parity.kernels import virtual_gpu as vg
from moe_parity.kernels.virtual_gpu.launcher import LaunchReport
from moe_parity.kernels.virtual_gpu.specialize import forms
from moe_parity.references.chips.hopper import WGMMA_FP8

THIS = Path(__file__).name


@triton.jit
def move(source, target, row, column, to_row, to_column):
    """Load a box and store it elsewhere."""
    target.store([to_row, to_column], source.load([row, column]))


@triton.jit
def move_made(
    x_ptr, o_ptr, rows, columns, pitch, step, row, column, to_row, to_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Make both descriptors, load a box and store it elsewhere."""
    box: tl.constexpr = [ROWS, COLUMNS]
    x = tl.make_tensor_descriptor(x_ptr, [rows, columns], [pitch, step], box, PADDING)
    o = tl.make_tensor_descriptor(o_ptr, [rows, columns], [pitch, step], box)
    o.store([to_row, to_column], x.load([row, column]))


@triton.jit
def other_forms(x, o_ptr, OP: tl.constexpr):
    rows, lane = tl.arange(0, 8), tl.arange(0, 16)
    if OP == "gather":
        box = x.gather(rows, 0)
    elif OP == "scatter":
        box = tl.zeros((8, 16), tl.float32)
        x.scatter(box, rows, 0)
    else:
        box = tl.zeros((1, 16), tl.float32)
        x.atomic_add([0, 0], box)
    tl.store(o_ptr + lane, tl.max(box, 0))


@triton.jit
def row_for_each_program(x, step):
    """Program p stores a box of ones at row p * step."""
    x.store([tl.program_id(0) * step, 0], tl.full((4, 16), 1, tl.uint8))


@triton.jit
def product(a, b, o_ptr):
    """Multiply rows 64 .. 127 of a by those of expert 1 of b, which is [E, N, K]."""
    w = tl.reshape(b.load([1, 0, 0]), (64, 32)).to(tl.float8e4nv, bitcast=True)
    x = tl.trans(a.load([64, 0])).to(tl.float8e4nv, bitcast=True)
    i = tl.arange(0, 64)
    tl.store(o_ptr + i[:, None] * 64 + i[None, :], tl.dot(w, x))


SHAPE = (20, 48)
EDGES = ((0, 0), (13, 32), (-3, -16), (17, 40), (24, 0), (0, 48), (-8, 0), (5, 8))
"""Offsets of boxes of 8 x 32: inside, over each edge, past each edge, astride nothing."""


def numbers(dtype: torch.dtype = torch.int16, sign: int = 1) -> Tensor:
    """Return all numbers different, [20, 48] in rows of a pitch of 56."""
    memory = torch.arange(1, SHAPE[0] * 56 + 1, dtype=torch.int32).view(SHAPE[0], 56)
    return (sign * memory).to(dtype)[:, : SHAPE[1]]


def boxed(x: Tensor, row: int, column: int, outside: float = 0) -> Tensor:
    """Return the box of 8 x 32 at an offset, element by element."""
    made = torch.full((8, 32), outside, dtype=x.dtype)
    for i in range(8):
        for j in range(32):
            if 0 <= row + i < x.shape[0] and 0 <= column + j < x.shape[1]:
                made[i, j] = x[row + i, column + j]
    return made


def put(x: Tensor, row: int, column: int, box: Tensor) -> Tensor:
    """Return ``x`` with the part of a box that lies inside it."""
    made = x.clone()
    for i in range(8):
        for j in range(32):
            if 0 <= row + i < x.shape[0] and 0 <= column + j < x.shape[1]:
                made[row + i, column + j] = box[i, j]
    return made


def moved(
    x: Tensor, o: Tensor, at: tuple[int, int], to: tuple[int, int], host: bool, pad: str = "zero"
) -> LaunchReport:
    if host:
        made = TensorDescriptor(x, x.shape, x.stride(), [8, 32], pad)
        return vg.launch(move, (1,), made, TensorDescriptor.from_tensor(o, [8, 32]), *at, *to)
    return vg.launch(
        move_made, (1,), x, o, *x.shape, *x.stride(), *at, *to, ROWS=8, COLUMNS=32, PADDING=pad
    )  # fmt: skip


@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
def test_a_box_loads_zero_outside_and_is_not_stored_there(host: bool) -> None:
    x = numbers()
    for at, to in zip(EDGES, EDGES[1:] + EDGES[:1], strict=True):
        o = numbers(sign=-1)
        expected = put(o, *to, boxed(x, *at))
        report = moved(x, o, at, to, host)
        assert torch.equal(o, expected), (at, to)
        gaps = o.as_strided((19, 8), (56, 1), 48)
        assert torch.equal(gaps, numbers(sign=-1).as_strided((19, 8), (56, 1), 48))
        assert report.bytes_loaded == 2 * int((boxed(x, *at) != 0).sum())
        ones = torch.ones((8, 32), dtype=x.dtype)
        assert report.bytes_stored == 2 * int(put(torch.zeros_like(x), *to, ones).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
def test_a_box_loads_nan_outside_where_that_is_asked_for(host: bool, dtype: torch.dtype) -> None:
    x, o = numbers(dtype), numbers(dtype, sign=-1)
    expected = put(o, 0, 0, boxed(x, -3, 32, torch.nan))
    moved(x, o, (-3, 32), (0, 0), host, "nan")
    assert torch.equal(o.isnan(), expected.isnan())
    assert torch.equal(o.nan_to_num(), expected.nan_to_num())


def test_padding_with_nan_is_for_floats_that_the_gpu_pads() -> None:
    x = numbers().to(torch.uint8).contiguous()
    with pytest.raises(ValueError, match="not supported for integer"):
        moved(x, x.clone(), (0, 0), (0, 0), False, "nan")
    codes = x.view(torch.float8_e4m3fn)
    for host in (True, False):
        with pytest.raises(vg.UnmodelledOperation, match="padded with NaN"):
            moved(codes, codes.clone(), (0, 0), (0, 0), host, "nan")


# --- the tensor under a descriptor ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "at", "element"),
    [
        ((21, 48), (56, 1), (16, 0), "8 bytes past the end"),
        ((20, 48), (64, 1), (16, 0), r"\d+ bytes past the end"),
        ((20, 64), (56, 1), (16, 32), r"\d+ bytes past the end"),
    ],
    ids=["rows", "outer stride", "columns"],
)
@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
def test_a_descriptor_that_leads_out_of_its_tensor_is_named(
    host: bool, shape: tuple[int, int], strides: tuple[int, int], at: tuple[int, int], element: str
) -> None:
    pool = torch.zeros(8000, dtype=torch.int16)  # what lies behind is somebody's memory
    x, o = pool[: 19 * 56 + 48].as_strided(SHAPE, (56, 1)), torch.zeros(8, 32, dtype=torch.int16)
    wrong = TensorDescriptor(x, list(shape), list(strides), [8, 32])
    given: dict[str, Any] = {"ROWS": 8, "COLUMNS": 32, "PADDING": "zero"}
    with pytest.raises(vg.OutOfBounds) as error:
        vg.launch(
            *((move, (1,), wrong, TensorDescriptor.from_tensor(o, [8, 32])) if host else
              (move_made, (1,), x, pool, *shape, *strides)),
            *at, 0, 0, **({} if host else given),
        )  # fmt: skip
    name = "move" if host else "move_made"
    text = str(error.value)
    assert re.match(rf"{name} \(line \d+ of {THIS}\), program \(0, 0, 0\): a load of 2 bytes", text)
    of = "source" if host else "x_ptr"
    assert re.search(rf"of {of} \(int16 \[20, 48\]\)", text), text
    assert "outside the tensors handed over" in text


def test_programs_whose_boxes_overlap_race() -> None:
    x = torch.zeros(18, 16, dtype=torch.uint8)
    made = TensorDescriptor.from_tensor(x, [4, 16])
    vg.launch(row_for_each_program, (5,), made, 4)
    assert x.sum() == 18 * 16
    # the lines differ in nothing but who stores them: equal bits of two stores are no race
    vg.launch(row_for_each_program, (5,), made, 3)
    with pytest.raises(vg.Race, match=r"element \[3, 0\] of source"):
        vg.launch(move, (2,), made, made, 0, 0, 3, 0)


def test_a_box_of_what_nobody_wrote_is_named_by_its_first_element_inside() -> None:
    x, o = torch.ones(20, 48), torch.zeros(20, 48)
    with vg.watching():
        vg.unwritten(x)
        vg.mark(x[:10])
        moved(x, o, (2, 16), (0, 0), True)
        moved(x, o, (-6, 16), (0, 0), True)
        for host in (True, False):
            with pytest.raises(vg.UnwrittenRead, match=r"element \[10, 16\]"):
                moved(x, o, (3, 16), (0, 0), host)


# --- what a descriptor may not be -----------------------------------------------------------------


def changed(x: Tensor, **words: Any) -> TensorDescriptor:
    """Return a descriptor that a hook changed after it was made."""
    made = TensorDescriptor.from_tensor(x, [8, 32])
    for name, value in words.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"strides": [56, 2]}, "last stride of a tensor descriptor must be 1"),
        ({"strides": [52, 1]}, "outer strides .* multiples of 16 bytes"),
        ({"strides": [0, 1]}, "outer strides .* positive"),
        ({"strides": [1 << 39, 1]}, r"outer strides .* below 2\^40"),
        ({"shape": [0, 48]}, "shape .* must be positive"),
        ({"shape": [20]}, "one to five dimensions"),
        ({"block_shape": [8, 4]}, "at least 16 bytes in its last dimension"),
        ({"block_shape": [8, 24]}, "powers of 2"),
        ({"block_shape": [1 << 16, 32]}, "at most 1048576 elements"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_what_no_descriptor_can_be_is_one_sentence(words: dict[str, Any], sentence: str) -> None:
    x = numbers()
    with pytest.raises(ValueError, match=sentence):
        vg.launch(move, (1,), changed(x, **words), changed(x), 0, 0, 0, 0)


def test_a_base_off_its_alignment_is_one_sentence() -> None:
    x = numbers()[:, 4:36]
    with pytest.raises(ValueError, match=r"base .* 16 bytes, and lies 8 past .* source \(int16"):
        vg.launch(move, (1,), changed(numbers(), base=x), changed(numbers()), 0, 0, 0, 0)
    with pytest.raises(ValueError, match=r"base .* 16 bytes, and lies 8 past .* x_ptr \(int16"):
        moved(x, numbers(), (0, 0), (0, 0), False)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"step": 2}, "last dim must be 1|last stride"),
        ({"pitch": 52}, "outer strides .* multiples of 16 bytes"),
        ({"COLUMNS": 4}, "at least 16 bytes"),
        ({"ROWS": 3}, "power of 2"),
        ({"rows": 0}, "shape .* must be positive"),
    ],
    ids=str,
)
def test_a_descriptor_made_in_a_kernel_is_held_to_the_same(
    given: dict[str, int], sentence: str
) -> None:
    words: dict[str, Any] = {"rows": 20, "columns": 48, "pitch": 56, "step": 1, "ROWS": 8}
    words |= {"COLUMNS": 32, "PADDING": "zero", "row": 0, "column": 0, "to_row": 0, "to_column": 0}
    vg.launch(move_made, (1,), numbers(), numbers(), **words)
    with pytest.raises(ValueError, match=sentence):
        vg.launch(move_made, (1,), numbers(), numbers(), **{**words, **given})


def test_what_has_no_model_is_refused() -> None:
    x, o = torch.zeros(16, 16), torch.zeros(16)
    for op, name in (("gather", "gather"), ("scatter", "scatter"), ("atomic_add", "reduce")):
        with pytest.raises(vg.UnmodelledOperation, match=f"descriptor_{name} has no exact model"):
            vg.launch(other_forms, (1,), TensorDescriptor.from_tensor(x, [1, 16]), o, op)
    with pytest.raises(vg.UnmodelledOperation, match=r"last offset in multiples of 16 bytes"):
        moved(numbers(), numbers(), (0, 4), (0, 0), True)
    if hasattr(TensorDescriptor, "round_f32_to_tf32"):  # from Triton 3.7 on
        rounded = TensorDescriptor.from_tensor(x, [8, 16], round_f32_to_tf32=True)
        with pytest.raises(vg.UnmodelledOperation, match="TF32"):
            vg.launch(move, (1,), rounded, rounded, 0, 0, 0, 0)


# --- descriptors as arguments ---------------------------------------------------------------------


def test_the_unit_of_dots_is_read_with_descriptors_as_arguments() -> None:
    a, b, o = torch.zeros(128, 32), torch.zeros(2, 64, 32), torch.zeros(64, 64)
    a[64:, :4], b[1, :, :4] = torch.arange(4), torch.arange(64)[:, None] % 4
    codes = [x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (a, b)]
    given = [
        TensorDescriptor.from_tensor(x, [*[1] * (x.dim() - 2), 64, 32]) for x in codes
    ]  # fmt: skip
    with vg.record() as tape:
        report = vg.dispatch(product, (1,), *given, o)
    assert report is not None
    assert report.dot_unit is WGMMA_FP8
    assert torch.equal(o, b[1] @ a[64:].T)
    assert "cp.async.bulk.tensor" in vg.ptx(product, *given, o)
    # the same binary whatever the rows
    more = TensorDescriptor.from_tensor(torch.zeros(7, 32, dtype=torch.uint8), [64, 32])
    (item,) = tape.launches
    again = vg.Launch(kernel=item.kernel, grid=item.grid, args=(more, *item.args[1:]), options={})
    assert forms(item) == forms(again)


def test_a_recording_lets_go_of_the_tensor_under_a_descriptor_and_finds_it_again() -> None:
    x, o = numbers(), numbers()
    with vg.record() as tape:
        given = [TensorDescriptor.from_tensor(t, [8, 32]) for t in (x, o)]
        vg.dispatch(move, (1,), *given, 0, 0, 8, 0)
    held = Recording()
    held.steps = list(tape.launches)
    shown = [value for _, argument, value in held.scalars() if argument == "source"]
    assert shown == [((20, 48), (56, 1), (8, 32), "zero")]
    held.let_go(set())
    tape.launches.clear()
    x[:8] = 5
    held.replay()
    assert (o[8:16, :32] == 5).all()
    assert held.freed == 0
    del given, x
    assert held.freed == 1


def test_tensors_on_a_gpu_are_for_the_real_one() -> None:
    meta = numbers().to("meta")
    made = changed(numbers(), base=meta)
    with pytest.raises(ValueError, match="got a tensor on meta"):
        vg.launch(move, (1,), made, changed(numbers()), 0, 0, 0, 0)
