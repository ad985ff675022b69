"""The decisions of block quantization to E4M3: ``act_quant``, ``weight_quant`` and fused twins.

A group (1 x 128 or 1 x 64 of an activation, 128 x 128 of a weight) has amax = max |x|.  It gets a
scale s, stored, and codes q; x is about decode(q) * s.  Notation: RN = one fp32 rounding to nearest
even, ``/~`` = Triton's ``/`` (div.full), ``/f`` = fast-math division (div.approx.ftz).
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_parity.references.language.decision import Decision, Option, decided
from moe_parity.references.language.recipe import Part
from moe_parity.references.stages.quant import aims


class Floor(Option):
    """What keeps a tiny group's scale away from zero."""

    NONE = "none", "no floor", "TensorRT-LLM scale_1x128_kernel"
    AMAX_OVERFLOW = (
        "amax_overflow",
        "amax at least the smallest fp32 whose 448/amax is finite (1.3165538e-36)",
        "ours: where 448/amax overflows, TensorRT-LLM stores scale 0 and turns zeros into NaN",
    )
    AMAX_1E_10 = "amax_1e-10", "amax at least 1e-10", "vLLM, SGLang"
    AMAX_1E_4 = "amax_1e-4", "amax at least 1e-4", "DeepGEMM cast helpers"
    SCALE_1E_10 = "scale_1e-10", "scale at least 1e-10", "vLLM silu_mul_quant_fp8_packed"
    SCALE_FUSED = (
        "scale_fused",
        "scale at least 1/(448*512)",
        "vLLM silu_and_mul_per_block_quant",
    )
    SCALE_FUSED_OR_1E_10 = (
        "scale_fused_or_1e-10",
        "scale at least 1/(448*512), before a power of two at least 1e-10 in its place",
        "vLLM PR 53875 (read in its source, not run)",
    )
    SCALE_MIN_NORMAL = (
        "scale_min_normal",
        "scale at least the smallest normal fp32",
        "FlashInfer trtllm-gen",
    )


class FloorOrder(Option):
    """Where the floor of a scale stands beside the power of two (UE8M0 formats only)."""

    BEFORE = "before", "max(s, floor), then the power of two", "vLLM, and the seed of its fused op"
    AFTER = "after", "the power of two, then max(s, floor): the floor is none", "nobody known"


class ZeroGroup(Option):
    """What an all-zero group gets."""

    AS_FLOORED = "as_floored", "no special case: the floor decides", "vLLM, DeepGEMM, SGLang"
    SCALE_ONE = "scale_one", "scale 1", "TensorRT-LLM scale_1x128_kernel"


class SubnormalAmax(Option):
    """What the maximum of a group of subnormals is."""

    LARGEST = "largest", "the largest magnitude", "every project without fast-math"
    FIRST_LANE = (
        "first_lane",
        "the largest of elements 0, 1, 64 and 65: lanes are compared flushed, and the first stays",
        "FlashInfer: the TensorRT-LLM source under -use_fast_math (measured on an H200)",
    )


class ScaleForm(Option):
    """How the fp32 scale comes from amax."""

    DIV_448 = "div_448", "RN(amax / 448)", "vLLM CUDA ops, DeepGEMM"
    MUL_RECIP_448 = (
        "mul_recip_448",
        "RN(amax * RN(1/448)); amax /~ 448 is the same, since rcp.approx(448) = RN(1/448)",
        "vLLM Triton fallback, SGLang JIT and Triton, FlashInfer mono_moe",
    )
    RECIP_OF_MULTIPLIER = (
        "recip_of_multiplier",
        "RN(1 / RN(448 / amax)): two roundings",
        "TensorRT-LLM scale_1x128_kernel",
    )
    RECIP_OF_MULTIPLIER_FAST = (
        "recip_of_multiplier_fast",
        "1 /f (448 /f amax)",
        "FlashInfer: the TensorRT-LLM source under -use_fast_math",
        True,
    )
    MUL_RECIP_448_BF16 = (
        "mul_recip_448_bf16",
        "BF16(amax * BF16(1/448)): 0.2 % low before its rounding",
        "vLLM persistent_masked_m_silu_mul_quant",
    )


class Apply(Option):
    """How an element is brought to the range of E4M3."""

    DIVIDE = "divide", "RN(x / s)", "vLLM 0.26.0, vLLM silu_and_mul_per_block_quant"
    DIVIDE_FULL = (
        "divide_full",
        "x /~ s = RN(x * rcp.approx(s)); x * (1 /~ s) is the same for every scale in use",
        "vLLM Triton fallback, SGLang Triton",
        True,
    )
    MUL_RECIP = "mul_recip", "RN(x * RN(1 / s))", "vLLM 0.33.0, DeepGEMM cast helpers"
    MUL_MULTIPLIER = "mul_multiplier", "RN(x * RN(448 / amax))", "TensorRT-LLM"
    MUL_MULTIPLIER_FAST = (
        "mul_multiplier_fast",
        "RN(x * (448 /f amax))",
        "SGLang JIT, FlashInfer under -use_fast_math",
        True,
    )
    MUL_RECIP_BF16 = (
        "mul_recip_bf16",
        "BF16(x * BF16(1 / s))",
        "vLLM persistent_masked_m_silu_mul_quant",
    )


