"""The catalogue of real model shapes, for suites, tables and timings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from moe_parity.references.language import Case


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer of a model on one rank: experts, top-k, hidden and intermediate size, EP ranks."""

    name: str
    e: int
    k: int
    h: int
    i: int
    ep_size: int = 1

    def case(self, base: Case, m: int) -> Case:
        """Return ``base`` with this shape and m tokens; under EP, as its rank 2."""
        rank = min(2, self.ep_size - 1)
        return dataclasses.replace(
            base, m=m, e=self.e, k=self.k, h=self.h, i=self.i, ep_size=self.ep_size, ep_rank=rank
        )


MODELS = (
    Shape(name="deepseek_v3_tp8", e=256, k=8, h=7168, i=256),
    Shape(name="deepseek_v3_ep8", e=256, k=8, h=7168, i=2048, ep_size=8),
    Shape(name="qwen3_235b_tp4", e=128, k=8, h=4096, i=384),
    Shape(name="qwen3_30b_tp1", e=128, k=8, h=2048, i=768),
    Shape(name="glm_5_3_tp8", e=256, k=8, h=6144, i=256),
    Shape(name="glm_5_3_flash_tp4", e=288, k=8, h=4096, i=512),
    Shape(name="seed_benchmark", e=32, k=8, h=7168, i=2048),
    Shape(name="near_tolerance", e=8, k=2, h=7168, i=4608),
)
"""Per rank; I is that of the rank under tensor parallelism.

``near_tolerance`` is N = 4608, K = 7168 of vLLM's block-FP8 test, the shape at which seed 000 has
three failures near the tolerance; E and top-k are the middle ones of the test's.
"""

ODD = (
    Shape(name="odd_experts_72", e=72, k=2, h=512, i=256),
    Shape(name="odd_experts_5", e=5, k=2, h=256, i=128),
    Shape(name="top_1", e=16, k=1, h=256, i=128),
    Shape(name="top_6", e=24, k=6, h=256, i=128),
    Shape(name="top_9", e=40, k=9, h=256, i=128),
    Shape(name="top_22", e=64, k=22, h=256, i=128),
)
"""Shapes that a power of two, a single block or a small k would hide."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A dense linear: N outputs of K inputs."""

    name: str
    n: int
    k: int

    def case(self, base: Case, m: int) -> Case:
        """Return ``base`` as the first GEMM of one expert that all m tokens take."""
        return dataclasses.replace(base, m=m, e=1, k=1, h=self.k, i=self.n // 2, ep_size=1)


LINEARS = (
    Linear(name="seed_near_tolerance", n=4608, k=7168),
    Linear(name="qwen3_8b_qkv", n=6144, k=4096),
    Linear(name="qwen3_8b_o", n=4096, k=4096),
    Linear(name="qwen3_8b_gate_up", n=24576, k=4096),
    Linear(name="qwen3_8b_down", n=4096, k=12288),
)
"""The seed's shape whose outputs lie near its tolerance, and the four linears of Qwen3-8B."""

DECODE_TOKENS = (1, 2, 4, 8, 16, 24, 31, 32, 33, 64)
