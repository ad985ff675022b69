"""torch's own block-scaled product, 1 x 128 by 128 x 128: cuBLASLt on a Hopper GPU.

cuBLASLt's heuristic decides whether K is one chain or halves that are added last, so a case of
large K has two recipes; ``suites/test_scaled_mm.py`` records which was met at which shape.
"""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.registry import register
from moe_parity.references.language import Case, Recipe, Skip, Why
from moe_parity.references.recipes.deepgemm import DEEPGEMM_GEMM
from moe_parity.references.recipes.pytorch import SCALED_MM_HALVES
from moe_parity.references.stages.gemm.decisions import half_of
from moe_parity.references.stages.gemm.stage import GroupedRows

SPLITS_FROM = 6144
"""The least K of which halves were seen; of 512, 1024 and 2048 they were not."""
ROWS = 4
"""Tokens are a multiple: cuBLASLt refuses others (met from 1 to 1,028)."""
WORDS = 4
"""Scales of the weights that lie together: K's blocks are padded to a multiple."""


def unavailable() -> Skip | None:
    """Return None where torch has the op and the GPU runs it, else why not."""
    if not hasattr(torch.nn.functional, "scaled_mm"):
        older = f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; 2.11 has it."
        return Skip(Why.ABSENT, older)
    if not torch.cuda.is_available():
        return Skip(Why.NEEDS_GPU, "torch's block-scaled scaled_mm needs a Hopper GPU.")
    if torch.cuda.get_device_capability()[0] != 9:
        return Skip(Why.NEEDS_CHIP, "torch's block-scaled scaled_mm needs a Hopper GPU.")
    return None


def versions() -> dict[str, str]:
    """Return the versions of torch and of the cuBLAS that it loads."""
    found = {"torch": str(torch.__version__)}
    for name in ("nvidia-cublas", "nvidia-cublas-cu12"):
        try:
            found["cublas"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def recipes(case: Case, device: str) -> tuple[Recipe, ...]:
    """Return one chain, and halves of K where they may be met."""
    if case.h < SPLITS_FROM or half_of(case.h) is None:
        return (DEEPGEMM_GEMM,)
    return DEEPGEMM_GEMM, SCALED_MM_HALVES


def scales_of_rows(a_scale: Tensor) -> Tensor:
    """Return fp32 scales [M, K / 128] with stride 1 along M, as the op wants them."""
    rows, blocks = a_scale.shape
    made = torch.empty_strided((rows, blocks), (1, rows), device=a_scale.device)
    return made.copy_(a_scale)


def scales_of_tiles(w_scale: Tensor) -> Tensor:
    """Return fp32 scales [N / 128, K / 128] as [4 ceil(K / 512), N / 128], stride 1 along K.

    The rows past K are zeros.  The op refuses scales without them.
    """
    tiles, blocks = w_scale.shape
    padded = -(-blocks // WORDS) * WORDS
    made = torch.zeros((tiles, padded), device=w_scale.device)
    made[:, :blocks] = w_scale
    return made.t()


def scaled_mm(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """Return bf16 [M, N] of codes ``a`` [M, K] and ``w`` [N, K], uint8, with their fp32 scales."""
    kinds = torch.nn.functional.ScalingType
    made: Tensor = torch.nn.functional.scaled_mm(
        a.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn).t(),
        scales_of_rows(a_scale), kinds.BlockWise1x128,
        scales_of_tiles(w_scale), kinds.BlockWise128x128, output_dtype=torch.bfloat16,
    )  # fmt: skip
    return made


def _supports(case: Case, device: str) -> str | None:
    if case.e != 1 or case.k != 1 or case.ep_size != 1:
        return "one expert and one choice: a dense product."
    if case.m % ROWS:
        return f"M = {case.m} must be a multiple of {ROWS}: cuBLASLt refuses others."
    if case.h % 128 or (2 * case.i) % 16:
        return f"K = {case.h} must be a multiple of 128 and N = {2 * case.i} one of 16."
    return None


@register(
    "torch_scaled_mm", stage="fc1", recipes=recipes, supports=_supports, unavailable=unavailable,
    needs_gpu=True, versions=versions,
)  # fmt: skip
def torch_scaled_mm(call: Call) -> Tensor:
    """torch.nn.functional.scaled_mm, 1 x 128 by 128 x 128 (cuBLASLt)."""
    inputs: GroupedRows = call.inputs
    return scaled_mm(inputs.a, inputs.a_scale, inputs.w[0], inputs.w_scale[0])
