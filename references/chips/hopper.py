"""Hopper, compute capability 9.0, as measured on an H200 (docs/measurements/arithmetic.md)."""

from __future__ import annotations

from moe_parity.references.chips.chip import GROUP, Chip, Unit

WGMMA_FP8 = Unit(
    name="wgmma_fp8",
    alignment_bits=13,
    result_bits=13,
    steps=(tuple(range(GROUP)),),
    ptx=r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3",
)
"""FP8 WGMMA: 32 products a step."""

MMA_F16 = Unit(
    name="mma_f16",
    alignment_bits=25,
    result_bits=23,
    steps=(
        tuple(k for k in range(GROUP) if k % 4 < 2),
        tuple(k for k in range(GROUP) if k % 4 >= 2),
    ),
    ptx=r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32",
)
"""``mma.sync`` on FP16, which Triton 3.6 uses for E4M3 tiles of 16 or 32 rows."""

HOPPER = Chip(
    name="Hopper",
    capability=(9, 0),
    units=(WGMMA_FP8, MMA_F16),
    tables={"ex2": "mufu_ex2.xz", "rcp": "mufu_rcp.xz"},
    measured_on="NVIDIA H200",
)
