"""The stages ``swiglu`` and ``swiglu_quant``: the gated activation between the two GEMMs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import BLOCK, ScaleFormat, f32_to_bf16
from moe_parity.references.language.case import Case, Gate, Values
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Acting, Recipe
from moe_parity.references.language.stage import Kind, Output, Reads, Stage, Subset, filled
from moe_parity.references.stages.hazards import embed, surround
from moe_parity.references.stages.mistakes.anywhere import lost, rounded
from moe_parity.references.stages.mistakes.geometry import misread
from moe_parity.references.stages.mistakes.quant import mistakes as of_groups
from moe_parity.references.stages.mistakes.swiglu import wrongs
from moe_parity.references.stages.owned import IDS, Own
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import act_quant
from moe_parity.references.stages.quant.stage import (
    code_output,
    groups_of,
    scale_output,
)
from moe_parity.references.stages.swiglu import aims
from moe_parity.references.stages.swiglu.decisions import (
    ClampRounding,
    ProductRounding,
    SwigluRecipe,
)
from moe_parity.references.stages.swiglu.pools import pool
from moe_parity.references.stages.swiglu.reference import swiglu

WITNESSED = Case(m=128, e=5, i=256, values=Values.AIMED, seed=11)


@dataclass(frozen=True, kw_only=True)
class GateUpRows:
    """Rows of FC1, as the case has them sorted by expert."""

    rows: Tensor
    """bf16 [P, 2 * I], the gate first."""
    counts: Tensor
    """Rows of each expert, int32 [E]."""
    expert: Tensor
    """The local expert of each row, int64 [P]; -1 where nobody owns it."""
    limit: float | None
    alpha: float
    beta: float


def _gate_up(case: Case) -> Tensor:
    if case.values not in (Values.AIMED, Values.SPECIAL):
        return f32_to_bf16(4.0 * random_bits.normal(case.seed, "gate_up", case.m, 2 * case.i))
    made = pool(case)
    groups = -(-case.m * case.i // BLOCK)
    taken = made[torch.arange(groups) % made.shape[0]]
    gate, up = (part.reshape(-1)[: case.m * case.i] for part in taken.chunk(2, dim=1))
    return f32_to_bf16(torch.cat([gate.view(case.m, case.i), up.view(case.m, case.i)], 1))


class Swiglu(Stage[GateUpRows]):
    """SwiGLU alone, where a project quantizes in another kernel."""

    name = "swiglu"
    reads: ClassVar[Reads] = {
        **dict.fromkeys(("m", "e", "i", "clamp", "gate", "hazard", "pool")),
        "values": frozenset({Values.NORMAL, Values.AIMED, Values.SPECIAL}),
    }
    acting: ClassVar[Acting] = {"swiglu": None}
    sizes = ("m", "e", "i")

    def inputs(self, case: Case, device: str = "cpu") -> GateUpRows:
        """Return rows [m, 2 * i] split among the experts, some of which have none."""
        self.check(case)
        counts = torch.zeros(case.e, dtype=torch.int32)
        if case.m:
            most = max(1, case.e - 1)
            owner = random_bits.integers(case.seed, "counts", case.m, 1, below=most)
            counts = torch.bincount(owner.flatten(), minlength=case.e).int()
        expert = torch.arange(case.e).repeat_interleave(counts.long())
        alpha, beta = case.gate.alpha_beta
        made = GateUpRows(
            rows=embed(_gate_up(case).to(device), case.hazard), counts=counts.to(device),
            expert=expert.to(device), limit=case.clamp, alpha=alpha, beta=beta,
        )  # fmt: skip
        return surround(made, case.hazard)

    def given(self, case: Case, tensors: Mapping[str, Tensor]) -> tuple[Case, GateUpRows]:
        """Take ``rows`` [P, 2 * I], and ``expert`` [P] where some rows are nobody's."""
        own = Own(self.name, tensors)
        rows = own.take("rows", 2, (torch.bfloat16,))
        count = rows.shape[0]
        expert = torch.zeros(count, dtype=torch.int64, device=rows.device)
        if "expert" in own:
            expert = own.take("expert", 1, IDS, (count,)).long()
        counts = torch.bincount(expert[expert >= 0], minlength=case.e).int()
        alpha, beta = case.gate.alpha_beta
        case = dataclasses.replace(case, m=count, e=counts.numel(), i=rows.shape[1] // 2)
        return case, GateUpRows(
            rows=rows, counts=counts, expert=expert, limit=case.clamp, alpha=alpha, beta=beta
        )

    def cost(self, case: Case) -> int:
        """Count programs of four rows and a group."""
        return max(case.m // 4, 1) * -(-case.i // BLOCK)

    def witness_cases(self) -> Iterator[Case]:
        """Yield a case without a limit and one with a limit that is no BF16 number."""
        for clamp in (None, aims.ODD_LIMIT):
            yield dataclasses.replace(WITNESSED, clamp=clamp)

    def probes(self) -> Iterator[Case]:
        """Yield the newest pool without a limit, with a beta, with limits, and special values."""
        base = Case(m=512, e=5, i=128, values=Values.AIMED, pool=2)
        yield base
        yield dataclasses.replace(base, m=128, clamp=aims.LOW_LIMIT)
        yield dataclasses.replace(base, m=128, clamp=aims.ODD_LIMIT)
        yield dataclasses.replace(base, m=128, clamp=aims.ODD_LIMIT, values=Values.SPECIAL)
        yield dataclasses.replace(base, m=128, gate=Gate.SWIGLUOAI)

    def outputs(self, case: Case, inputs: GateUpRows) -> Mapping[str, Output]:
        """BF16 rows [P, I]."""
        shape = (inputs.rows.shape[0], inputs.rows.shape[1] // 2)
        return {"rows": Output(kind=Kind.VALUES, shape=shape, dtype=torch.bfloat16)}

    def reference(self, case: Case, inputs: GateUpRows, recipe: Recipe) -> dict[str, Tensor]:
        """Return the rows."""
        return {"rows": f32_to_bf16(activated(inputs, recipe))}

    def live(self, case: Case, inputs: GateUpRows) -> Mapping[str, Tensor]:
        """Return the rows that somebody owns."""
        return dict.fromkeys(self.outputs(case, inputs), inputs.expert >= 0)

    def mistakes(self, case: Case, inputs: GateUpRows, recipe: Recipe) -> Iterator[Mistake]:
        """Yield those of an activation, and rows left out or rounded in another way."""
        part = recipe.of("swiglu", SwigluRecipe)
        for wrong in wrongs(inputs, part):
            yield wrong.mistake(lambda rows: {"rows": f32_to_bf16(rows)})
        plain = dataclasses.replace(part, product_rounding=ProductRounding.NONE)
        # What a limit rounds by itself is no product any more that could be rounded otherwise.
        limited = inputs.limit is not None and part.clamp_rounding is ClampRounding.PRODUCT
        if part.product_rounding is not ProductRounding.TWICE and not limited:
            exact = recipe.with_parts(swiglu=plain)
            yield from rounded(lambda: activated(inputs, exact), lambda rows: {"rows": rows})
        yield from lost(lambda: self.reference(case, inputs, recipe))
        yield from self._misread(case, inputs, recipe)

    def _misread(self, case: Case, inputs: GateUpRows, recipe: Recipe) -> Iterator[Mistake]:
        def give(given: GateUpRows) -> dict[str, Tensor]:
            return self.reference(case, given, recipe)

        def some(given: GateUpRows, chosen: Tensor) -> GateUpRows:
            made: GateUpRows = self.some(case, given, chosen).inputs
            return made

        yield from misread(inputs, give, {"rows": "rows"}, known=("rows",), some=some)

    def units(self, inputs: GateUpRows) -> int:
        """Count rows."""
        return inputs.rows.shape[0]

    def some(self, case: Case, inputs: GateUpRows, chosen: Tensor) -> Subset:
        """Return some rows, sorted by expert, as they have to be."""
        chosen = chosen[torch.argsort(inputs.expert[chosen], stable=True)]
        expert = inputs.expert[chosen]
        counts = torch.bincount(expert[expert >= 0], minlength=inputs.counts.numel()).int()
        part = dataclasses.replace(inputs, rows=inputs.rows[chosen], expert=expert, counts=counts)
        rows = dict.fromkeys(self.outputs(case, inputs), chosen)
        return Subset(case=dataclasses.replace(case, m=chosen.numel()), inputs=part, rows=rows)

    def spoiled(self, inputs: GateUpRows, chosen: Tensor, value: float) -> GateUpRows:
        """Return the rows of FC1 with some of one number."""
        return dataclasses.replace(inputs, rows=filled(inputs.rows, chosen, value))

    def sealed(self, inputs: GateUpRows) -> list[Tensor]:
        """Return the rows and how the experts share them."""
        return [inputs.rows, inputs.counts]


class SwigluQuant(Swiglu):
    """SwiGLU with the quantization of its result."""

    name = "swiglu_quant"
    reads: ClassVar[Reads] = {**Swiglu.reads, **dict.fromkeys(("scale", "layout", "group"))}
    acting: ClassVar[Acting] = {"swiglu_quant": None, "swiglu": None}
    grouped = ("i",)
    in_two = True

    def witness_cases(self) -> Iterator[Case]:
        """Yield every format, with and without a limit."""
        for scale in ScaleFormat:
            for case in super().witness_cases():
                yield dataclasses.replace(case, scale=scale)

    def handed_on(self, case: Case, inputs: GateUpRows, recipe: Recipe) -> Tensor:
        """Return the products that are quantized."""
        return activated(inputs, recipe)

    def outputs(self, case: Case, inputs: GateUpRows) -> Mapping[str, Output]:
        """Codes [P, I] and scales [P, I / group]."""
        rows, width = inputs.rows.shape[0], inputs.rows.shape[1] // 2
        scales = scale_output(rows, width // case.group, case.scale, case.layout)
        return {"codes": code_output(rows, width, case.codes), "scales": scales}

    def reference(self, case: Case, inputs: GateUpRows, recipe: Recipe) -> dict[str, Tensor]:
        """Return codes and scales."""
        return self.finished(case, self.handed_on(case, inputs, recipe), recipe)

    def finished(self, case: Case, handed: Tensor, recipe: Recipe) -> dict[str, Tensor]:
        """Return the codes and scales of products."""
        part = recipe.of(self.name, QuantRecipe)
        out = act_quant(handed, part, group=case.group, scale=case.scale, form=case.codes)
        return {"codes": out.codes, "scales": case.scale.seen(out.scales)}

    def mistakes(self, case: Case, inputs: GateUpRows, recipe: Recipe) -> Iterator[Mistake]:
        """Yield those of an activation, quantized, and those of the quantizer behind it."""
        part = recipe.of(self.name, QuantRecipe)

        def quantized(y: Tensor) -> dict[str, Tensor]:
            return self.finished(case, y, recipe)

        for wrong in wrongs(inputs, recipe.of("swiglu", SwigluRecipe)):
            yield wrong.mistake(quantized)
        groups = groups_of(case, activated(inputs, recipe), part)
        yield from of_groups(groups)
        yield from self._misread(case, inputs, recipe)
        unlimited = dataclasses.replace(inputs, limit=None)
        acting = recipe.of("swiglu", SwigluRecipe)
        exact = dataclasses.replace(acting, product_rounding=ProductRounding.NONE)
        others = (
            ("limit", activated(unlimited, recipe), inputs.limit is not None),
            ("rounding to BF16", activated(inputs, recipe.with_parts(swiglu=exact)),
             acting.product_rounding is not ProductRounding.NONE),
        )  # fmt: skip
        for step, values, has in others:
            if has:
                amax = groups_of(case, values, part).amax()
                yield Mistake(
                    name="amax_too_early", words=f"the maximum taken before the {step}",
                    outputs=partial(groups.by, amax),
                )  # fmt: skip


def activated(inputs: GateUpRows, recipe: Recipe) -> Tensor:
    """Return fp32 [P, I] before a quantization."""
    part = recipe.of("swiglu", SwigluRecipe)
    return swiglu(inputs.rows, part, limit=inputs.limit, alpha=inputs.alpha, beta=inputs.beta)


SWIGLU = Swiglu()
SWIGLU_QUANT = SwigluQuant()
