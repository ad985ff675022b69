"""The decisions of SwiGLU, up to the quantization of its result."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parity.references.language.decision import Decision, Option, decided
from moe_parity.references.language.recipe import Part
from moe_parity.references.stages.swiglu import aims
from moe_parity.references.stages.swiglu.silu import Silu


class ProductRounding(Option):
    """What is rounded to BF16 between SiLU and the quantization."""

    ONCE = "once", "silu * up in fp32, rounded once", "TensorRT-LLM, SGLang"
    NONE = "none", "nothing: fp32 reaches the quantizer", "vLLM silu_and_mul_per_block_quant"
    TWICE = (
        "twice",
        "silu, then the product",
        "vLLM silu_and_mul, DeepGEMM experts on SM90, torch",
    )


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
    PRODUCT = (
        "product",
        "up, SiLU of the gate, and the product: roundings that a call without a limit has not",
        "vLLM PR 53875 (read in its source, not run)",
    )


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
    asked=lambda case, inputs: inputs.limit is not None,
)
CLAMP_ROUNDING = Decision(
    name="swiglu.clamp_rounding",
    question="What is rounded to BF16 after the limit?",
    options=ClampRounding,
    aim=aims.gates_past_an_odd_limit,
    asked=lambda case, inputs: inputs.limit is not None,
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
    asked=lambda case, inputs: inputs.limit is not None,
)


@dataclass(frozen=True, kw_only=True)
class SwigluRecipe(Part):
    """How SwiGLU rounds."""

    silu: Silu = decided(SILU, Silu.MUL_RECIP)
    product_rounding: ProductRounding = decided(PRODUCT_ROUNDING, ProductRounding.ONCE)
    clamp_order: ClampOrder = decided(CLAMP_ORDER, ClampOrder.BEFORE)
    clamp_rounding: ClampRounding = decided(CLAMP_ROUNDING, ClampRounding.NONE)
    shift: Shift = decided(SHIFT, Shift.IF_ANY)
    clamp_nan: ClampNan = decided(CLAMP_NAN, ClampNan.HIGH)
