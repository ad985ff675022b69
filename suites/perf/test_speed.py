"""The speed of the tensor-core model, by which a layer of a real size is affordable."""

from __future__ import annotations

import os
import time

import pytest
import torch

from moe_parity.harness.expect import Recorder
from moe_parity.harness.silicon.models import DotCase, operands
from moe_parity.references.chips import tensor_core

FLOOR = {"cpu": 5e8, "cuda": 1e11}
"""Multiply-adds per second: two cores of a laptop, one H200."""

SIZE = {"cpu": (512, 1024, 2048), "cuda": (4096, 4096, 4096)}


def _once(a: torch.Tensor, b: torch.Tensor) -> float:
    start = time.perf_counter()
    tensor_core.dot(a, b, unit=tensor_core.WGMMA_FP8)
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
    parity_recorder.add(
        {
            "check": "speed",
            "verdict": "fail" if slow else "pass",
            "kernel": "model_wgmma_fp8",
            "device": parity_device,
            "shape": f"m{m}-n{n}-k{k}",
            "message": message,
        }
    )
    print(message)
    assert not slow, message