class PowerOfTwo(Option):
    """How a scale becomes a power of two (UE8M0 formats only)."""

    BIT_CEIL = "bit_ceil", "exponent, plus one if the fraction is not zero", "vLLM 0.33.0, SGLang"
    BIT_CEIL_CLAMPED = (
        "bit_ceil_clamped",
        "the same, exponent byte clamped to 1..254",
        "DeepGEMM ceil_to_ue8m0",
    )
    LOG2 = (
        "log2",
        "exp2(ceil(log2 s)) with libdevice log2 and ex2.approx",
        "vLLM generic and Triton kernels, SGLang Triton",
        True,
    )
    LOG2_BF16 = (
        "log2_bf16",
        "2^ceil(BF16(log2 s)): the logarithm is rounded before the ceiling",
        "vLLM persistent_masked_m_silu_mul_quant",
        True,
    )
    TRUNCATE = (
        "truncate",
        "the exponent alone, fraction dropped",
        "DeepGEMM's packing fallback without its assertion",
    )


class NanElement(Option):
    """The code of a NaN element."""

    KEEP = "keep", "E4M3 NaN 0x7f", "TensorRT-LLM, DeepGEMM, SGLang from BF16"
    LOW = "low", "-448: max(q, -448) comes first", "vLLM per_token_group_fp8_quant"
    HIGH = "high", "+448: min(q, 448) comes first", "vLLM silu_and_mul_per_block_quant"


class Overflow(Option):
    """The code of an element past 464, the end of rounding to 448."""

    SATURATE = "saturate", "+-448", "cvt.rn.satfinite, torch 2.13 and later"
    NAN = "nan", "E4M3 NaN", "torch 2.11's cast to float8_e4m3fn"


class NanAmax(Option):
    """What a NaN does to its group's amax."""

    IGNORE = "ignore", "NaN is skipped; a group of NaN has amax 0", "fmaxf folded from 0: vLLM"
    IGNORE_UNLESS_ALL = (
        "ignore_unless_all",
        "NaN is skipped unless all elements are",
        "TensorRT-LLM's grouped kernel",
    )
    PROPAGATE = "propagate", "amax is NaN", "torch amax: DeepGEMM cast helpers"


FLOOR = Decision(
    name="quant.floor",
    question="What keeps the scale of a tiny group away from zero?",
    options=Floor,
    aim=aims.tiny_groups,
)
FLOOR_ORDER = Decision(
    name="quant.floor_order",
    question="Does the floor of a scale stand before the power of two?",
    options=FloorOrder,
    aim=aims.tiny_groups,
    formats=("ue8m0",),
    # A floor of amax comes first by itself, and one that is a power of two may come last.
    exists=lambda recipe: (
        recipe.floor in (Floor.SCALE_1E_10, Floor.SCALE_FUSED, Floor.SCALE_FUSED_OR_1E_10)
    ),
)
ZERO_GROUP = Decision(
    name="quant.zero_group",
    question="Which scale does an all-zero group get?",
    options=ZeroGroup,
    aim=aims.zero_groups,
)
SUBNORMAL_AMAX = Decision(
    name="quant.subnormal_amax",
    question="Which element is the maximum of a group of subnormals?",
    options=SubnormalAmax,
    aim=aims.tiny_groups,
    # Comparisons flush under fast-math alone; a floor of amax or of the scale hides it.
    exists=lambda recipe: (
        recipe.zero_group is ZeroGroup.SCALE_ONE and recipe.apply is Apply.MUL_MULTIPLIER_FAST
    ),
)
SCALE_FORM = Decision(
    name="quant.scale_form",
    question="How does the scale come from amax?",
    options=ScaleForm,
    aim=aims.all_amax_mantissas,
)
APPLY = Decision(
    name="quant.apply",
    question="How is an element divided by its scale?",
    options=Apply,
    aim=aims.ties,
    reaches=("codes",),
)
POWER_OF_TWO = Decision(
    name="quant.power_of_two",
    question="How does a scale become a power of two?",
    options=PowerOfTwo,
    aim=aims.power_of_two_edges,
    formats=("ue8m0",),
)
NAN_ELEMENT = Decision(
    name="quant.nan_element",
    question="Which code does a NaN element get?",
    options=NanElement,
    aim=aims.nan_elements,
    reaches=("codes",),
)
OVERFLOW = Decision(
    name="quant.overflow",
    question="Which code does an element past the end of E4M3 get?",
    options=Overflow,
    aim=aims.past_the_end,
    reaches=("codes",),
    # A group's scale covers its elements unless the exponent is clamped below Inf or cut, or
    # nothing keeps 448 / amax from overflowing.
    exists=lambda recipe: (
        recipe.power_of_two
        in (PowerOfTwo.BIT_CEIL_CLAMPED, PowerOfTwo.TRUNCATE, PowerOfTwo.LOG2_BF16)
        or recipe.floor is Floor.NONE
    ),
)
NAN_AMAX = Decision(
    name="quant.nan_amax",
    question="Does a NaN enter amax?",
    options=NanAmax,
    aim=aims.nan_elements,
)


@dataclass(frozen=True, kw_only=True)
class QuantRecipe(Part):
    """How one quantizer rounds."""

    floor: Floor = decided(FLOOR, Floor.NONE)
    floor_order: FloorOrder = decided(FLOOR_ORDER, FloorOrder.BEFORE)
    zero_group: ZeroGroup = decided(ZERO_GROUP, ZeroGroup.AS_FLOORED)
    subnormal_amax: SubnormalAmax = decided(SUBNORMAL_AMAX, SubnormalAmax.LARGEST)
    scale_form: ScaleForm = decided(SCALE_FORM, ScaleForm.DIV_448)
    apply: Apply = decided(APPLY, Apply.DIVIDE)
    power_of_two: PowerOfTwo = decided(POWER_OF_TWO, PowerOfTwo.BIT_CEIL)
    nan_element: NanElement = decided(NAN_ELEMENT, NanElement.KEEP)
    overflow: Overflow = decided(OVERFLOW, Overflow.SATURATE)
    nan_amax: NanAmax = decided(NAN_AMAX, NanAmax.IGNORE)
