"""Which outputs of a quantizer share memory, with themselves or with others: they are refused."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import f32_to_bf16
from moe_parity.references.errors import ParityError
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages.quant import reference
from moe_parity.references.stages.quant.decisions import QuantRecipe

arguments = pytest.importorskip("moe_parity.kernels.ours.arguments", reason="needs Triton")
ours = pytest.importorskip("moe_parity.kernels.ours.quant", reason="needs Triton")


def matrix(rows: int, columns: int, device: str = "cpu") -> torch.Tensor:
    """Return ordinary BF16 numbers."""
    return f32_to_bf16(random_bits.normal(5, "x", rows, columns, device=device))


def test_codes_and_scales_may_share_rows(parity_device: str):
    """Scales behind the codes of their row, as a cache keeps them, share no byte with them."""
    x = matrix(5, 256, parity_device)
    rows = torch.zeros(5, 256 + 8 + 8, dtype=torch.uint8, device=parity_device)
    codes, scales = rows[:, :256], rows.view(torch.float32)[:, 64:66]
    ours.act_quant_out(x, codes, scales, 128, False)
    want = reference.act_quant(x, OURS.of("act_quant", QuantRecipe))
    assert torch.equal(codes, want.codes)
    assert torch.equal(scales, want.scales)
    assert not bool(rows[:, 264:].any())


def memory(size: int = 5 * 256 * 2) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def refused_outputs():
    """Yield name, x, codes, scales and the sentence."""
    x, flat, scales = matrix(5, 256), memory(), torch.zeros(5, 2)
    codes = flat[: 5 * 256].view(5, 256)
    strides = "strides {}; give each its own memory."
    for name, own, step in (
        ("one row", flat[:256].expand(5, 256), (0, 1)),
        ("half rows", flat.as_strided((5, 256), (128, 1)), (128, 1)),
        ("one byte", flat.as_strided((5, 256), (255, 1)), (255, 1)),
    ):
        yield name, x, own, scales, f"elements of codes overlap, {strides.format(step)}"
    for name, own in (
        ("one scale", scales[:, :1].expand(5, 2)),
        ("one row of scales", scales[:1].expand(5, 2)),
        ("skewed scales", scales.as_strided((5, 2), (1, 1))),
    ):
        yield name, x, codes, own, f"elements of scales overlap, {strides.format(own.stride())}"
    shared = "{} and {} share memory; give {} memory of its own."
    inside = x.view(torch.uint8)
    yield "in place", x, inside[:, :256], scales, shared.format("x", "codes", "codes")
    last = inside.flatten()[-1280:].view(5, 256)
    yield "at the end of x", x, last, scales, shared.format("x", "codes", "codes")
    ends = flat[1276:1316].view(torch.float32).view(5, 2)
    yield "behind codes", x, codes, ends, shared.format("codes", "scales", "scales")
    rows = memory(5 * 264).view(5, 264)
    under = rows.view(torch.float32)[:, 63:65]
    yield "under codes", x, rows[:, :256], under, shared.format("codes", "scales", "scales")
    over = matrix(5, 260)
    across = over.view(torch.float32)[:, 127:129]
    yield "over x", over[:, :256], codes, across, shared.format("x", "scales", "scales")


OUTPUTS = list(refused_outputs())


@pytest.mark.parametrize(("x", "codes", "scales", "sentence"), [c[1:] for c in OUTPUTS], ids=[c[0] for c in OUTPUTS])  # fmt: skip  # noqa: E501
def test_outputs_that_overlap_are_refused(x, codes, scales, sentence: str):
    """A program may write where another still reads, in an order that nobody knows."""
    before = [t.clone() for t in (x, codes, scales)]
    with pytest.raises(ParityError) as caught:
        ours.act_quant_out(x, codes, scales, 128, False)
    assert str(caught.value) == f"act_quant: {sentence}"
    for tensor, kept in zip((x, codes, scales), before, strict=True):
        assert torch.equal(tensor, kept)


def places(tensor: torch.Tensor) -> list[int]:
    """Return the address of every byte of a matrix."""
    size = tensor.element_size()
    (rows, columns), (row, column) = tensor.shape, tensor.stride()
    starts = [
        tensor.data_ptr() + (r * row + c * column) * size
        for r, c in itertools.product(range(rows), range(columns))
    ]
    return [start + byte for start in starts for byte in range(size)]


def views(size: int) -> list[torch.Tensor]:
    """Return matrices of every small shape and stride in the same 40 bytes."""
    base = torch.zeros(40, dtype=torch.uint8)
    kinds = [torch.uint8, torch.int32][:size]
    found = []
    for kind, rows, columns in itertools.product(kinds, (0, 1, 2, 3), (0, 1, 2)):
        typed = base.view(kind)
        for row, column, start in itertools.product((0, 1, 2, 3, 5), (0, 1, 2), (0, 1, 4, 5)):
            last = start + max(rows - 1, 0) * row + max(columns - 1, 0) * column
            if last < typed.numel():
                found.append(typed.as_strided((rows, columns), (row, column), start))
    return found


def test_memory_of_its_own_is_what_no_element_shares():
    """Against the list of all bytes; only strides that interleave may be refused besides."""
    seen = set()
    for view in views(1):
        every = places(view)
        own = len(every) == len(set(every))
        (rows, columns), (row, column) = view.shape, view.stride()
        nested = min(row, column) * (rows if row < column else columns) <= max(row, column)
        promised = arguments.has_own_elements(view)
        assert own or not promised, (view.shape, view.stride())
        assert promised or not own or not nested, (view.shape, view.stride())
        seen.add((own, promised))
    assert {(True, True), (False, False)} <= seen


def test_matrices_are_apart_where_they_share_no_byte():
    """Against the lists of all bytes; whatever lies behind, before or beside in rows is apart."""
    counts = Counter()
    every = [view for view in views(2) if view.numel() == 0 or arguments.has_own_elements(view)][
        ::7
    ]
    for one, other in itertools.product(every, repeat=2):
        bytes_of, bytes_of_other = places(one), places(other)
        apart = not set(bytes_of) & set(bytes_of_other)
        promised = arguments.are_apart(one, other)
        assert apart or not promised, (one.shape, one.stride(), other.shape, other.stride())
        if (
            not bytes_of
            or not bytes_of_other
            or max(bytes_of) < min(bytes_of_other)
            or max(bytes_of_other) < min(bytes_of)
        ):
            assert promised
        counts[apart, promised] += 1
    assert min(counts[True, True], counts[False, False]) > 100
