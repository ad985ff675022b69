"""Planted faults that only a replay shows: what a graph keeps of the call it was captured from.

Each kernel is right, bit for bit, in an ordinary call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.replay import replay
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.diagnosis.cause import CauseKind
from moe_parity.kernels import Call, Kernel
from moe_parity.references.arithmetic.formats import row_major
from moe_parity.references.language import Case, Check, Contract
from moe_parity.references.recipes.ours import OURS
from moe_parity.suites.planted import CASES, kernel_of, red

SIZES = {"m": 6, "e": 4, "k": 2, "h": 128, "i": 128}
STAGES = ("act_quant", "swiglu", "combine", "layer")


def case_of(stage: str) -> Case:
    """Return a small case of a stage."""
    return dataclasses.replace(CASES[stage], **{n: min(getattr(CASES[stage], n), v) for n, v in SIZES.items()})


# --- right kernels in plain torch, by recipe: what a fault is planted in ---------------------------


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [M, H] by the recipe deepgemm, in plain torch."""
    grouped = x.float().unflatten(1, (-1, 128))
    scales = grouped.abs().amax(2).clamp(1e-4) / torch.full((), 448.0)
    return (grouped * (1 / scales[..., None])).flatten(1).to(torch.float8_e4m3fn), scales


def summed(call: Call) -> Tensor:
    """Sum rows [M, k, H] in fp32, k ascending, as vLLM's moe_sum does; foreign rows are left out."""
    rows = torch.where((call.inputs.expert >= 0).view(*call.inputs.ids.shape, 1), call.inputs.rows, 0)
    total = torch.zeros(rows.shape[0], rows.shape[2])
    for k in range(rows.shape[1]):
        total += rows[:, k].float()
    return total.bfloat16()
