"""The stage ``layer``: all of them, each judged on the kernel's own upstream tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK, WHOLE_SCALES, ScaleFormat, ScaleLayout
from moe_parity.references.language.case import Arrival, Case, Values
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Acting, Recipe
from moe_parity.references.language.stage import (
    Inner,
    Kind,
    Output,
    Outputs,
    Reads,
    Stage,
    Subset,
    filled,
    tensors_of,
)
from moe_parity.references.stages.combine import COMBINE, ExpertRows
from moe_parity.references.stages.gemm.stage import FC1, FC2, GroupedRows
from moe_parity.references.stages.layer.inputs import asked_of, layer_inputs
from moe_parity.references.stages.layer.operands import Arrived, Experts, LayerInputs, Routed
from moe_parity.references.stages.layer.reference import layer, layer_float64
from moe_parity.references.stages.mistakes.layer import mistakes
from moe_parity.references.stages.owned import CODES, IDS, Own
from moe_parity.references.stages.quant.stage import (
    ACT_QUANT,
    QuantInputs,
    code_output,
    scale_output,
)
from moe_parity.references.stages.routing import pairs_of
from moe_parity.references.stages.swiglu.stage import SWIGLU_QUANT, GateUpRows

MEASURED_BELOW = 1 << 24
"""Multiply-adds of one GEMM up to which a relative error is worth its float64 layer."""

"""What GEMMs on Hopper read."""


class Layer(Stage[LayerInputs]):
    """The whole layer of one rank's experts."""

    name = "layer"
    reads: ClassVar[Reads] = {
        **dict.fromkeys(("m", "e", "k", "h", "i", "clamp", "gate", "ep_rank", "ep_size")),
        **dict.fromkeys(("routing", "hazard", "arrives")),
        "scale": WHOLE_SCALES,
        "mid_scale": WHOLE_SCALES,
        "values": frozenset({Values.NORMAL, Values.AIMED, Values.SCALES}),
    }
    acting: ClassVar[Acting] = {
        "act_quant": None, "gemm": None, "swiglu": None, "swiglu_quant": None, "combine": None,
    }  # fmt: skip
    sizes = ("m", "e", "k", "h", "i")
    grouped = ("h", "i")
    partial = True

    def inputs(self, case: Case, device: str = "cpu") -> LayerInputs:
        """Return a batch and the experts; those that no owned pair takes hold NaN."""
        return layer_inputs(self.check(case), device)

    def given(self, case: Case, tensors: Mapping[str, Tensor]) -> tuple[Case, LayerInputs]:
        """Take ``x``, ``ids``, ``weights`` if any, and the experts' codes and scales.

        Of a case whose activations arrive quantized ``x`` are codes, and ``x_scale`` is taken too.
        """
        own, fp32 = Own(self.name, tensors), (torch.float32,)
        arrived = case.arrives is Arrival.QUANTIZED
        x = own.take("x", 2, CODES if arrived else (torch.bfloat16,))
        ids = own.take("ids", 2, IDS, (x.shape[0], None)).int()
        w2 = own.take("w2", 3, CODES, (None, x.shape[1], None))
        (e, h, i), blocks = w2.shape, -(-x.shape[1] // BLOCK)
        w13 = own.take("w13", 3, CODES, (e, 2 * i, h))
        case = dataclasses.replace(case, m=x.shape[0], e=e * case.ep_size, k=ids.shape[1], h=h, i=i)
        batch = Routed(
            x=x, ids=ids,
            weights=own.take("weights", 2, fp32, tuple(ids.shape)) if "weights" in own else None,
        )  # fmt: skip
        if arrived:
            scales = own.take("x_scale", 2, fp32, (x.shape[0], blocks))
            batch = Arrived(**vars(batch), x_scale=scales)
        experts = Experts(
            w13=w13, w13_scale=own.take("w13_scale", 3, fp32, (e, -(-2 * i // BLOCK), blocks)),
            w2=w2, w2_scale=own.take("w2_scale", 3, fp32, (e, blocks, -(-i // BLOCK))),
            first=case.first_expert,
        )  # fmt: skip
        return case, LayerInputs(batch=batch, experts=experts, asked=asked_of(case))

    def cost(self, case: Case) -> int:
        """Count the programs of both GEMMs, times their blocks of K."""
        pairs = case.m * case.k // case.ep_size
        taken = min(pairs, case.e)
        blocks = taken + (pairs - taken) // 16
        first = (2 * case.i // 64) * (case.h // BLOCK)
        return blocks * (first + (case.h // 64) * (case.i // BLOCK))

    def witness_cases(self) -> Iterator[Case]:
        """Yield a few tokens in both formats, on which both GEMMs and the sum cancel."""
        for scale in (ScaleFormat.FP32, ScaleFormat.UE8M0):
            yield Case(m=4, e=4, k=2, h=256, i=256, scale=scale, values=Values.AIMED, seed=11)

    def outputs(self, case: Case, inputs: LayerInputs) -> Mapping[str, Output]:
        """Every stage's tensors; ``out`` may come alone."""
        (tokens, hidden), pairs = inputs.batch.x.shape, inputs.batch.ids.numel()
        width = inputs.experts.w2.shape[2]

        def rows(count: int, columns: int, dtype: torch.dtype, axis: str) -> Output:
            return Output(
                kind=Kind.VALUES, shape=(count, columns), dtype=dtype, axes=(axis, "column")
            )

        def scales(count: int, columns: int, form: ScaleFormat, axis: str) -> Output:
            made = scale_output(count, columns // BLOCK, form, ScaleLayout.ROW, axis)
            return dataclasses.replace(made, strides=None)

        asked = inputs.asked
        own = {
            "act_codes": code_output(tokens, hidden, asked.form, "token"),
            "act_scales": scales(tokens, hidden, asked.scale, "token"),
        }
        return (own if inputs.x_scale is None else {}) | {
            "fc1": rows(pairs, 2 * width, torch.bfloat16, "pair"),
            "mid_codes": code_output(pairs, width, asked.form, "pair"),
            "mid_scales": scales(pairs, width, asked.mid, "pair"),
            "fc2": rows(pairs, hidden, torch.bfloat16, "pair"),
            "out": rows(tokens, hidden, asked.dtype, "token"),
        }

    def reference(self, case: Case, inputs: LayerInputs, recipe: Recipe) -> dict[str, Tensor]:
        """Return every stage's tensors, each from the one before."""
        made = dict(vars(layer(inputs, recipe)))
        if inputs.x_scale is not None:
            del made["act_codes"], made["act_scales"]  # what arrives is no output
        return made

    def live(self, case: Case, inputs: LayerInputs) -> Mapping[str, Tensor]:
        """Return the owned pairs."""
        return dict.fromkeys(("fc1", "mid_codes", "mid_scales", "fc2"), inputs.expert >= 0)

    def units(self, inputs: LayerInputs) -> int:
        """Count tokens."""
        return inputs.batch.ids.shape[0]

    def some(self, case: Case, inputs: LayerInputs, chosen: Tensor) -> Subset:
        """Return some tokens."""
        part = dataclasses.replace(inputs, batch=rows_of(inputs.batch, chosen))
        pairs = pairs_of(chosen, inputs.batch.ids.shape[1])
        own = ("act_codes", "act_scales") if inputs.x_scale is None else ()
        rows = dict.fromkeys(own, chosen)
        rows |= dict.fromkeys(("fc1", "mid_codes", "mid_scales", "fc2"), pairs)
        rows["out"] = chosen
        case = dataclasses.replace(case, m=chosen.numel())
        return Subset(case=case, inputs=part, rows=rows)

    def spoiled(self, inputs: LayerInputs, chosen: Tensor, value: float) -> LayerInputs:
        """Return a batch with some tokens of one number, or scales where they arrive quantized."""
        batch = inputs.batch
        if isinstance(batch, Arrived):
            filled_batch = dataclasses.replace(batch, x_scale=filled(batch.x_scale, chosen, value))
            return dataclasses.replace(inputs, batch=filled_batch)
        x = filled(batch.x, chosen, value)
        return dataclasses.replace(inputs, batch=dataclasses.replace(batch, x=x))

    def subsets(self, case: Case, inputs: LayerInputs) -> Iterator[Subset]:
        """Yield the first token alone and the last one alone."""
        if case.m < 2:
            return
        for token in (0, case.m - 1):
            yield self.some(case, inputs, torch.tensor([token], device=inputs.batch.x.device))

    def inner(self, case: Case, inputs: LayerInputs, got: Outputs) -> Iterator[Inner]:
        """Yield the five stages inside, as far as the kernel shows what lies before them."""
        for stage, own_case, made, names in steps_of(case):
            if not set(names.values()) <= got.keys():
                continue
            upstream = made(inputs, got)
            if upstream is not None:
                seen = {name: got[own] for name, own in names.items()}
                yield Inner(stage=stage, case=own_case, inputs=upstream, got=seen)

    def handed(self, inputs: LayerInputs) -> list[Tensor]:
        """Return the batch; experts are too large to copy for every call."""
        return tensors_of(inputs.batch)

    def errors(
        self, case: Case, inputs: LayerInputs, got: Outputs
    ) -> tuple[float | None, float | None]:
        """Return the L2 distances to an unquantized layer through BF16 and in float64."""
        if case.arrives is Arrival.QUANTIZED:
            return None, None
        if case.values is not Values.NORMAL or case.m * case.i * case.h > MEASURED_BELOW:
            return None, None
        found = []
        for through_bf16 in (True, False):
            exact = layer_float64(
                inputs.batch, inputs.experts, inputs.asked, through_bf16=through_bf16
            )
            norm = float(exact.norm())
            found.append(float((got["out"].double() - exact).norm()) / norm if norm else None)
        return found[0], found[1]

    def mistakes(self, case: Case, inputs: LayerInputs, recipe: Recipe) -> Iterator[Mistake]:
        """Yield those of its stages, carried on to the output."""
        right = lru_cache(maxsize=1)(lambda: self.reference(case, inputs, recipe))

        def steps(trace: Outputs) -> list[tuple[Stage[Any], Case, Any]]:
            return [(i.stage, i.case, i.inputs) for i in self.inner(case, inputs, trace)]

        def onward(name: str, made: Mapping[str, Tensor | None], copies: int) -> dict[str, Tensor]:
            given = _copied(inputs, made, copies)
            trace = {key: torch.cat([tensor] * copies) for key, tensor in right().items()}
            return self.onward(case, given, recipe, name, made, trace)

        yield from mistakes(steps, onward, right, recipe)

    def onward(
        self,
        case: Case,
        inputs: LayerInputs,
        recipe: Recipe,
        name: str,
        made: Mapping[str, Tensor | None],
        right: Outputs,
    ) -> dict[str, Tensor]:
        """Return a trace in which one stage has given something else, by its own names."""
        trace, after = dict(right), False
        for stage, own, upstream, names in steps_of(case):
            if after:
                made = stage.reference(own, upstream(inputs, trace), recipe)
            if after or stage.name == name:
                after = True
                trace |= {theirs: made[ours] for ours, theirs in names.items()}  # type: ignore[misc]
        return trace

    def neighbours(self, recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
        """Yield the neighbours of every part; the two quantizers are told apart by name."""
        return recipe.neighbours(self.acting, several=True)


def rows_of(batch: Routed, tokens: Tensor | list[int]) -> Routed:
    """Return the batch of some tokens."""
    weights = None if batch.weights is None else batch.weights[tokens].contiguous()
    x, ids = batch.x[tokens], batch.ids[tokens].contiguous()
    if isinstance(batch, Arrived):
        return Arrived(x=x, x_scale=batch.x_scale[tokens], ids=ids, weights=weights)
    return Routed(x=x, ids=ids, weights=weights)


def plain(case: Case) -> Case:
    """Return the case of a stage inside, but for its scale format: what its inputs hold is left."""
    return dataclasses.replace(
        case,
        mid_scale=None,
        clamp=None,
        layout=ScaleLayout.ROW,
        hazard=type(case.hazard).NONE,
        arrives=Arrival.PLAIN,
    )


def _copied(inputs: LayerInputs, made: Mapping[str, Tensor | None], copies: int) -> LayerInputs:
    """Return a batch several times over; ``weights`` None in ``made`` leaves its weights out."""
    batch = inputs.batch
    weights = None if "weights" in made else batch.weights
    changed: dict[str, Any] = {
        name: torch.cat([tensor] * copies)
        for name, tensor in vars(batch).items()
        if name != "weights"
    }
    changed["weights"] = None if weights is None else torch.cat([weights] * copies)
    return dataclasses.replace(inputs, batch=dataclasses.replace(batch, **changed))


# --- the stages inside --------------------------------------------------------------------------


def _act_quant(inputs: LayerInputs, got: Outputs) -> QuantInputs | None:
    return QuantInputs(x=inputs.batch.x) if inputs.x_scale is None else None


def _gemm(inputs: LayerInputs, codes: Tensor, scales: Tensor, first: bool) -> GroupedRows:
    experts, batch = inputs.experts, inputs.batch
    w, w_scale = (experts.w13, experts.w13_scale) if first else (experts.w2, experts.w2_scale)
    bias = experts.bias13 if first else experts.bias2
    return GroupedRows(
        a=codes, a_scale=scales.contiguous(), w=w, w_scale=w_scale, ids=batch.ids,
        expert=inputs.expert, weights=batch.weights, first=experts.first, bias=bias,
    )  # fmt: skip


def _fc1(inputs: LayerInputs, got: Outputs) -> GroupedRows | None:
    if inputs.x_scale is not None:
        return _gemm(inputs, inputs.batch.x, inputs.x_scale, True)
    if not {"act_codes", "act_scales"} <= got.keys():
        return None
    return _gemm(inputs, got["act_codes"], got["act_scales"], True)


def _swiglu_quant(inputs: LayerInputs, got: Outputs) -> GateUpRows | None:
    if "fc1" not in got:
        return None
    asked, expert = inputs.asked, inputs.expert
    counts = torch.bincount(expert[expert >= 0], minlength=inputs.experts.count).int()
    return GateUpRows(
        rows=got["fc1"], counts=counts, expert=expert, limit=asked.limit, alpha=asked.alpha,
        beta=asked.beta,
    )  # fmt: skip


def _fc2(inputs: LayerInputs, got: Outputs) -> GroupedRows | None:
    if not {"mid_codes", "mid_scales"} <= got.keys():
        return None
    return _gemm(inputs, got["mid_codes"], got["mid_scales"], False)


def _combine(inputs: LayerInputs, got: Outputs) -> ExpertRows | None:
    if "fc2" not in got:
        return None
    batch, experts, rows = inputs.batch, inputs.experts, got["fc2"]
    return ExpertRows(
        rows=rows.view(*batch.ids.shape, rows.shape[-1]), weights=batch.weights, ids=batch.ids,
        expert_map=None, expert=inputs.expert, first=experts.first, experts=experts.count,
    )  # fmt: skip


_INSIDE = (
    (ACT_QUANT, _act_quant, {"codes": "act_codes", "scales": "act_scales"}),
    (FC1, _fc1, {"rows": "fc1"}),
    (SWIGLU_QUANT, _swiglu_quant, {"codes": "mid_codes", "scales": "mid_scales"}),
    (FC2, _fc2, {"rows": "fc2"}),
    (COMBINE, _combine, {"out": "out"}),
)
"""Stage, its inputs from the layer's and the kernel's tensors, its outputs among the layer's."""

Upstream = Callable[[LayerInputs, Outputs], Any]


def steps_of(case: Case) -> Iterator[tuple[Stage[Any], Case, Upstream, Mapping[str, str]]]:
    """Yield each stage inside, its case, what makes its inputs, and its outputs' names here."""
    for stage, upstream, names in _INSIDE:
        form = case.mid if stage is SWIGLU_QUANT else case.scale
        yield stage, dataclasses.replace(plain(case), scale=form), upstream, names


LAYER = Layer()

__all__ = ["LAYER", "Experts", "Layer", "LayerInputs", "rows_of"]
