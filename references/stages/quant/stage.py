"""The stages ``act_quant`` and ``weight_quant``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import (
    BLOCK,
    WHOLE_SCALES,
    CodeFormat,
    ScaleFormat,
    ScaleLayout,
    to_f32,
)
from moe_parity.references.language.case import Case, InputDtype, Values
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
from moe_parity.references.stages.hazards import surround
from moe_parity.references.stages.mistakes.anywhere import contiguous_reading
from moe_parity.references.stages.mistakes.geometry import misread
from moe_parity.references.stages.mistakes.groups import Groups
from moe_parity.references.stages.mistakes.quant import mistakes as of_groups
from moe_parity.references.stages.owned import FLOATS, Own
from moe_parity.references.stages.quant import inputs as making
from moe_parity.references.stages.quant import reference
from moe_parity.references.stages.quant.decisions import QuantRecipe

WITNESS_SEED = 11
WORDS = {
    InputDtype.BF16: torch.bfloat16, InputDtype.FP16: torch.float16, InputDtype.FP32: torch.float32,
}  # fmt: skip
PATTERNS = frozenset(Values) - {Values.SCALES}
SPREAD = (Values.NORMAL, Values.WIDE)
"""Values of which a relative error means something."""


@dataclass(frozen=True, kw_only=True)
class QuantInputs:
    """What is quantized."""

    x: Tensor
    """bf16, fp16 or fp32 [M, H]; for ``weight_quant`` one expert's weight [N, K]."""


def scale_output(
    rows: int, groups: int, scale: ScaleFormat, layout: ScaleLayout, row: str = "row"
) -> Output:
    """Return scales [rows, groups] as a case asks for them."""
    shape, strides, dtype = scale.stored(rows, groups, layout)
    return Output(
        kind=Kind.SCALES, shape=shape, strides=strides, dtype=dtype, canonical=(rows, groups),
        axes=(row, "scale"), noun="scales",
    )  # fmt: skip


def code_output(rows: int, columns: int, form: CodeFormat, row: str = "row") -> Output:
    """Return codes [rows, columns]."""
    return Output(
        kind=Kind.CODES, shape=(rows, columns), dtype=torch.uint8, axes=(row, "column"),
        noun="codes", codes=form,
    )  # fmt: skip


