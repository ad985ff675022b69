"""The decisions of a block-scaled GEMM.

Notation: RN = one fp32 rounding; p = the dot product over one interval of K, s_a and s_b = the
scales of activation and weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.language.decision import Decision, Option, decided
from moe_parity.references.language.recipe import Part
from moe_parity.references.stages.gemm import aims


class DotUnit(Option):
    """What computes the dot products."""

    WGMMA_FP8 = (
        "wgmma_fp8",
        "FP8 WGMMA: 13 bits, k32 steps",
        "DeepGEMM, Triton with 64 rows or more",
        True,
    )
    MMA_F16 = "mma_f16", "mma.sync on FP16: 25 bits", "Triton 3.6 with 16 or 32 rows", True
    EXACT = "exact", "the exact sum, rounded once to fp32", "an IEEE reference"


class ScaleOrder(Option):
    """In which order the two scales meet the dot product."""

    PRODUCT_FIRST = "product_first", "RN(s_a * s_b), then times p", "DeepGEMM, TensorRT-LLM fused"
    A_THEN_B = "a_then_b", "RN(p * s_a), then times s_b", "vLLM and TensorRT-LLM Triton"
    B_THEN_A = "b_then_a", "RN(p * s_b), then times s_a", "vLLM Triton, swap-AB"


class Accumulate(Option):
    """How a scaled product enters the accumulator."""

    FMA = "fma", "one FMA per interval", "DeepGEMM; Triton's default contraction"
    MUL_ADD = "mul_add", "a product, rounded, then a sum", "Triton with contraction off"


class Interval(Option):
    """How much of K one scaled product covers."""

    K128 = "k128", "128 of K", "DeepGEMM, TensorRT-LLM, vLLM, SGLang"
    K64 = "k64", "64 of K", "SGLang Triton configurations with BLOCK_K = 64"
    K32 = "k32", "32 of K", "vLLM's batch-invariant configuration"


class SplitK(Option):
    """Whether K is cut into parts, each with an accumulator of its own."""

    NONE = "none", "one chain over K", "DeepGEMM, Triton, cuBLASLt at K = 512, 1024 and 2048"
    HALVES = (
        "halves",
        "a chain over each half of K, the two added once in fp32; one chain where no half is of "
        "whole blocks",
        "cuBLASLt, some shapes of K = 6144 and 7168",
    )


def half_of(k: int) -> int | None:
    """Return where K is cut into halves of whole blocks, None where it cannot be.

    Of an odd number of blocks nothing was measured: there the choice does not exist.
    """
    return k // 2 if k and k % (2 * BLOCK) == 0 else None


class BiasAt(Option):
    """Where an expert's bias is added."""

    BEFORE_ROUNDING = "before_rounding", "to the fp32 accumulator", "vLLM Triton"
    AFTER_ROUNDING = "after_rounding", "to the BF16 row, rounded again", "TensorRT-LLM doActivation"


DOT_UNIT = Decision(
    name="gemm.unit",
    question="Which unit computes the dot products?",
    options=DotUnit,
    aim=aims.cancelling_gemm,
)
SCALE_ORDER = Decision(
    name="gemm.scale_order",
    question="In which order do the scales meet the dot product?",
    options=ScaleOrder,
    aim=aims.cancelling_gemm,
    formats=("fp32",),
)
ACCUMULATE = Decision(
    name="gemm.accumulate",
    question="Is the accumulation one FMA or a product and a sum?",
    options=Accumulate,
    aim=aims.cancelling_gemm,
    formats=("fp32",),
)
INTERVAL = Decision(
    name="gemm.interval",
    question="How much of K does one scaled product cover?",
    options=Interval,
    aim=aims.cancelling_gemm,
)
SPLIT_K = Decision(
    name="gemm.split_k",
    question="Is K cut into halves that are added last?",
    options=SplitK,
    aim=aims.negated_half,
    asked=lambda case, inputs: half_of(inputs.a.shape[1]) is not None,
)
BIAS_AT = Decision(
    name="gemm.bias_at",
    question="Is a bias added before or after the rounding to BF16?",
    options=BiasAt,
    aim=aims.biased_gemm,
    asked=lambda case, inputs: inputs.bias is not None,
)


@dataclass(frozen=True, kw_only=True)
class GemmRecipe(Part):
    """How a block-scaled GEMM rounds."""

    unit: DotUnit = decided(DOT_UNIT, DotUnit.WGMMA_FP8)
    scale_order: ScaleOrder = decided(SCALE_ORDER, ScaleOrder.PRODUCT_FIRST)
    accumulate: Accumulate = decided(ACCUMULATE, Accumulate.FMA)
    interval: Interval = decided(INTERVAL, Interval.K128)
    split_k: SplitK = decided(SPLIT_K, SplitK.NONE)
    bias_at: BiasAt = decided(BIAS_AT, BiasAt.BEFORE_ROUNDING)
