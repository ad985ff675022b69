"""The stage ``permute``: quantized rows copied to where their experts read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout
from moe_parity.references.language.case import Case, Values
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Recipe
from moe_parity.references.language.stage import Kind, Output, Outputs, Reads, Subset, filled
from moe_parity.references.stages.align import Align, RoutedRows, routed_rows
from moe_parity.references.stages.hazards import embed, lay, surround
from moe_parity.references.stages.mistakes import placing
from moe_parity.references.stages.mistakes.placing_told import permute_told
from moe_parity.references.stages.quant.stage import code_output, scale_output
from moe_parity.references.stages.routing import pairs_of

NOTHING = Recipe(name="no_rounding", source="a permutation rounds nothing")


class Permute(Align):
    """Copy the row and the scales of each pair that is owned."""

    name = "permute"
    reads: ClassVar[Reads] = {
        **Align.reads, "hazard": None, "layout": None,
        "values": frozenset({Values.NORMAL, Values.AIMED, Values.SCALES}),
    }  # fmt: skip
    geometry = frozenset({"hazard", "layout"})
    sizes = ("m", "e", "k", "h")

    def inputs(self, case: Case, device: str = "cpu") -> RoutedRows:
        """Return quantized rows [m, h] and their routing."""
        made = routed_rows(self.check(case), device)
        codes, scales = embed(made.codes, case.hazard), lay(made.scales, case.layout)
        return surround(dataclasses.replace(made, codes=codes, scales=scales), case.hazard)

    def cost(self, case: Case) -> int:
        """Count pairs."""
        return case.m * case.k

    def outputs(self, case: Case, inputs: RoutedRows) -> Mapping[str, Output]:
        """Return each pair's codes and scales, and how many rows every expert has."""
        pairs, groups = inputs.expert.numel(), inputs.scales.shape[1]
        scales = scale_output(pairs, groups, ScaleFormat.FP32, ScaleLayout.ROW, "pair")
        return {
            "codes": code_output(pairs, inputs.codes.shape[1], case.codes, "pair"),
            "scales": dataclasses.replace(scales, strides=None),
            "counts": Output(
                kind=Kind.INTEGERS, shape=(inputs.experts,), dtype=torch.int32, axes=("expert",),
                noun="counts",
            ),
        }  # fmt: skip

    def reference(self, case: Case, inputs: RoutedRows, recipe: Recipe) -> dict[str, Tensor]:
        """Return the copies, zeros where a pair is not owned."""
        mine = (inputs.expert >= 0)[:, None]
        pairs = torch.arange(inputs.expert.numel(), device=inputs.expert.device)
        token = pairs // inputs.ids.shape[1]
        own = inputs.expert[inputs.expert >= 0]
        return {
            "codes": torch.where(mine, inputs.codes[token], 0),
            "scales": torch.where(mine, inputs.scales[token], 0.0),
            "counts": torch.bincount(own, minlength=inputs.experts).int(),
        }

    def live(self, case: Case, inputs: RoutedRows) -> Mapping[str, Tensor]:
        """Return the owned pairs."""
        return dict.fromkeys(("codes", "scales"), inputs.expert >= 0)

    def mistakes(self, case: Case, inputs: RoutedRows, recipe: Recipe) -> Iterator[Mistake]:
        """Yield those of a permutation."""
        yield from placing.of_permute(
            inputs, lambda given: self.reference(case, given, recipe),
            lambda given, chosen: self.some(case, given, chosen).inputs,
        )  # fmt: skip

    def told(self, case: Case, inputs: RoutedRows, got: Outputs) -> str:
        """Return whose row holds what it should not."""
        return permute_told(inputs, got, self.reference(case, inputs, NOTHING))

    def units(self, inputs: RoutedRows) -> int:
        """Count tokens."""
        return inputs.ids.shape[0]

    def some(self, case: Case, inputs: RoutedRows, chosen: Tensor) -> Subset:
        """Return some tokens."""
        pairs = pairs_of(chosen, inputs.ids.shape[1])
        part = dataclasses.replace(
            inputs, codes=inputs.codes[chosen], scales=lay(inputs.scales[chosen], case.layout),
            ids=inputs.ids[chosen], expert=inputs.expert[pairs],
        )  # fmt: skip
        case = dataclasses.replace(case, m=chosen.numel())
        return Subset(case=case, inputs=part, rows={"codes": pairs, "scales": pairs})

    def spoiled(self, inputs: RoutedRows, chosen: Tensor, value: float) -> RoutedRows:
        """Return rows of which some tokens' scales are one number."""
        return dataclasses.replace(inputs, scales=filled(inputs.scales, chosen, value))


PERMUTE = Permute()