def groups_of(case: Case, x: Tensor, recipe: QuantRecipe) -> Groups:
    """Return fp32 rows [M, K] as the groups that mistakes are made of."""
    rows, columns = x.shape
    grid = rows, columns // case.group

    def give(codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
        seen = case.scale.seen(scales.reshape(grid))
        return {"codes": codes.view(rows, columns), "scales": seen}

    return Groups(
        values=x.reshape(-1, case.group), grid=grid, give=give, recipe=recipe,
        power_of_two=case.scale.is_power_of_two, form=case.codes, shape=(1, case.group),
        packed=case.scale.is_packed,
    )  # fmt: skip


def _own(stage: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, InputDtype]:
    """Return what is quantized of somebody's own tensors, and its type in the words of a case."""
    x = Own(stage, tensors).take("x", 2, FLOATS)
    return x, next(word for word in InputDtype if WORDS[word] is x.dtype)


def _misread(stage: Stage[QuantInputs], case: Case, x: Tensor, recipe: Recipe) -> Iterator[Mistake]:
    """Yield rows read with their length as the stride, or from another start than theirs."""
    flat = contiguous_reading(x)
    if flat is not None:
        yield Mistake(
            name="row_stride", words="rows read with their length as the stride", local=False,
            outputs=lambda: stage.reference(case, QuantInputs(x=flat), recipe),
        )  # fmt: skip
    yield from misread(
        QuantInputs(x=x), lambda given: stage.reference(case, given, recipe), {"x": "rows"},
        known=("x",), some=lambda given, chosen: stage.some(case, given, chosen).inputs,
    )  # fmt: skip


class ActQuant(Stage[QuantInputs]):
    """Quantize activations in groups along a row."""

    name = "act_quant"
    reads: ClassVar[Reads] = {
        **dict.fromkeys(("m", "h", "group", "scale", "layout", "dtype", "hazard", "pool")),
        "values": PATTERNS,
    }
    acting: ClassVar[Acting] = {"act_quant": None}
    sizes = ("m", "h")
    grouped = ("h",)

    def inputs(self, case: Case, device: str = "cpu") -> QuantInputs:
        """Return activations [m, h]."""
        x = making.activations(self.check(case), device)
        return surround(QuantInputs(x=x), case.hazard)

    def given(self, case: Case, tensors: Mapping[str, Tensor]) -> tuple[Case, QuantInputs]:
        """Take ``x`` [M, H]."""
        x, word = _own(self.name, tensors)
        return dataclasses.replace(case, m=x.shape[0], h=x.shape[1], dtype=word), QuantInputs(x=x)

    def cost(self, case: Case) -> int:
        """Count programs of 32 rows and a group; each costs as much as six blocks of K."""
        return 6 * -(-case.m // 32) * -(-case.h // case.group)

    def witness_cases(self) -> Iterator[Case]:
        """Yield every format, from BF16 and from fp32."""
        base = Case(m=24, h=512, values=Values.AIMED, seed=WITNESS_SEED)
        for scale in ScaleFormat:
            for dtype in (InputDtype.BF16, InputDtype.FP32):
                yield dataclasses.replace(base, scale=scale, dtype=dtype)

    def probes(self) -> Iterator[Case]:
        """Yield the newest pool from fp32 and BF16."""
        base = Case(m=472, h=512, values=Values.AIMED, pool=2)
        for dtype in (InputDtype.FP32, InputDtype.BF16):
            yield dataclasses.replace(base, dtype=dtype)

    def outputs(self, case: Case, inputs: QuantInputs) -> Mapping[str, Output]:
        """Codes [m, h] and scales [m, h / group]."""
        rows, columns = inputs.x.shape
        scales = scale_output(rows, columns // case.group, case.scale, case.layout, "token")
        return {"codes": code_output(rows, columns, case.codes, "token"), "scales": scales}

    def reference(self, case: Case, inputs: QuantInputs, recipe: Recipe) -> dict[str, Tensor]:
        """Return codes and scales."""
        part = recipe.of(self.name, QuantRecipe)
        out = reference.act_quant(
            inputs.x, part, group=case.group, scale=case.scale, form=case.codes
        )
        return {"codes": out.codes, "scales": case.scale.seen(out.scales)}

    def mistakes(self, case: Case, inputs: QuantInputs, recipe: Recipe) -> Iterator[Mistake]:
        """Yield those of a quantizer, and rows read with their length as the stride."""
        part = recipe.of(self.name, QuantRecipe)
        yield from of_groups(groups_of(case, to_f32(inputs.x), part))
        yield from _misread(self, case, inputs.x, recipe)

    def units(self, inputs: QuantInputs) -> int:
        """Count rows."""
        return inputs.x.shape[0]

    def some(self, case: Case, inputs: QuantInputs, chosen: Tensor) -> Subset:
        """Return some rows."""
        part, rows = QuantInputs(x=inputs.x[chosen]), {"codes": chosen, "scales": chosen}
        return Subset(case=dataclasses.replace(case, m=chosen.numel()), inputs=part, rows=rows)

    def spoiled(self, inputs: QuantInputs, chosen: Tensor, value: float) -> QuantInputs:
        """Return the activations with some rows of one number."""
        return QuantInputs(x=filled(inputs.x, chosen, value))

    def errors(
        self, case: Case, inputs: QuantInputs, got: Outputs
    ) -> tuple[float | None, float | None]:
        """Return the L2 error of decode(q) * s against x, in float64."""
        return None, _error(case, inputs.x, got, 1, case.group)


class WeightQuant(Stage[QuantInputs]):
    """Quantize a weight in tiles, edges ragged."""

    name = "weight_quant"
    reads: ClassVar[Reads] = {
        **dict.fromkeys(("i", "h", "dtype", "hazard", "pool")),
        "values": PATTERNS,
        "scale": WHOLE_SCALES,
    }
    acting: ClassVar[Acting] = {"weight_quant": None}
    sizes = ("i", "h")

    def inputs(self, case: Case, device: str = "cpu") -> QuantInputs:
        """Return one expert's weight [i, h]."""
        return surround(QuantInputs(x=making.weight(self.check(case), device)), case.hazard)

    def size_words(self, case: Case) -> str:
        """Return the weight's own names of its sizes."""
        return f"n{case.i}-k{case.h}"

    def given(self, case: Case, tensors: Mapping[str, Tensor]) -> tuple[Case, QuantInputs]:
        """Take ``x`` [N, K]."""
        x, word = _own(self.name, tensors)
        return dataclasses.replace(case, i=x.shape[0], h=x.shape[1], dtype=word), QuantInputs(x=x)

    def cost(self, case: Case) -> int:
        """Count tiles."""
        return 6 * -(-case.i // BLOCK) * -(-case.h // BLOCK)

    def witness_cases(self) -> Iterator[Case]:
        """Yield a weight with ragged edges in every format."""
        base = Case(i=200, h=300, values=Values.AIMED, seed=WITNESS_SEED)
        for scale in (ScaleFormat.FP32, ScaleFormat.UE8M0):
            yield dataclasses.replace(base, scale=scale)

    def probes(self) -> Iterator[Case]:
        """Yield weights of tiles with one row, which holds an aimed group, from fp32 and BF16."""
        base = Case(i=1, h=BLOCK * 192, values=Values.AIMED, pool=2)
        for dtype in (InputDtype.FP32, InputDtype.BF16):
            yield dataclasses.replace(base, dtype=dtype)

    def outputs(self, case: Case, inputs: QuantInputs) -> Mapping[str, Output]:
        """Codes [i, h] and one scale for each tile."""
        rows, columns = inputs.x.shape
        tiles = -(-rows // BLOCK), -(-columns // BLOCK)
        scales = scale_output(*tiles, case.scale, ScaleLayout.ROW)
        return {"codes": code_output(rows, columns, case.codes), "scales": scales}

    def reference(self, case: Case, inputs: QuantInputs, recipe: Recipe) -> dict[str, Tensor]:
        """Return codes and scales."""
        part = recipe.of(self.name, QuantRecipe)
        out = reference.weight_quant(inputs.x, part, scale=case.scale, form=case.codes)
        return {"codes": out.codes, "scales": out.scales}

    def mistakes(self, case: Case, inputs: QuantInputs, recipe: Recipe) -> Iterator[Mistake]:
        """Yield those of a quantizer of tiles, and rows read with their length as the stride."""
        rows, columns = inputs.x.shape
        grid = -(-rows // BLOCK), -(-columns // BLOCK)

        def give(codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
            return {"codes": reference.untiled(codes, rows, columns), "scales": scales.view(grid)}

        yield from of_groups(
            Groups(
                values=reference.tiles_of(to_f32(inputs.x)), grid=grid, give=give,
                recipe=recipe.of(self.name, QuantRecipe), power_of_two=case.scale.is_power_of_two,
                form=case.codes, shape=(min(max(rows, 1), BLOCK), BLOCK),
            )
        )  # fmt: skip
        yield from _misread(self, case, inputs.x, recipe)

    def units(self, inputs: QuantInputs) -> int:
        """Count rows of tiles."""
        return -(-inputs.x.shape[0] // BLOCK)

    def some(self, case: Case, inputs: QuantInputs, chosen: Tensor) -> Subset:
        """Return some rows of tiles; one that is not whole comes once, and last."""
        count = inputs.x.shape[0]
        if count % BLOCK:
            last = chosen == count // BLOCK
            chosen = torch.cat([chosen[~last], chosen[last][:1]])
        row = torch.arange(BLOCK, device=inputs.x.device)
        rows = (chosen[:, None] * BLOCK + row).flatten()
        rows = rows[rows < count]
        part = QuantInputs(x=inputs.x[rows])
        case = dataclasses.replace(case, i=max(rows.numel(), 1))
        return Subset(case=case, inputs=part, rows={"codes": rows, "scales": chosen})

    def spoiled(self, inputs: QuantInputs, chosen: Tensor, value: float) -> QuantInputs:
        """Return the weight with some rows of tiles of one number."""
        rows = torch.arange(inputs.x.shape[0], device=inputs.x.device)
        return QuantInputs(x=filled(inputs.x, rows[torch.isin(rows // BLOCK, chosen)], value))

    def errors(
        self, case: Case, inputs: QuantInputs, got: Outputs
    ) -> tuple[float | None, float | None]:
        """Return the L2 error of decode(q) * s against the weight, in float64."""
        return None, _error(case, inputs.x, got, BLOCK, BLOCK)


def _error(case: Case, x: Tensor, got: Outputs, down: int, across: int) -> float | None:
    if case.values not in SPREAD or not x.numel():
        return None
    exact = x.double()
    found = case.codes.dequantized(got["codes"], got["scales"], down, across)
    return float((found - exact).norm() / exact.norm())


ACT_QUANT = ActQuant()
WEIGHT_QUANT = WeightQuant()
