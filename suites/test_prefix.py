"""Prefix-sum scheduling, op by op: rows by expert, live rows alone read and written."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout, f32_to_bf16
from moe_parity.references.errors import ParityError
from moe_parity.suites.prefixed import as_bits, expected, poison, poisoned, untouched

permute = pytest.importorskip("moe_parity.kernels.ours.permute", reason="needs Triton")
prefix_sum = pytest.importorskip("moe_parity.kernels.ours.prefix_sum", reason="needs Triton")
activation = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")
quant = pytest.importorskip("moe_parity.kernels.ours.quant", reason="needs Triton")
steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")

FIRST, EXPERTS = 3, 5
ROUTED: dict[str, list[list[int]]] = {
    "an empty expert between two": [[3, 5], [5, 3], [7, 7], [3, 6]],
    "nobody's, other ranks' and past the end": [[-1, 2], [8, 4], [4, 900], [6, -1]],
    "one live row": [[-1, -1], [-1, 7], [0, 0]],
    "no live row": [[-1, 8], [0, 2]],
    "one expert for all": [[4, 4]] * 20,
    "the last expert alone": [[7, 7]] * 9,
    "every expert": [[3, 4], [5, 6], [7, 3], [4, 5], [6, 7]] * 2,
    "no token": [],
}


def ids_of(name: str, device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(ROUTED[name], dtype=dtype, device=device).view(-1, 2)


def empty(ids: Tensor, width: int, alignment: int, layout: str = "tma") -> Any:
    """Return poisoned memory for permuted rows."""
    made = permute.PrefixRows.empty(
        ids.numel(), EXPERTS, width, alignment=alignment, layout=layout, device=ids.device
    )
    for tensor in (made.codes, made.scales, made.ends, made.place):
        poison(tensor)
    return made


def quantized(tokens: int, width: int, device: str, scale: str = "fp32") -> tuple[Tensor, Tensor]:
    x = f32_to_bf16(3.0 * random_bits.normal(5, "x", tokens, width, device=device))
    codes, scales = quant.act_quant(x, scale=scale)
    return codes, scales


def words_of(scales: Tensor) -> Tensor:
    """Return power-of-two scales [R, G] as words of four exponents, the lowest byte first."""
    rows, groups = scales.shape
    made = torch.zeros((rows, -(-groups // 4)), dtype=torch.int64, device=scales.device)
    for group in range(groups):
        exponent = torch.frexp(scales[:, group]).exponent.long() + 126
        made[:, group // 4] += exponent << (8 * (group % 4))
    return torch.where(made >= 1 << 31, made - (1 << 32), made).int()


# --- the permutation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "alignment", "layout"),
    [
        *((name, 16, "tma") for name in ROUTED),
        *(("nobody's, other ranks' and past the end", n, "tma") for n in (32, 64, 128, 256)),
        ("one expert for all", 16, "packed"), ("every expert", 128, "packed"),
    ],
)  # fmt: skip
def test_permuted_rows_lie_where_prefix_sums_put_them(
    name: str, alignment: int, layout: str, parity_device: str
):
    """Five groups of K: the second word of the packed layout has one byte."""
    ids, width = ids_of(name, parity_device), 640
    codes, scales = quantized(ids.shape[0], width, parity_device, "ue8m0")
    out = empty(ids, width, alignment, layout)
    made = permute.permute(
        codes, scales, ids, FIRST, EXPERTS, alignment=alignment, layout=layout, out=out
    )
    assert made is out
    want = expected(ids.flatten().tolist(), FIRST, EXPERTS, alignment)
    assert (made.ends.tolist(), made.place.tolist()) == (want.ends, want.place)
    rows = made.codes.shape[0]
    assert made.scales.stride() == (1, -(-rows // 4) * 4)
    held = words_of(scales) if layout == "packed" else scales
    for pair, row in enumerate(want.place):
        if row >= 0:
            assert torch.equal(made.codes[row], codes[pair // 2])
            assert torch.equal(as_bits(made.scales[row]), as_bits(held[pair // 2]))
    live = want.live(rows, parity_device)
    assert untouched(made.codes, live)
    assert untouched(made.scales, live)


@pytest.mark.parametrize("layout", [ScaleLayout.ROW, ScaleLayout.COLUMN])
def test_a_prefix_permutation_takes_ids_of_64_bits_and_rows_of_any_pitch(
    layout: ScaleLayout, parity_device: str
):
    ids = ids_of("every expert", parity_device)
    codes, scales = quantized(10, 256, parity_device)
    want = permute.permute(codes, scales, ids, FIRST, EXPERTS, alignment=16)
    wide = torch.zeros((10, 300), dtype=torch.uint8, device=parity_device)[:, 20:276].copy_(codes)
    laid = torch.empty_strided((10, 2), layout.strides(10, 2), device=parity_device).copy_(scales)
    made = permute.permute(wide, laid, ids.long(), FIRST, EXPERTS, alignment=16)
    live = expected(ids.flatten().tolist(), FIRST, EXPERTS, 16).live(made.codes.shape[0])
    assert torch.equal(made.codes[live], want.codes[live])
    assert torch.equal(made.scales[live], want.scales[live])
    assert torch.equal(made.place, want.place)


def test_a_prefix_permutation_of_more_pairs_and_experts_than_a_step_has(
    monkeypatch: pytest.MonkeyPatch, parity_device: str
):
    """Steps of 16: three of experts, whose room is summed across them, and eight of pairs."""
    monkeypatch.setattr(permute, "TILE", 16)
    experts = 37
    drawn = random_bits.integers(1, "ids", 40, 3, below=experts + 9, device=parity_device)
    drawn[:17, 0] = 20
    ids = torch.where(drawn % 7 == 0, 18, drawn).int() - 4
    codes, scales = quantized(40, 128, parity_device)
    made = permute.permute(codes, scales, ids, 0, experts, alignment=16)
    want = expected(ids.flatten().tolist(), 0, experts, 16)
    assert (made.ends.tolist(), made.place.tolist()) == (want.ends, want.place)
    live = made.place >= 0
    assert torch.equal(made.codes[made.place[live].long()], codes.repeat_interleave(3, 0)[live])


def test_the_bound_of_prefix_rows_is_the_most_that_any_routing_takes():
    """All splits of up to six pairs over three experts, by counting."""
    for pairs, alignment in itertools.product(range(7), (16, 32)):
        most = 0
        for counts in itertools.product(range(pairs + 1), repeat=3):
            if sum(counts) <= pairs:
                most = max(most, sum(-(-n // alignment) * alignment for n in counts))
        assert permute.row_bound(pairs, 3, alignment) == most
    assert permute.row_bound(4096, 32, 128) == (32 + (4096 - 32) // 128) * 128


# --- GEMM, SwiGLU with quantization, top-k sum ----------------------------------------------------

LAID: dict[str, tuple[list[int], int]] = {
    "every": ([0, 1, 2, 3, 4] * 2, 16),
    "tiles": ([1] * 17 + [3] * 16 + [4], 16),
    "one": ([3], 64),
    "none": ([-1, -1], 16),
    "gaps": ([0, 2, -1, 2, 4], 128),
    "wide": ([1, 1, 4], 256),
    "halves": ([2] * 33 + [0], 32),
}
"""The expert of each pair, and an alignment."""


def laid(name: str, rows: Tensor) -> tuple[Tensor, Any, Tensor, Tensor]:
    """Return rows [P, C] by expert in poison, where they lie, the ends, and what is live."""
    experts, alignment = LAID[name]
    want = expected(experts, 0, EXPERTS, alignment)
    height = permute.row_bound(len(experts), EXPERTS, alignment)
    device = str(rows.device)
    made = poisoned((height, rows.shape[1]), rows.dtype, device)
    for pair, row in enumerate(want.place):
        if row >= 0:
            made[row] = rows[pair]
    ends = torch.tensor(want.ends, dtype=torch.int32, device=device)
    return made, want, ends, want.live(height, device)


def in_order(made: Tensor, place: list[int]) -> Tensor:
    """Return the rows of the pairs that somebody owns, in their order."""
    return as_bits(made[[row for row in place if row >= 0]])


def owned(place: list[int]) -> list[int]:
    return [pair for pair, row in enumerate(place) if row >= 0]


@pytest.mark.parametrize(
    ("name", "block", "biased"),
    [
        ("every", 16, False), ("tiles", 16, True), ("one", 64, False), ("none", 16, False),
        ("gaps", 128, True), ("wide", 32, False), ("halves", 32, False), ("gaps", None, False),
    ],
)  # fmt: skip
def test_a_prefix_gemm_has_the_bits_of_the_routed_one_in_live_rows_alone(
    name: str, block: int | None, biased: bool, parity_device: str
):
    experts, alignment = LAID[name]
    codes, scales = quantized(len(experts), 256, parity_device)
    w = random_bits.integers(2, "w", EXPERTS * 192, 256, below=120, device=parity_device)
    w = w.to(torch.uint8).view(EXPERTS, 192, 256)
    w_scale = random_bits.uniform(3, "s", EXPERTS * 2, 2, device=parity_device)
    w_scale = w_scale.view(EXPERTS, 2, 2)
    bias = random_bits.normal(4, "b", EXPERTS, 192, device=parity_device) if biased else None
    a, want, ends, live = laid(name, codes)
    a_scale = laid(name, scales)[0].t().contiguous().t()
    out = poisoned((a.shape[0], 192), torch.bfloat16, parity_device)
    made = prefix_sum.prefix_gemm(
        a, a_scale, w, w_scale, ends, alignment=alignment, bias=bias, out=out, block=block
    )
    assert made is out
    ids = torch.tensor(experts, dtype=torch.int32, device=parity_device)[:, None]
    aligned = steps.align(ids, 0, EXPERTS, 64)
    routed = steps.grouped_gemm(codes, scales, w, w_scale, aligned, len(experts), 1, bias)
    assert torch.equal(in_order(out, want.place), as_bits(routed[owned(want.place)]))
    assert untouched(out, live)


ASKED = [
    ("every", ScaleFormat.FP32, 128, {}),
    ("tiles", ScaleFormat.UE8M0, 128, {"clamp": "before", "limit": 0.5}),
    ("gaps", ScaleFormat.UE8M0_PACKED, 64, {"clamp": "after", "limit": 0.5}),
    ("tiles", ScaleFormat.UE8M0_PACKED, 128, {"alpha": 1.702, "beta": 1.0}),
    (
        "halves",
        ScaleFormat.FP32,
        64,
        {"alpha": 1.702, "beta": 1.0, "clamp": "before", "limit": 7.0},
    ),
    ("wide", ScaleFormat.FP32, 128, {"clamp": "before", "limits": (0.1, 0.5, 1.0, 2.0, 4.0)}),
    ("one", ScaleFormat.FP32, 128, {}),
    ("none", ScaleFormat.UE8M0_PACKED, 128, {}),
]


@pytest.mark.parametrize(("name", "scale", "group", "options"), ASKED)
def test_a_prefix_swiglu_quant_has_the_bits_of_the_routed_one_in_live_rows_alone(
    name: str, scale: ScaleFormat, group: int, options: dict[str, Any],
    parity_device: str,
):  # fmt: skip
    """Any number of programs shares the tiles; 5 groups of 64 leave bytes that are none's."""
    programs = 528 if name == "every" else 3
    experts, alignment = LAID[name]
    width = 320 if group == 64 else 256
    options = dict(options)
    if "limits" in options:
        options["limits"] = torch.tensor(options["limits"], device=parity_device)
    how = activation.Activation(**options)
    rows = f32_to_bf16(
        2.0 * random_bits.normal(6, "rows", len(experts), 2 * width, device=parity_device)
    )
    given, want, ends, live = laid(name, rows)
    shape, strides, dtype = scale.stored(given.shape[0], width // group, ScaleLayout.TMA)
    codes = poisoned((given.shape[0], width), torch.uint8, parity_device)
    scales = poisoned(shape, dtype, parity_device, strides)
    made = prefix_sum.prefix_swiglu_quant(
        given, ends, how, alignment=alignment, scale=scale, group=group, codes=codes,
        scales=scales, programs=programs,
    )  # fmt: skip
    assert made[0] is codes
    assert made[1] is scales
    ids = torch.tensor(experts, dtype=torch.int32, device=parity_device)
    routed = activation.swiglu_quant(rows, ids, 0, EXPERTS, how, scale=scale, group=group)
    for mine, theirs in zip(made, routed, strict=True):
        assert torch.equal(in_order(mine, want.place), as_bits(theirs[owned(want.place)]))
        assert untouched(mine, live)
    fresh = prefix_sum.prefix_swiglu_quant(
        given, ends, how, alignment=alignment, scale=scale, group=group
    )
    assert fresh[1].stride() == strides
    assert torch.equal(in_order(fresh[1], want.place), in_order(scales, want.place))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_prefix_sum_of_rows_reads_no_dead_row(
    dtype: torch.dtype, weighted: bool, parity_device: str
):
    """A token's pairs are one after the other; one has none, one has one."""
    experts = [0, 2, 2, -1, -1, -1]
    rows = f32_to_bf16(random_bits.normal(8, "rows", 6, 160, device=parity_device))
    want = expected(experts, 0, EXPERTS, 16)
    given = poisoned((permute.row_bound(6, EXPERTS, 16), 160), torch.bfloat16, parity_device)
    for pair in owned(want.place):
        given[want.place[pair]] = rows[pair]
    weights = random_bits.uniform(9, "w", 3, 2, device=parity_device) if weighted else None
    ids = torch.tensor(experts, dtype=torch.int32, device=parity_device).view(3, 2)
    place = torch.tensor(want.place, dtype=torch.int32, device=parity_device)
    out, routed = (torch.full((3, 160), 7.0, dtype=dtype, device=parity_device) for _ in range(2))
    prefix_sum.prefix_combine(given, place, weights, out)
    steps.combine(rows, weights, ids, 0, EXPERTS, routed)
    assert torch.equal(as_bits(out), as_bits(routed))
    assert not out[2].any()


# --- refusals -------------------------------------------------------------------------------------


def refusals() -> dict[str, tuple[str, Any]]:
    """Return calls by name with the sentence that each must give."""
    codes, scales = torch.zeros((4, 256), dtype=torch.uint8), torch.ones((4, 2))
    ids = torch.zeros((4, 2), dtype=torch.int32)
    out = permute.PrefixRows.empty(8, 2, 256, alignment=64)
    ends = torch.zeros(2, dtype=torch.int32)
    a, s = torch.zeros((128, 256), dtype=torch.uint8), torch.ones((128, 2))
    w, ws = torch.zeros((2, 128, 256), dtype=torch.uint8), torch.ones((2, 1, 2))
    rows, how = torch.zeros((128, 512), dtype=torch.bfloat16), activation.Activation()
    gemm, quantize = prefix_sum.prefix_gemm, prefix_sum.prefix_swiglu_quant

    def go(*given: Any, **options: Any) -> Any:
        return lambda: permute.permute(*given, **{"first": 0, "experts": 2, **options})

    return {
        "codes": ("codes must be uint8", go(codes.t(), scales, ids)),
        "width": ("K = 200 must be", go(codes[:, :200], scales, ids)),
        "scales": (r"scales must be float32 \[4, 2\]", go(codes, scales[:, :1], ids)),
        "ids": ("ids must be int32 or int64", go(codes, scales, ids.short())),
        "ids' rows": ("ids must be contiguous", go(codes, scales, ids.repeat(1, 2)[:, ::2])),
        "experts": ("at least one expert, not 0", go(codes, scales, ids, experts=0)),
        "alignment": (
            "alignment must be one of 16, 32, 64, 128, 256, got 48",
            go(codes, scales, ids, alignment=48),
        ),
        "no number": ("must be one of .*, got True", go(codes, scales, ids, alignment=True)),
        "layout": ("layout must be one of 'tma', 'packed'", go(codes, scales, ids, layout="row")),
        "another alignment": ("made for an alignment of 64", go(codes, scales, ids, out=out)),
        "another layout": (
            "out.scales must be torch.int32",
            go(codes, scales, ids, out=out, alignment=64, layout="packed"),
        ),
        "gemm's rows": ("R = 100 must be a multiple", lambda: gemm(a[:100], s[:100], w, ws, ends)),
        "gemm's ends": ("ends must be torch.int32 \\[2\\]", lambda: gemm(a, s, w, ws, ends[:1])),
        "gemm's scale": ("a_scale must be", lambda: gemm(a, s[:, :1], w, ws, ends)),
        "gemm's weights": ("w must be uint8", lambda: gemm(a, s, w[:, :, :128], ws, ends)),
        "gemm's tile": (
            "divide the alignment of 64, not 128",
            lambda: gemm(a, s, w, ws, ends, alignment=64, block=128),
        ),
        "gemm's odd tile": ("16, 32, 64 or 128 rows", lambda: gemm(a, s, w, ws, ends, block=8)),
        "quant's rows": ("R = 100 must", lambda: quantize(rows[:100].contiguous(), ends, how)),
        "quant's pitch": ("rows must be contiguous", lambda: quantize(rows[:, :256], ends, how)),
        "quant's group": ("group, 64 or 128, not 32", lambda: quantize(rows, ends, how, group=32)),
        "quant's programs": ("programs must be", lambda: quantize(rows, ends, how, programs=0)),
        "quant's scales": (
            "elements of scales overlap",
            lambda: quantize(rows, ends, how, scales=torch.ones(1).expand(128, 2)),
        ),
        "places": (
            "5 places are not k for each of 4 tokens",
            lambda: prefix_sum.prefix_combine(
                rows, torch.zeros(5, dtype=torch.int32), None, torch.zeros(4, 512)
            ),
        ),
        "sum's width": (
            r"rows \[R, H\] must be contiguous",
            lambda: prefix_sum.prefix_combine(rows, ids, None, torch.zeros(4, 256)),
        ),
    }  # fmt: skip


def test_what_prefix_sums_cannot_be_is_one_sentence():
    for sentence, call in refusals().values():
        with pytest.raises(ParityError, match=sentence):
            call()
