"""Recipes: which rounding happens where, as ordinary frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_parity.references.language import layer_decisions as d
from moe_parity.references.language import quant_decisions as q
from moe_parity.references.language.decision import decided
from moe_parity.references.language.stage import Stage


@dataclass(frozen=True, kw_only=True)
class QuantRecipe:
    """How one quantizer rounds; every field is a decision.

    Raises ValueError for options of another decision.
    """

    floor: q.Floor = decided(q.FLOOR, q.Floor.NONE)
    zero_group: q.ZeroGroup = decided(q.ZERO_GROUP, q.ZeroGroup.AS_FLOORED)
    scale_form: q.ScaleForm = decided(q.SCALE_FORM, q.ScaleForm.DIV_448)
    apply: q.Apply = decided(q.APPLY, q.Apply.DIVIDE)
    power_of_two: q.PowerOfTwo = decided(q.POWER_OF_TWO, q.PowerOfTwo.BIT_CEIL)
    nan_element: q.NanElement = decided(q.NAN_ELEMENT, q.NanElement.KEEP)
    overflow: q.Overflow = decided(q.OVERFLOW, q.Overflow.SATURATE)
    nan_amax: q.NanAmax = decided(q.NAN_AMAX, q.NanAmax.IGNORE)

    def __post_init__(self) -> None:
        """Reject an option that does not belong to its field."""
        for name, spec in self.__dataclass_fields__.items():
            decision = spec.metadata["decision"]
            value = getattr(self, name)
            if not isinstance(value, decision.options):
                known = ", ".join(decision.options)
                raise ValueError(f"{decision.name} cannot be {value!r}; its options are: {known}.")


@dataclass(frozen=True, kw_only=True)
class GemmRecipe:
    """How a block-scaled GEMM rounds."""

    unit: d.DotUnit = decided(d.DOT_UNIT, d.DotUnit.WGMMA_FP8)
    scale_order: d.ScaleOrder = decided(d.SCALE_ORDER, d.ScaleOrder.PRODUCT_FIRST)
    accumulate: d.Accumulate = decided(d.ACCUMULATE, d.Accumulate.FMA)
    interval: d.Interval = decided(d.INTERVAL, d.Interval.K128)
    bias_at: d.BiasAt = decided(d.BIAS_AT, d.BiasAt.BEFORE_ROUNDING)


@dataclass(frozen=True, kw_only=True)
class SwigluRecipe:
    """How SwiGLU rounds, up to the quantization of its result."""

    silu: d.Silu = decided(d.SILU, d.Silu.MUL_RECIP)
    product_rounding: d.ProductRounding = decided(d.PRODUCT_ROUNDING, d.ProductRounding.ONCE)
    clamp_order: d.ClampOrder = decided(d.CLAMP_ORDER, d.ClampOrder.BEFORE)
    clamp_rounding: d.ClampRounding = decided(d.CLAMP_ROUNDING, d.ClampRounding.NONE)
    shift: d.Shift = decided(d.SHIFT, d.Shift.IF_ANY)
    clamp_nan: d.ClampNan = decided(d.CLAMP_NAN, d.ClampNan.HIGH)


@dataclass(frozen=True, kw_only=True)
class CombineRecipe:
    """How the top-k sum rounds."""

    weights_at: d.WeightsAt = decided(d.WEIGHTS_AT, d.WeightsAt.TOPK_SUM)
    order: d.SumOrder = decided(d.SUM_ORDER, d.SumOrder.ASCENDING)
    step: d.SumStep = decided(d.SUM_STEP, d.SumStep.FMA)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named recipe: one small value per stage that it decides."""

    name: str
    source: str
    """The code it describes."""
    stages: dict[Stage, QuantRecipe] = field(default_factory=dict)
    """The quantizers: ``act_quant``, ``weight_quant``, and the one after SwiGLU."""
    gemm: GemmRecipe | None = None
    swiglu: SwigluRecipe | None = None
    combine: CombineRecipe | None = None

    def __hash__(self) -> int:
        """Hash by name: names are unique (``recipes.ALL``)."""
        return hash(self.name)

    def of(self, stage: Stage) -> QuantRecipe:
        """Return the part of ``stage``; raises KeyError with a sentence where there is none."""
        if stage not in self.stages:
            raise KeyError(f"recipe {self.name} says nothing about stage {stage}.")
        return self.stages[stage]

    def says(self, stage: Stage) -> bool:
        """Whether the recipe describes ``stage``."""
        needed: dict[Stage, bool] = {
            Stage.FC1: self.gemm is not None,
            Stage.FC2: self.gemm is not None,
            Stage.SWIGLU: self.swiglu is not None,
            Stage.SWIGLU_QUANT: self.swiglu is not None and Stage.SWIGLU_QUANT in self.stages,
            Stage.COMBINE: self.combine is not None,
            Stage.LAYER: None not in (self.gemm, self.swiglu, self.combine),
            Stage.ALIGN: True,
            Stage.PERMUTE: True,
        }
        return needed.get(stage, stage in self.stages)

    @property
    def layer(self) -> tuple[GemmRecipe, SwigluRecipe, CombineRecipe]:
        """Return the parts of a whole layer; raises KeyError where one is missing."""
        if self.gemm is None or self.swiglu is None or self.combine is None:
            raise KeyError(f"recipe {self.name} describes quantizers, not a whole layer.")
        return self.gemm, self.swiglu, self.combine
