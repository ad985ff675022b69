"""The speed of the tensor-core model, by which a layer of a real size is affordable."""

from __future__ import annotations

import os
import time

import pytest
import torch

from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.silicon.models import DotCase, operands
from moe_parity.references.chips import tensor_core
from moe_parity.references.chips.hopper import WGMMA_FP8

FLOOR = {"cpu": 5e8, "cuda": 1e11}
"""Multiply-adds per second: two cores of a laptop, one H200."""

SIZE = {"cpu": (512, 1024, 2048), "cuda": (4096, 4096, 4096)}


def _once(a: torch.Tensor, b: torch.Tensor) -> float:
    start = time.perf_counter()
    tensor_core.dot(a, b, unit=WGMMA_FP8)
    if a.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def test_wgmma_model(parity_device: str, parity_recorder: Recorder):
    """Dense operands, compiled before the clock starts, the best of three."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("a timing means nothing beside other workers; run without -n")
    m, n, k = SIZE[parity_device]
    a, b, _ = operands(DotCase(unit="wgmma_fp8", m=m, n=n, k=k), 0, parity_device)
    _once(a[:64, :64].contiguous(), b[:64].contiguous())
    speed = m * n * k / min(_once(a, b) for _ in range(3))
    slow = speed < FLOOR[parity_device]
    message = f"{speed:.3g} multiply-adds per second, expected {FLOOR[parity_device]:.0e}"
    print(message)
    claim(
        parity_recorder, "speed", message if slow else "", kernel="model_wgmma_fp8", bound="",
        device=parity_device, shape=f"m{m}-n{n}-k{k}",
    )  # fmt: skip
