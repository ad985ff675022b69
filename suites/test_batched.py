"""Batched experts: the bits of the routed path, and nothing touched past an expert's count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.compare import comparable
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import (
    E4M3,
    ScaleFormat,
    bits_of,
    f32_to_bf16,
    to_f32,
    unpack_ue8m0,
)
from moe_parity.references.recipes.vllm import VLLM_BATCHED
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import act_quant
from moe_parity.suites.test_findings import SHORT, every_amax, groups_of, right_power

batched = pytest.importorskip("moe_parity.kernels.ours.batched", reason="needs Triton")
activation = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")
quant = pytest.importorskip("moe_parity.kernels.ours.quant", reason="needs Triton")
steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")

FORMATS = (ScaleFormat.FP32, ScaleFormat.UE8M0)
T = 19
COUNTS = (0, T, 5, 16, T + 13, -2, 1)
"""No row, all, a part of a tile, a whole tile, more than there is room for, less than none, one."""


def counts_of(numbers: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def live(counts: Tensor, tokens: int) -> Tensor:
    """Return which rows of [E, T] are an expert's own."""
    return torch.arange(tokens, device=counts.device)[None] < counts[:, None]


def normal(name: str, mask: Tensor, columns: int) -> Tensor:
    """Return bf16 rows [E, T, columns], NaN where nobody may read."""
    made = 4.0 * random_bits.normal(7, name, mask.numel(), columns, device=str(mask.device))
    made = made.view(*mask.shape, columns).masked_fill(~mask[..., None], float("nan"))
    return f32_to_bf16(made).view(*mask.shape, columns)


def ids_of(mask: Tensor) -> Tensor:
    """Return each row's expert, int32 [E * T, 1], and -1 past the counts."""
    expert = torch.arange(mask.shape[0], device=mask.device)[:, None]
    return torch.where(mask, expert, -1).int().view(-1, 1)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    made = torch.full((*shape[:-1], shape[-1] * size), 0x5C, dtype=torch.uint8, device=device)
    return made.view(dtype)


def untouched(tensor: Tensor, mask: Tensor) -> bool:
    rows = tensor[~mask]
    return bool((rows.contiguous().view(torch.uint8) == 0x5C).all())


def same(one: Tensor, other: Tensor, mask: Tensor) -> bool:
    """Whether the live rows have the same bits."""
    shapes = (t.reshape(mask.numel(), t.shape[-1]) for t in (one, other))
    pair = (comparable(rows[mask.flatten()].contiguous()) for rows in shapes)
    return torch.equal(*pair)


# --- the bits of the routed path -----------------------------------------------------------------


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "before": {"clamp": "before", "limit": 2.97},
    "after": {"clamp": "after", "limit": 2.97},
    "limits": {"clamp": "before"},
    "swigluoai": {"clamp": "before", "limit": 2.97, "alpha": 1.702, "beta": 1.0},
    "torch": {"form": "torch"},
}


def asked(name: str, experts: int, device: str) -> Any:
    limits = {}
    if name == "limits":
        limits = {"limits": 0.5 + torch.arange(float(experts), device=device)}
    return activation.Activation(**HOW[name], **limits)


def swiglu_differs(how: str, scale: ScaleFormat, device: str) -> str:
    """Compare the batched SwiGLU with the routed one; return what differs, or nothing.

    Two programs share the tiles, so that each takes many.
    """
    counts = counts_of(COUNTS, device)
    mask = live(counts, T)
    rows = normal("rows", mask, 512)
    acting = asked(how, mask.shape[0], device)
    codes = poisoned((*mask.shape, 256), torch.uint8, device)
    scales = poisoned((*mask.shape, 2), torch.float32, device)
    batched.batched_swiglu_quant(
        rows, counts, acting, scale=scale, codes=codes, scales=scales, programs=2
    )
    want = activation.swiglu_quant(
        rows.view(-1, 512), ids_of(mask), 0, mask.shape[0], acting, scale=scale
    )
    for name, got, right in zip(("codes", "scales"), (codes, scales), want, strict=True):
        if not same(got, right, mask):
            return f"other {name}"
        if not untouched(got, mask):
            return f"{name} past a count are written"
    return ""


@pytest.mark.parametrize("scale", FORMATS)
@pytest.mark.parametrize("how", HOW)
def test_batched_swiglu_has_the_bits_of_the_routed_one(
    how: str, scale: ScaleFormat, parity_device: str
):
    assert swiglu_differs(how, scale, parity_device) == ""


