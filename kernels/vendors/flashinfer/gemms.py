"""FlashInfer's block-FP8 GEMM as the harness sees it, in either build."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, demand_aligned, demand_contiguous
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.flashinfer import package
from moe_parity.kernels.vendors.flashinfer.package import Build
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.references.stages import QUANT_GEMM

BLOCK = 128


def check_operands(x: Tensor, w: Tensor, w_scale: Tensor, out: Tensor) -> None:
    """Raise ParityError for what the kernel would read wrong: it takes pointers and sizes alone.

    ``x`` is bf16 [M, K], ``w`` E4M3 codes as uint8 [N, K], ``w_scale`` fp32 [ceil(N / 128),
    K / 128], ``out`` bf16 [M, N].
    """
    (m, k), n = x.shape, w.shape[0]
    wanted = {
        "x": (x, torch.bfloat16, (m, k)),
        "w": (w, torch.uint8, (n, k)),
        "w_scale": (w_scale, torch.float32, (-(-n // BLOCK), -(-k // BLOCK))),
        "out": (out, torch.bfloat16, (m, n)),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
            raise ParityError(
                f"FlashInfer: {name} must be {dtype} {list(shape)}, got {tensor.dtype} "
                f"{list(tensor.shape)}."
            )
        demand_contiguous(tensor, f"FlashInfer: {name}")
    # Weights are read and rows are written by TMA, activations in pairs.
    for name, count in (("x", 4), ("w", 16), ("out", 16)):
        demand_aligned(wanted[name][0], f"FlashInfer: {name}", count)
    reason = refused(m, n, k)
    if reason:
        raise ParityError(f"FlashInfer: {reason}")


def refused(m: int, n: int, k: int) -> str | None:
    """Return why sizes are refused, or None."""
    if k % BLOCK or n % 64:
        return f"K = {k} must be a multiple of 128 and N = {n} one of 64."
    return "it refuses a batch of no rows." if m == 0 else None


def gemm(build: Build, x: Tensor, w: Tensor, w_scale: Tensor, out: Tensor) -> None:
    """Write bf16 ``out`` [M, N] of rows ``x`` [M, K], quantized inside.  See check_operands."""
    check_operands(x, w, w_scale, out)
    with package.built_as(build) as function:
        function(x, w.view(torch.float8_e4m3fn), None, w_scale, out)


def _supports(case: Case, device: str) -> str | None:
    if case.scale.is_power_of_two:
        return "it quantizes with fp32 scales, not with powers of two."
    return refused(case.m, case.i, case.h)


def _register(name: str, build: Build, recipe: str, note: str) -> None:
    @register(
        name, stage=QUANT_GEMM, recipes=recipe, supports=_supports,
        unavailable=partial(package.lacking, build), needs_gpu=True,
        versions=package.versions, note=note,
    )  # fmt: skip
    def quant_gemm(call: Call) -> Tensor:
        inputs, out = call.inputs, call.new("rows")
        gemm(build, inputs.x, inputs.w, inputs.w_scale, out)
        return out


_register(
    "flashinfer_blockscale_gemm", Build.SHIPPED, "flashinfer_cutlass",
    "FlashInfer fp8_blockscale_gemm_sm90 as it is shipped, -use_fast_math.",
)  # fmt: skip
_register(
    "flashinfer_blockscale_gemm_exact", Build.EXACT, "trtllm_fused",
    "The same without -use_fast_math: TensorRT-LLM's arithmetic.",
)  # fmt: skip
