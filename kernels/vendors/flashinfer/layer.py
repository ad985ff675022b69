"""TensorRT-LLM's whole fused layer, from the source that FlashInfer ships, in either build."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, demand_aligned, demand_contiguous
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.flashinfer.package import NVCC, Build, versions
from moe_parity.kernels.vendors.flashinfer.runner import sources
from moe_parity.kernels.vendors.flashinfer.runner.library import Layer, loaded
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Gate, Skip, Why
from moe_parity.references.stages import LAYER

BLOCK = 128
HOPPER = "TensorRT-LLM's fused layer with block scales needs a Hopper GPU."


def unavailable(build: Build) -> Skip | None:
    """Return None where a build is there and the GPU runs it, else why not."""
    try:
        sources.data()
    except ParityError as error:
        return Skip(Why.ABSENT, str(error))
    if not torch.cuda.is_available():
        return Skip(Why.NEEDS_GPU, HOPPER)
    if torch.cuda.get_device_capability()[0] != 9:
        return Skip(Why.NEEDS_CHIP, HOPPER)
    if sources.nvcc() is None:
        return Skip(Why.ABSENT, NVCC)
    if not sources.library(build).is_file():
        return Skip(
            Why.ABSENT,
            f"the {build} build of the fused layer is not at {sources.library(build)}; compile it: "
            f"python -m moe_parity.kernels.vendors.flashinfer.runner.build {build}.",
        )
    try:
        loaded(build)
    except ParityError as error:
        return Skip(Why.ABSENT, str(error))
    return None


def up_first(w13: Tensor) -> Tensor:
    """Return weights, or scales, of both halves of FC1 with up's rows before the gate's.

    [E, 2 * I, H] or [E, 2 * I / 128, H / 128]; ours have the gate's first.
    """
    gate, up = w13.chunk(2, dim=1)
    return torch.cat([up, gate], dim=1)


def check_operands(
    x: Tensor, ids: Tensor, weights: Tensor | None, w31: Tensor, w31_scale: Tensor, w2: Tensor,
    w2_scale: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Raise ParityError for what the layer would read wrong: it takes addresses and sizes alone.

    ``x`` bf16 [M, H], ``ids`` int32 [M, k], ``weights`` fp32 [M, k] or None, ``w31`` E4M3 codes as
    uint8 [E, 2 * I, H], ``w2`` [E, H, I], their scales fp32 of 128 x 128 tiles, ``out`` as ``x``.
    """
    (m, h), k, (e, _, i) = x.shape, ids.shape[-1], w2.shape
    wanted = {
        "x": (x, torch.bfloat16, (m, h)),
        "ids": (ids, torch.int32, (m, k)),
        "weights": (weights, torch.float32, (m, k)),
        "w31": (w31, torch.uint8, (e, 2 * i, h)),
        "w31_scale": (w31_scale, torch.float32, (e, 2 * i // BLOCK, h // BLOCK)),
        "w2": (w2, torch.uint8, (e, h, i)),
        "w2_scale": (w2_scale, torch.float32, (e, h // BLOCK, i // BLOCK)),
        "out": (out, torch.bfloat16, (m, h)),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
            raise ParityError(
                f"FlashInfer's fused layer: {name} must be {dtype} {list(shape)}, got "
                f"{tensor.dtype} {list(tensor.shape)}."
            )
        demand_contiguous(tensor, f"FlashInfer's fused layer: {name}")
    # Rows of activations, weights and outputs are moved in vectors or by TMA.
    for name, tensor in (("x", x), ("w31", w31), ("w2", w2), ("out", out)):
        demand_aligned(tensor, f"FlashInfer's fused layer: {name}")
    reason = refused(m, h, i)
    if reason:
        raise ParityError(f"FlashInfer's fused layer: {reason}")


def refused(m: int, h: int, i: int) -> str | None:
    """Return why sizes are refused, or None."""
    if h % BLOCK or i % BLOCK:
        return f"H = {h} and I = {i} must be multiples of 128."
    return "it refuses a batch of no tokens." if m == 0 else None


def fused_moe(
    build: Build, x: Tensor, ids: Tensor, weights: Tensor | None, w31: Tensor, w31_scale: Tensor,
    w2: Tensor, w2_scale: Tensor, out: Tensor, *, ep_size: int = 1, ep_rank: int = 0,
) -> None:  # fmt: skip
    """Write bf16 ``out`` [M, H] of this rank's experts.  See check_operands.

    ``ids`` are those of all ranks' experts, of which this rank has those from ``ep_rank * E`` on.
    """
    check_operands(x, ids, weights, w31, w31_scale, w2, w2_scale, out)
    library = loaded(build)
    layer = Layer(
        input=x.data_ptr(), selected=ids.data_ptr(),
        final_scales=None if weights is None else weights.data_ptr(),
        fc1=w31.data_ptr(), fc2=w2.data_ptr(),
        fc1_scales=w31_scale.data_ptr(), fc2_scales=w2_scale.data_ptr(), output=out.data_ptr(),
        rows=x.shape[0], hidden=x.shape[1], inter=w2.shape[2], experts=w2.shape[0] * ep_size,
        top_k=ids.shape[1], ep_size=ep_size, ep_rank=ep_rank, dependent_launch=1,
    )  # fmt: skip
    workspace = torch.empty(library.workspace(layer), dtype=torch.uint8, device=x.device)
    layer.workspace = workspace.data_ptr()
    library.run(layer, torch.cuda.current_stream(x.device).cuda_stream)


def _supports(case: Case, device: str) -> str | None:
    if case.scale.is_power_of_two or case.mid.is_power_of_two:
        return "it quantizes with fp32 scales, not with powers of two."
    if case.clamp is not None or case.gate is not Gate.SILU:
        return "the adapter asks for the plain SwiGLU, without a limit, alpha or beta."
    return refused(case.m, case.h, case.i)


def _register(name: str, build: Build, recipe: str, note: str) -> None:
    @register(
        name, stage=LAYER, recipes=recipe, supports=_supports,
        unavailable=partial(unavailable, build), needs_gpu=True, versions=versions, note=note,
    )  # fmt: skip
    def layer(call: Call) -> Tensor:
        batch, experts, case = call.inputs.batch, call.inputs.experts, call.case
        out = call.new("out")
        fused_moe(
            build, batch.x, batch.ids.int(), batch.weights, up_first(experts.w13),
            up_first(experts.w13_scale), experts.w2, experts.w2_scale, out,
            ep_size=case.ep_size, ep_rank=case.ep_rank,
        )  # fmt: skip
        return out


_register(
    "trtllm_fused_moe", Build.EXACT, "trtllm_fused",
    "TensorRT-LLM's fused layer from FlashInfer's sources, without -use_fast_math.",
)  # fmt: skip
_register(
    "flashinfer_fused_moe", Build.SHIPPED, "flashinfer_cutlass",
    "TensorRT-LLM's fused layer as FlashInfer compiles it, with -use_fast_math.",
)  # fmt: skip