@pytest.mark.parametrize("scale", FORMATS)
def test_batched_quantization_has_the_bits_of_the_routed_one(
    scale: ScaleFormat, parity_device: str
):
    counts = counts_of(COUNTS, parity_device)
    mask = live(counts, T)
    x = normal("x", mask, 256)
    codes, scales = batched.batched_act_quant(x, counts, scale=scale)
    want = quant.act_quant(x.view(-1, 256), scale=scale)
    assert same(codes, want[0], mask)
    assert same(scales, want[1], mask)


@pytest.mark.parametrize("group", [64, 128])
def test_batched_scales_lie_as_they_were_asked_for(group: int, parity_device: str):
    """Expert by expert in every layout; words end in zeros, and padding stays as it was."""
    counts = counts_of((3, T, 0), parity_device)
    mask, g = live(counts, T), 640 // group
    rows, how = normal("rows", mask, 1280), activation.Activation()
    row = batched.batched_swiglu_quant(rows, counts, how, scale="ue8m0", group=group)
    for layout, strides in (
        ("row", (T * g, g, 1)), ("col", (T * g, 1, T)), ("tma", (20 * g, 1, 20)),
    ):  # fmt: skip
        got = batched.batched_swiglu_quant(
            rows, counts, how, scale="ue8m0", group=group, layout=layout
        )
        assert got[1].stride() == strides
        assert same(got[0], row[0], mask)
        assert same(got[1], row[1], mask)
    words = -(-g // 4)
    memory = torch.full((3, words, 20), 0x5C5C5C5C, dtype=torch.int32, device=parity_device)
    codes, packed = batched.batched_swiglu_quant(
        rows, counts, how, scale="ue8m0packed", group=group, scales=memory.mT[:, :T]
    )
    assert same(codes, row[0], mask)
    found = unpack_ue8m0(packed[mask], 4 * words)
    assert torch.equal(found[:, :g].int(), bits_of(row[1][mask]) >> 23)
    assert not bool(found[:, g:].any())
    rest = torch.ones_like(memory, dtype=torch.bool)
    rest.mT[:, :T][mask] = False
    assert bool((memory[rest] == 0x5C5C5C5C).all())
    own = batched.batched_swiglu_quant(rows, counts, how, scale="ue8m0packed", group=group)[1]
    assert own.stride() == (20 * words, 1, 20)
    assert torch.equal(own[mask], packed[mask])


@pytest.mark.parametrize(("experts", "tokens"), [(1, 1), (1, 17), (3, 0), (0, 4), (257, 2)])
def test_batched_quantization_takes_any_number_of_experts(
    experts: int, tokens: int, parity_device: str
):
    """One and 257 experts, whose counts take more than a power of two; no row at all."""
    drawn = random_bits.integers(4, "counts", 1, experts, below=tokens + 2, device=parity_device)
    counts = drawn[0].int()
    mask = live(counts, tokens)
    x = normal("x", mask, 128)
    codes = poisoned((experts, tokens, 128), torch.uint8, parity_device)
    scales = poisoned((experts, tokens, 1), torch.float32, parity_device)
    batched.batched_act_quant(x, counts, codes=codes, scales=scales, programs=5)
    want = quant.act_quant(x.view(-1, 128))
    assert same(codes, want[0], mask)
    assert same(scales, want[1], mask)
    assert untouched(codes, mask)
    assert untouched(scales, mask)
    assert experts < 2 or not tokens or bool(mask.any())


def gemm_differs(block: int, device: str, *, column: bool = False) -> str:
    """Compare the batched GEMM with the routed one; return what differs, or nothing."""
    counts = counts_of((0, 5, T, T + 4), device)
    mask, (n, k) = live(counts, T), (136, 256)
    a = random_bits.integers(3, "a", mask.numel(), k, below=0x78, device=device).byte()
    a = a.view(*mask.shape, k).masked_fill(~mask[..., None], E4M3.nan)
    a_scale = 0.5 + random_bits.uniform(3, "s", mask.numel(), 2, device=device)
    a_scale = a_scale.view(*mask.shape, 2).masked_fill(~mask[..., None], float("nan"))
    w = random_bits.integers(3, "w", 4 * n, k, below=0x78, device=device).byte().view(4, n, k)
    w_scale = 0.5 + random_bits.uniform(3, "ws", 8, 2, device=device).view(4, 2, 2)
    bias = random_bits.normal(3, "bias", 4, n, device=device)
    aligned = steps.align(ids_of(mask), 0, 4, 16)
    want = steps.grouped_gemm(
        a.view(-1, k), a_scale.view(-1, 2), w, w_scale, aligned, mask.numel(), 1, bias
    )
    if column:
        a_scale = a_scale.mT.contiguous().mT
        w = torch.cat([w, w], 1)[:, :n]
        w_scale = w_scale.mT.contiguous().mT
    out = poisoned((*mask.shape, n), torch.bfloat16, device)
    batched.batched_gemm(a, a_scale, w, w_scale, counts, bias=bias, out=out, block=block)
    if not same(out, want, mask):
        return "other rows"
    return "" if untouched(out, mask) else "rows past a count are written"


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_batched_gemm_has_the_bits_of_the_routed_one(block: int, parity_device: str):
    """Blocks of every height, past the room of an expert too; scales and weights of any strides."""
    assert gemm_differs(block, parity_device, column=block == 32) == ""


@pytest.mark.parametrize("tokens", [32, 33])
def test_the_batched_gemm_runs_on_fp8_wgmma(tokens: int):
    """Read from the PTX that Triton compiles for sm_90, with the unit of the routed GEMM."""
    a, w = torch.zeros(2, tokens, 128).byte(), torch.zeros(2, 64, 128).byte()
    counts = counts_of((1, 0), "cpu")
    with virtual_gpu.record() as tape:
        batched.batched_gemm(a, torch.ones(2, tokens, 1), w, torch.ones(2, 1, 1), counts)
    (launch,), (report,) = tape.launches, tape.reports
    assert launch.options["BLOCK"] == (16 if tokens == 32 else 64)
    assert report.dot_unit.name == "wgmma_fp8"
    assert "fma.rn.f32" in virtual_gpu.ptx(launch.kernel, *launch.args, **launch.options)


# --- what is read, and the exponents -------------------------------------------------------------


def visits(gated: bool) -> str:
    """Return what a quantization reads beside the live rows and, in each program, the counts."""
    counts = counts_of((0, 5, T, T + 4), "cpu")
    rows = normal("rows", live(counts, T), 512 if gated else 256)
    with virtual_gpu.record() as tape:
        if gated:
            batched.batched_swiglu_quant(rows, counts, activation.Activation(), programs=3)
        else:
            batched.batched_act_quant(rows, counts, programs=3)
    (report,) = tape.reports
    own = (5 + 2 * T) * rows.shape[2] * 2 + report.programs * counts.numel() * 4
    return "" if report.bytes_loaded == own else f"{report.bytes_loaded} bytes, not {own}"


@pytest.mark.parametrize("gated", [True, False])
def test_batched_quantization_reads_the_live_rows_alone(gated: bool):
    assert visits(gated) == ""


@pytest.mark.parametrize("block", [16, 64])
def test_a_batched_gemm_without_a_live_row_reads_the_counts_alone(block: int):
    a, w = torch.zeros(3, T, 128).byte(), torch.zeros(3, 130, 128).byte()
    counts = counts_of((0, -1, 0), "cpu")
    with virtual_gpu.record() as tape:
        batched.batched_gemm(a, torch.ones(3, T, 1), w, torch.ones(3, 2, 1), counts, block=block)
    (report,) = tape.reports
    assert report.programs == 3 * -(-T // block) * (3 if block == 16 else 2)
    assert report.bytes_loaded == 4 * report.programs


def exponents(amax: Tensor, device: str) -> Tensor:
    """Return the UE8M0 scales of SwiGLU's groups with these maxima, 128 groups to a row."""
    pairs = groups_of(amax).view(-1, 128, 2, 128).transpose(1, 2).reshape(1, -1, 2 * 128 * 128)
    rows = pairs.contiguous().to(device)
    counts = counts_of((rows.shape[1],), device)
    how = activation.Activation()
    scales: Tensor = batched.batched_swiglu_quant(rows, counts, how, scale="ue8m0")[1]
    return scales.cpu().flatten()


def test_no_batched_exponent_is_one_too_small(parity_device: str, monkeypatch: pytest.MonkeyPatch):
    """Of all 30,080 BF16 maxima, 3,026 of which lose a power in vLLM's masked op.

    Tiles of 128 rows, since the virtual GPU takes its time by the tile.
    """
    amax = every_amax()
    theirs = act_quant(
        to_f32(f32_to_bf16(amax))[:, None].expand(-1, 128),
        VLLM_BATCHED.of("swiglu_quant", QuantRecipe), scale=ScaleFormat.UE8M0,
    )  # fmt: skip
    assert int((theirs.scales[:, 0] < right_power(amax)).sum()) == SHORT[0]
    monkeypatch.setattr(batched, "ROWS", 128)
    assert torch.equal(exponents(amax, parity_device), right_power(amax))
