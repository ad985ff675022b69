"""The quantizers as functions: layouts, packed words, outputs of the caller, custom ops.

The stages compare them as kernels, into memory of the harness; here they are called as users call
them.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_parity.harness.checks.compare import comparable
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import (
    ScaleFormat,
    ScaleLayout,
    bits_of,
    f32_to_bf16,
)
from moe_parity.references.errors import ParityError
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages.quant import reference
from moe_parity.references.stages.quant.decisions import QuantRecipe

ours = pytest.importorskip("moe_parity.kernels.ours.quant", reason="needs Triton")

ACT, WEIGHT = (OURS.of(name, QuantRecipe) for name in ("act_quant", "weight_quant"))


def matrix(rows: int, columns: int, device: str = "cpu") -> torch.Tensor:
    """Return BF16 numbers, every row and 64 columns of another power of two."""
    x = random_bits.normal(5, "x", rows, columns, device=device)
    power = random_bits.integers(5, "power", rows, -(-columns // 64), below=40, device=device) - 20
    wide = torch.exp2(power.float()).repeat_interleave(64, 1)[:, :columns]
    return f32_to_bf16(x * wide)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and torch.equal(comparable(got), comparable(want))


STORED = [  # of 5 rows in 5 groups, as docs/stages.md has it
    ("fp32", "row", (5, 5), (5, 1), torch.float32),
    ("fp32", "col", (5, 5), (1, 5), torch.float32),
    ("fp32", "tma", (5, 5), (1, 8), torch.float32),
    ("ue8m0", "row", (5, 5), (5, 1), torch.float32),
    ("ue8m0", "col", (5, 5), (1, 5), torch.float32),
    ("ue8m0", "tma", (5, 5), (1, 8), torch.float32),
    *(("ue8m0packed", layout, (5, 2), (1, 8), torch.int32) for layout in ("row", "col", "tma")),
]


@pytest.mark.parametrize(("scale", "layout", "shape", "strides", "dtype"), STORED)
@pytest.mark.parametrize("group", [64, 128])
def test_scales_lie_as_the_layout_says(
    group: int, scale: str, layout: str, shape, strides, dtype, parity_device: str
):
    """The same values in every layout; a fake call gives the same shapes, strides and types."""
    x = matrix(5, 5 * group, parity_device)
    codes, scales = ours.act_quant(x, group=group, scale=scale, layout=layout)
    assert (tuple(scales.shape), scales.stride(), scales.dtype) == (shape, strides, dtype)
    assert (codes.dtype, codes.stride()) == (torch.uint8, (5 * group, 1))
    want = reference.act_quant(x, ACT, group=group, scale=ScaleFormat(scale))
    assert same(codes, want.codes)
    if dtype is torch.float32:
        assert same(scales, want.scales)
    else:
        assert scales.tolist() == words(want.scales)
    with FakeTensorMode() as mode:
        fakes = ours.act_quant(mode.from_tensor(x), group=group, scale=scale, layout=layout)
    metas = ours.act_quant(x.to("meta"), group=group, scale=scale, layout=layout)
    for real, fake, meta in zip((codes, scales), fakes, metas, strict=True):
        assert outline(fake) == outline(real) == outline(meta)
        assert (fake.device, meta.device.type) == (real.device, "meta")


def outline(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def words(scales: torch.Tensor) -> list[list[int]]:
    """Pack exponents in plain integers: byte j is group 4 * word + j, 0 where there is none."""
    rows = []
    for exponents in (bits_of(scales) >> 23).tolist():
        padded = exponents + [0] * (-len(exponents) % 4)
        packed = [bytes(padded[n : n + 4]) for n in range(0, len(padded), 4)]
        rows.append([int.from_bytes(word, "little", signed=True) for word in packed])
    return rows


@pytest.mark.parametrize("groups", range(1, 10))
def test_packed_words_end_in_zeros(groups: int, parity_device: str):
    """One to nine groups: words that are full, and words that lack one, two and three bytes."""
    x = matrix(3, 64 * groups, parity_device)
    codes, packed = ours.act_quant(x, group=64, scale="ue8m0packed")
    want = reference.act_quant(x, ACT, group=64, scale=ScaleFormat.UE8M0)
    assert same(codes, want.codes)
    assert packed.tolist() == words(want.scales)


@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "ue8m0"])
def test_a_weight_is_written_into_the_callers_rows(power_of_two: bool, parity_device: str):
    """Codes with gaps between rows, scales in columns; the gaps stay as they were."""
    w = matrix(200, 300, parity_device)
    wide = torch.full((200, 310), 0x5C, dtype=torch.uint8, device=parity_device)
    columns = torch.full((3, 4), -7.0, device=parity_device)
    codes, scales = wide[:, :300], columns.t()[:2]
    ours.weight_quant_out(w, codes, scales, power_of_two)
    form = ScaleFormat.UE8M0 if power_of_two else ScaleFormat.FP32
    want = reference.weight_quant(w, WEIGHT, scale=form)
    assert same(codes, want.codes)
    assert same(scales, want.scales)
    assert bool((wide[:, 300:] == 0x5C).all())
    assert bool((columns[:, 2:] == -7.0).all())
    made = ours.weight_quant(w, power_of_two=power_of_two)
    assert [outline(t) for t in made] == [
        ((200, 300), (300, 1), torch.uint8),
        ((2, 3), (3, 1), torch.float32),
    ]
    assert same(made[0], want.codes)
    assert same(made[1], want.scales)
    plain = ours.weight_quant(w)
    assert same(plain[1], want.scales) == (not power_of_two)


def test_nothing_is_launched_for_nothing(parity_device: str):
    """No row, or a weight without one: outputs of the right shape, and no program."""
    virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")
    x = torch.empty(0, 256, dtype=torch.bfloat16, device=parity_device)
    with virtual_gpu.record() as tape:
        shapes = [tuple(t.shape) for t in (*ours.act_quant(x), *ours.weight_quant(x))]
        shapes += [tuple(t.shape) for t in ours.requantize_weight(*ours.weight_quant(x))]
        shapes += [tuple(t.shape) for t in ours.weight_quant(x.t())]
    assert shapes == [(0, 256), (0, 2), *[(0, 256), (0, 2)] * 2, (256, 0), (2, 0)]
    assert not tape.launches


def test_what_is_not_said_is_fp32_in_rows_of_128(parity_device: str):
    x = matrix(3, 256, parity_device)
    plain = ours.act_quant(x)
    said = ours.act_quant(x, group=128, scale=ScaleFormat.FP32, layout=ScaleLayout.ROW)
    for one, other in zip(plain, said, strict=True):
        assert outline(one) == outline(other)
        assert same(one, other)


def test_a_column_has_any_stride(parity_device: str):
    """Of codes that have one column, and of one row, no stride says anything."""
    w = matrix(5, 1, parity_device)
    codes = torch.zeros(1, 5, dtype=torch.uint8, device=parity_device).t()
    scales = torch.zeros(1, device=parity_device).expand(1, 1)
    assert codes.stride(1) != 1
    ours.weight_quant_out(w, codes, scales, False)
    want = reference.weight_quant(w, WEIGHT)
    assert same(codes, want.codes)
    assert same(scales, want.scales)


def memory(size: int = 5 * 256 * 2) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def test_a_fake_refuses_what_the_real_one_refuses():
    """One tensor on the meta device runs the fake, which would write nothing and say nothing."""
    x, codes, scales = matrix(5, 256), memory(1280).view(5, 256), torch.zeros(5, 2)
    for own, tiles, sentence in (
        (codes.to("meta"), scales, "codes is on meta, x on cpu; use one device."),
        (codes, scales.to("meta"), "scales is on meta, x on cpu; use one device."),
        (codes.to("meta")[:4], scales, "codes must be torch.uint8 [5, 256], got torch.uint8 [4, "),
    ):
        with pytest.raises(ParityError, match=re.escape(f"act_quant: {sentence}")):
            ours.act_quant_out(x, own, tiles, 128, False)


def test_the_outputs_of_a_weight_are_refused_by_their_sentences():
    w, codes, scales = matrix(130, 256), memory(130 * 256).view(130, 256), torch.zeros(2, 2)
    inside = w.view(torch.uint8)[:, :256]
    for own, tiles, sentence in (
        (codes[:129], scales, "codes must be torch.uint8 [130, 256], got torch.uint8 [129, 256]."),
        (codes.view(torch.int8), scales, "codes must be torch.uint8 [130, 256], got torch.int8 "),
        (codes, scales[:1], "scales must be torch.float32 [2, 2], got torch.float32 [1, 2]."),
        (codes, scales.int(), "scales must be torch.float32 [2, 2], got torch.int32 [2, 2]."),
        (codes.to("meta"), scales, "codes is on meta, x on cpu; use one device."),
        (codes, scales.to("meta"), "scales is on meta, x on cpu; use one device."),
        (codes[:1].expand(130, 256), scales, "elements of codes overlap, strides (0, 1); give "),
        (codes, scales[:1].expand(2, 2), "elements of scales overlap, strides (0, 1); give "),
        (inside, scales, "x and codes share memory; give codes memory of its own."),
    ):
        with pytest.raises(ParityError, match=re.escape(f"weight_quant: {sentence}")):
            ours.weight_quant_out(w, own, tiles, False)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scale": "fp31"}, "scale must be one of 'fp32', 'ue8m0', 'ue8m0packed', got 'fp31'."),
        ({"layout": "rows"}, "layout must be one of 'row', 'col', 'tma', got 'rows'."),
        ({"group": 128.0}, "group must be 64 or 128, got 128.0."),
    ],
)
def test_words_that_nobody_knows_are_refused(options: dict, sentence: str):
    with pytest.raises(ParityError, match=f"^act_quant: {re.escape(sentence)}$"):
        ours.act_quant(matrix(2, 256), **options)


def test_requantization_reads_rows_with_gaps(parity_device: str):
    """The gaps hold the largest code, which would move every scale."""
    old = reference.weight_quant(matrix(150, 200), WEIGHT)
    wide = torch.full((150, 256), 0x7E, dtype=torch.uint8, device=parity_device)
    wide[:, :200] = old.codes.to(parity_device)
    kept, scales = wide.clone(), old.scales.to(parity_device)
    codes, powers = ours.requantize_weight(wide[:, :200], scales)
    want = reference.requantize_weight(old.codes, old.scales, WEIGHT)
    assert same(codes.cpu(), want.codes)
    assert same(powers.cpu(), want.scales)
    assert codes.stride() == (200, 1)
    assert torch.equal(wide, kept)
    assert torch.equal(scales.cpu(), old.scales)


def test_requantization_refuses_a_row_and_another_device():
    codes, scales = torch.zeros(4, 4).byte(), torch.ones(1, 1)
    with pytest.raises(ParityError, match=r"codes must be uint8 with .* torch.uint8 \[4\] with"):
        ours.requantize_weight(codes[0], scales)
    with pytest.raises(ParityError, match="scales are on meta, codes on cpu; use one device"):
        ours.requantize_weight(codes, scales.to("meta"))


def test_a_fake_weight_is_like_the_real_one():
    """Shapes, strides and types, also of codes with gaps and of none."""
    for rows in (0, 130):
        w, codes = matrix(rows, 300), memory(rows * 310).view(rows, 310)[:, :300]
        tiles = torch.ones(-(-rows // 128), 3)
        with FakeTensorMode() as mode:
            made = ours.weight_quant(mode.from_tensor(w))
            again = ours.requantize_weight(mode.from_tensor(codes), mode.from_tensor(tiles))
        real = (*ours.weight_quant(w), *ours.requantize_weight(codes, tiles))
        assert [outline(t) for t in (*made, *again)] == [outline(t) for t in real]


# 448 / amax overflows below these bits; a BF16 maximum never comes nearer than 2^15 steps.
FLOOR_BITS = 0x03E00001
AROUND_THE_FLOOR = [1, 0x007FFFFF, 0x00800000, *range(FLOOR_BITS - 3, FLOOR_BITS + 4), 0x04000000]


@pytest.mark.parametrize("kind", ["act_quant", "weight_quant"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "ue8m0"])
def test_the_floor_is_the_smallest_maximum_whose_multiplier_is_finite(
    kind: str, power_of_two: bool, parity_device: str
):
    """By one fp32 step on either side; at and above it the maximum itself counts."""
    words = torch.tensor(AROUND_THE_FLOOR, dtype=torch.int32, device=parity_device)
    amax = words.view(torch.float32)
    x = torch.zeros(words.numel(), 128, device=parity_device)
    x[:, 0], x[:, 1], x[:, 2] = amax, -amax, 0.75 * amax
    form = ScaleFormat.UE8M0 if power_of_two else ScaleFormat.FP32
    if kind == "act_quant":
        codes, scales = ours.act_quant(x, scale=form)
    else:
        tiles = [ours.weight_quant(row[None], power_of_two=power_of_two) for row in x]
        codes, scales = (torch.cat(parts) for parts in zip(*tiles, strict=True))
    want = reference.act_quant(x, ACT, scale=form)
    assert same(codes, want.codes)
    assert same(scales, want.scales)
    if not power_of_two:
        # In double precision: no fp32 quotient is needed to know that it is finite.
        exact = 448.0 / amax.double()
        floored = words < FLOOR_BITS
        assert torch.equal(floored, exact.float().isinf())
        assert len(set(bits_of(scales[floored]).flatten().tolist())) == 1
        assert bool((codes[~floored][:, :2] == torch.tensor([0x7E, 0xFE], device=x.device)).all())


@pytest.mark.parametrize("kind", ["act_quant", "weight_quant"])
def test_a_power_of_two_moves_by_one_step_and_has_ends(kind: str, parity_device: str):
    """448 * 2^k keeps 2^k, the next fp32 number does not; infinity takes 2^127, all NaN takes 1."""
    exact = 448.0 * torch.exp2(torch.tensor([-120.0, -9.0, 0.0, 1.0, 60.0]))
    above = torch.nextafter(exact, torch.full_like(exact, float("inf")))
    ends = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    amax = torch.cat([exact, above, ends]).to(parity_device)
    x = torch.zeros(amax.numel(), 128, device=parity_device)
    x[:, 5] = amax
    x[12] = float("nan")
    if kind == "act_quant":
        codes, scales = ours.act_quant(x, scale="ue8m0")
    else:
        x = x[:, None].expand(-1, 3, 128)  # a tile of three such rows
        tiles = [ours.weight_quant(rows, power_of_two=True) for rows in x]
        codes, scales = (torch.stack(parts)[:, 0] for parts in zip(*tiles, strict=True))
        x = x[:, 0]
    want = torch.cat([exact / 448.0, exact / 224.0, torch.tensor([2.0**127, 2.0**127, 1.0, 1.0])])
    assert scales.flatten().tolist() == want.tolist()
    assert same(codes, reference.act_quant(x, ACT, scale=ScaleFormat.UE8M0).codes)
    assert bool((codes[12] == 0x7F).all())
    assert not bool(codes[13].any())
