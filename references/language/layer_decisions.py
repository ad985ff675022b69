"""The decisions of the GEMMs, SwiGLU and the top-k sum of a block-FP8 MoE layer.

Notation as in ``quant_decisions``: RN = one fp32 rounding, ``/~`` = div.full, ``/f`` =
div.approx.ftz; p = the dot product over one interval of K, s_a and s_b = the scales of
activation and weight.
"""

from __future__ import annotations

from moe_parity.references import aims_layer as aims
from moe_parity.references.language.decision import Decision, Option


class DotUnit(Option):
    """What computes the dot products."""

    WGMMA_FP8 = (
        "wgmma_fp8",
        "FP8 WGMMA: 13 bits, k32 steps",
        "DeepGEMM, Triton with 64 rows or more",
    )
    MMA_F16 = "mma_f16", "mma.sync on FP16: 25 bits", "Triton 3.6 with 16 or 32 rows"
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


class Silu(Option):
    """How SiLU(g) is computed in fp32."""

    MUL_RECIP = (
        "mul_recip",
        "RN(g * RN(1 / RN(1 + expf(-g))))",
        "CUTLASS SiLu, vLLM silu_and_mul_per_block_quant",
    )
    DIV = "div", "RN(g / RN(1 + expf(-g)))", "vLLM silu_and_mul"
    TL_SIGMOID = (
        "tl_sigmoid",
        "RN(g * (1 /~ RN(1 + tl.exp(-g))))",
        "TensorRT-LLM Triton decode path",
    )
    DIV_FULL = "div_full", "g /~ RN(1 + tl.exp(-g))", "vLLM Triton kernels"
    DIV_APPROX = (
        "div_approx",
        "RN(g * rcp.approx(RN(1 + expf(-g))))",
        "vLLM persistent_masked_m_silu_mul_quant",
    )
    FAST = "fast", "g /f (1 + __expf(-g))", "SGLang silu_and_mul under --use_fast_math"


class ProductRounding(Option):
    """What is rounded to BF16 between SiLU and the quantization."""

    ONCE = "once", "silu * up in fp32, rounded once", "TensorRT-LLM, SGLang"
    NONE = "none", "nothing: fp32 reaches the quantizer", "vLLM silu_and_mul_per_block_quant"
    TWICE = "twice", "silu, then the product", "vLLM silu_and_mul, DeepGEMM experts on SM90"


class ClampOrder(Option):
    """Where the SwiGLU limit acts on the gate."""

    BEFORE = "before", "min(g, L) before SiLU; up to +-L", "vLLM, TensorRT-LLM SwigluBias"
    AFTER = "after", "min(SiLU(g), L); up to +-L", "SWIGLUSTEP, SGLang gemm1_clamp_limit"
    IGNORED = "ignored", "no clamp at all", "TensorRT-LLM plain Swiglu"


class ClampRounding(Option):
    """What is rounded to BF16 once the limit has acted."""

    NONE = (
        "none",
        "nothing: the clamped values stay fp32",
        "TensorRT-LLM, vLLM packed Triton kernel",
    )
    GATE = "gate", "the gate alone", "vLLM silu_and_mul_with_clamp, its vectorized path"
    BOTH = "both", "gate and up", "vLLM silu_mul_per_token_group_quant_fp8_colmajor"


class Shift(Option):
    """How beta is added to up."""

    IF_ANY = "if_any", "in fp32, not at all where beta is 0", "TensorRT-LLM, vLLM per_block_quant"
    ALWAYS = (
        "always",
        "in fp32; a beta of 0 makes -0 a +0",
        "vLLM silu_and_mul, silu_and_mul_with_clamp, its packed Triton kernel",
    )
    ALWAYS_BF16 = (
        "always_bf16",
        "the same, then rounded to BF16",
        "vLLM silu_mul_per_token_group_quant_fp8_colmajor",
    )


class ClampNan(Option):
    """What the limit makes of a NaN in up."""

    HIGH = "high", "+L: the minimum comes first", "vLLM silu_and_mul_with_clamp"
    LOW = "low", "-L: the maximum comes first", "tl.clamp: vLLM's Triton kernels"


class WeightsAt(Option):
    """Where a routing weight meets an expert's output."""

    TOPK_SUM = "topk_sum", "in the top-k sum, on rows rounded to BF16", "TensorRT-LLM, DeepGEMM"
    EPILOGUE = "epilogue", "on FC2's fp32 accumulator, before BF16", "vLLM and SGLang Triton"


class SumOrder(Option):
    """In which order of k a token's rows are added."""

    ASCENDING = "ascending", "k = 0, 1, ...", "every project read"
    DESCENDING = "descending", "from the last k", "a reduction written backwards"


class SumStep(Option):
    """How a weighted row enters the sum, in fp32."""

    FMA = "fma", "acc = RN(w * row + acc)", "nvcc's default contraction of the same source"
    MUL_ADD = "mul_add", "acc = RN(acc + RN(w * row))", "vLLM moe_sum, contraction off"


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
BIAS_AT = Decision(
    name="gemm.bias_at",
    question="Is a bias added before or after the rounding to BF16?",
    options=BiasAt,
    aim=aims.biased_gemm,
)
SILU = Decision(
    name="swiglu.silu",
    question="How is SiLU computed?",
    options=Silu,
    aim=aims.every_gate,
)
PRODUCT_ROUNDING = Decision(
    name="swiglu.product_rounding",
    question="What is rounded to BF16 before the quantization?",
    options=ProductRounding,
    aim=aims.every_gate,
)
CLAMP_ORDER = Decision(
    name="swiglu.clamp_order",
    question="Where does the limit act?",
    options=ClampOrder,
    aim=aims.gates_at_the_limit,
)
CLAMP_ROUNDING = Decision(
    name="swiglu.clamp_rounding",
    question="What is rounded to BF16 after the limit?",
    options=ClampRounding,
    aim=aims.gates_past_an_odd_limit,
)
SHIFT = Decision(
    name="swiglu.shift",
    question="How is beta added to up?",
    options=Shift,
    aim=aims.gates_past_an_odd_limit,
)
CLAMP_NAN = Decision(
    name="swiglu.clamp_nan",
    question="What does the limit make of a NaN in up?",
    options=ClampNan,
    aim=aims.gates_past_an_odd_limit,
)
WEIGHTS_AT = Decision(
    name="combine.weights_at",
    question="Where does a routing weight meet an expert's output?",
    options=WeightsAt,
    aim=aims.cancelling_rows,
)
SUM_ORDER = Decision(
    name="combine.order",
    question="In which order are a token's rows added?",
    options=SumOrder,
    aim=aims.cancelling_rows,
)
SUM_STEP = Decision(
    name="combine.step",
    question="Is a weighted row added by an FMA?",
    options=SumStep,
    aim=aims.cancelling_rows,
)
