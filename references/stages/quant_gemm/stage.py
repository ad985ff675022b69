"""The stage ``quant_gemm``: BF16 rows, quantized inside, times a block-FP8 weight.

The linear of a dense layer or of one expert, as one op of a library may have it.  Neither codes nor
scales of the activations are seen: what the quantizer decides shows in the rows alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK, WHOLE_SCALES, ScaleFormat, to_f32
from moe_parity.references.language.case import Case, Values
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Acting, Recipe
from moe_parity.references.language.stage import (
    Kind,
    Output,
    Outputs,
    Reads,
    Stage,
    Subset,
    filled,
)
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.gemm.reference import biased, grouped
from moe_parity.references.stages.gemm.stage import GroupedRows
from moe_parity.references.stages.mistakes.anywhere import contiguous_reading
from moe_parity.references.stages.mistakes.gemm import mistakes as of_gemm
from moe_parity.references.stages.mistakes.geometry import misread
from moe_parity.references.stages.mistakes.groups import Groups
from moe_parity.references.stages.mistakes.quant import mistakes as of_groups
from moe_parity.references.stages.owned import CODES, Own
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import act_quant
from moe_parity.references.stages.quant_gemm.inputs import QuantGemmInputs, made

WITNESSED = Case(m=24, h=512, i=128, values=Values.AIMED, seed=11)
READ = {"x": "rows", "w": "the weights' codes", "w_scale": "the weights' scales"}
"""What the inputs are called."""


class QuantGemm(Stage[QuantGemmInputs]):
    """Quantize rows in groups of 128, and multiply them with one weight: K = ``h``, N = ``i``."""

    name = "quant_gemm"
    reads: ClassVar[Reads] = {
        **dict.fromkeys(("m", "h", "i", "hazard")),
        "scale": WHOLE_SCALES,
        "values": frozenset({Values.NORMAL, Values.WIDE, Values.AIMED, Values.SPECIAL}),
    }
    acting: ClassVar[Acting] = {"act_quant": None, "gemm": None}
    sizes = ("m", "h", "i")
    grouped = ("h",)

    def inputs(self, case: Case, device: str = "cpu") -> QuantGemmInputs:
        """Return rows [m, h] and a weight [i, h] with its scales."""
        return made(self.check(case), device)

    def size_words(self, case: Case) -> str:
        """Return the sizes by the names that a GEMM has for them."""
        return f"m{case.m}-n{case.i}-k{case.h}"

    def given(self, case: Case, tensors: Mapping[str, Tensor]) -> tuple[Case, QuantGemmInputs]:
        """Take ``x`` [M, K], ``w`` [N, K] and ``w_scale`` [ceil(N / 128), K / 128]."""
        own = Own(self.name, tensors)
        x = own.take("x", 2, (torch.bfloat16,))
        w = own.take("w", 2, CODES, (None, x.shape[1]))
        shape = -(-w.shape[0] // BLOCK), -(-w.shape[1] // BLOCK)
        w_scale = own.take("w_scale", 2, (torch.float32,), shape)
        case = dataclasses.replace(case, m=x.shape[0], h=x.shape[1], i=w.shape[0])
        return case, QuantGemmInputs(x=x, w=w, w_scale=w_scale)

    def cost(self, case: Case) -> int:
        """Count the programs of a quantization, and blocks of 16 rows by 64 columns, times K's."""
        blocks = -(-case.h // BLOCK)
        return blocks * (6 * -(-case.m // 32) + -(-case.m // 16) * -(-case.i // 64))

    def witness_cases(self) -> Iterator[Case]:
        """Yield aimed rows in both formats, and a batch past 32 rows."""
        yield WITNESSED
        yield dataclasses.replace(WITNESSED, scale=ScaleFormat.UE8M0)
        yield dataclasses.replace(WITNESSED, m=40, h=256)

    def probes(self) -> Iterator[Case]:
        """Yield enough rows for every mantissa of amax."""
        yield dataclasses.replace(WITNESSED, m=128)
        yield dataclasses.replace(WITNESSED, m=96, h=1024)

    def outputs(self, case: Case, inputs: QuantGemmInputs) -> Mapping[str, Output]:
        """BF16 rows [m, i]."""
        shape = inputs.x.shape[0], inputs.w.shape[0]
        return {
            "rows": Output(
                kind=Kind.VALUES, shape=shape, dtype=torch.bfloat16, axes=("token", "column")
            )
        }

    def reference(self, case: Case, inputs: QuantGemmInputs, recipe: Recipe) -> dict[str, Tensor]:
        """Return the rows."""
        act = act_quant(inputs.x, recipe.of("act_quant", QuantRecipe), scale=case.scale)
        return {"rows": _rows(_dense(inputs, act.codes, act.scales), recipe)}

    def mistakes(self, case: Case, inputs: QuantGemmInputs, recipe: Recipe) -> Iterator[Mistake]:
        """Yield those of a quantizer, carried on through the GEMM, and those of the GEMM."""
        act = recipe.of("act_quant", QuantRecipe)
        rows, columns = inputs.x.shape
        grid = rows, columns // BLOCK

        def onward(codes: Tensor, scales: Tensor) -> Outputs:
            dense = _dense(inputs, codes.view(rows, columns), scales.reshape(grid))
            return {"rows": _rows(dense, recipe)}

        power = case.scale.is_power_of_two
        yield from of_groups(
            Groups(
                values=to_f32(inputs.x).reshape(-1, BLOCK), grid=grid, give=onward, recipe=act,
                power_of_two=power, form=case.codes, shape=(1, BLOCK),
            )
        )  # fmt: skip
        right = act_quant(inputs.x, act, scale=case.scale)
        dense = _dense(inputs, right.codes, right.scales)
        rows_of = partial(_rows, recipe=recipe)
        yield from of_gemm(dense, recipe, None, rows_of, _some, gated=False)
        flat = contiguous_reading(inputs.x)
        if flat is not None:
            yield Mistake(
                name="row_stride", words="rows read with their length as the stride", local=False,
                outputs=lambda: self.reference(
                    case, dataclasses.replace(inputs, x=flat), recipe
                ),
            )  # fmt: skip
        yield from misread(
            inputs, lambda given: self.reference(case, given, recipe), READ, known=("x",)
        )

    def units(self, inputs: QuantGemmInputs) -> int:
        """Count rows."""
        return inputs.x.shape[0]

    def some(self, case: Case, inputs: QuantGemmInputs, chosen: Tensor) -> Subset:
        """Return some rows."""
        part = dataclasses.replace(inputs, x=inputs.x[chosen])
        own = dataclasses.replace(case, m=chosen.numel())
        return Subset(case=own, inputs=part, rows={"rows": chosen})

    def spoiled(self, inputs: QuantGemmInputs, chosen: Tensor, value: float) -> QuantGemmInputs:
        """Return inputs of which some rows hold one number."""
        return dataclasses.replace(inputs, x=filled(inputs.x, chosen, value))

    def errors(
        self, case: Case, inputs: QuantGemmInputs, got: Outputs
    ) -> tuple[float | None, float | None]:
        """Return the L2 distance to the product of rows that are not quantized, in float64."""
        if case.values is not Values.NORMAL or not inputs.x.numel():
            return None, None
        w = case.codes.dequantized(inputs.w, inputs.w_scale, BLOCK, BLOCK)
        exact = inputs.x.double() @ w.t()
        return None, float((got["rows"].double() - exact).norm() / exact.norm())


def _dense(inputs: QuantGemmInputs, codes: Tensor, scales: Tensor) -> GroupedRows:
    """Return quantized rows as those of one expert that every token takes."""
    ids = torch.zeros((codes.shape[0], 1), dtype=torch.int32, device=codes.device)
    return GroupedRows(
        a=codes, a_scale=scales, w=inputs.w[None], w_scale=inputs.w_scale[None], ids=ids,
        expert=ids[:, 0].long(), weights=None,
    )  # fmt: skip


def _some(dense: GroupedRows, chosen: Tensor) -> GroupedRows:
    return dataclasses.replace(
        dense, a=dense.a[chosen], a_scale=dense.a_scale[chosen], ids=dense.ids[chosen],
        expert=dense.expert[chosen],
    )  # fmt: skip


def _rows(dense: GroupedRows, recipe: Recipe) -> Tensor:
    gemm, source = recipe.of("gemm", GemmRecipe), dense.source
    rows = grouped(
        dense.a[source], dense.a_scale[source], dense.w, dense.w_scale, dense.expert, gemm
    )
    return biased(rows, None, dense.expert, gemm, None)


QUANT_GEMM = QuantGemm()
