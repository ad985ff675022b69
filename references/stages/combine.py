"""The stage ``combine``: the top-k sum, its decisions, its bits, its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import (
    bits_of,
    f32_to_bf16,
    f32_to_f16,
    from_bits,
    round_bf16,
    to_f32,
)
from moe_parity.references.arithmetic.rounding import add_rn, fma_rn, mul_rn
from moe_parity.references.language.case import Case, InputDtype, Values
from moe_parity.references.language.decision import Decision, Option, decided
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Acting, Part, Recipe
from moe_parity.references.language.stage import Kind, Output, Reads, Stage, Subset, filled
from moe_parity.references.stages.hazards import embed, surround
from moe_parity.references.stages.mistakes.combine import Sum, mistakes
from moe_parity.references.stages.owned import IDS, Own, experts_of
from moe_parity.references.stages.routing import draw_ids, expert_map, local_expert


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


@dataclass(frozen=True, kw_only=True)
class CombineInputs:
    """A token's expert rows before their rounding to BF16, fp32 [M, k, H], and weights [M, k]."""

    rows: Tensor
    weights: Tensor


def cancelling_rows(seed: int) -> CombineInputs:
    """Pairs of rows that cancel, far apart in k, beside small terms; full fp32 mantissas."""
    tokens, k, columns = 64, 8, 256
    rows = random_bits.normal(seed, "rows", tokens * k, columns).view(tokens, k, columns)
    # The unit in the last place of the large terms is that of the result's BF16.
    rows[:, 0] = round_bf16(rows[:, 0] * 2.0**16)
    rows[:, k - 1] = -rows[:, 0]
    weights = 0.5 + 0.5 * random_bits.uniform(seed, "weights", tokens, k)
    weights[:, k - 1] = from_bits(bits_of(weights[:, 0].contiguous()) + 1)
    return CombineInputs(rows=rows, weights=weights)


WEIGHTS_AT = Decision(
    name="combine.weights_at",
    question="Where does a routing weight meet an expert's output?",
    options=WeightsAt,
    aim=cancelling_rows,
)
SUM_ORDER = Decision(
    name="combine.order",
    question="In which order are a token's rows added?",
    options=SumOrder,
    aim=cancelling_rows,
)
SUM_STEP = Decision(
    name="combine.step",
    question="Is a weighted row added by an FMA?",
    options=SumStep,
    aim=cancelling_rows,
    asked=lambda case, inputs: inputs.weights is not None,
)


@dataclass(frozen=True, kw_only=True)
class CombineRecipe(Part):
    """How the top-k sum rounds."""

    weights_at: WeightsAt = decided(WEIGHTS_AT, WeightsAt.TOPK_SUM)
    order: SumOrder = decided(SUM_ORDER, SumOrder.ASCENDING)
    step: SumStep = decided(SUM_STEP, SumStep.FMA)


# --- the bits -----------------------------------------------------------------------------------


def combine(
    rows: Tensor,
    weights: Tensor | None,
    owned: Tensor,
    recipe: CombineRecipe,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return [M, H] in ``dtype`` from BF16 expert rows [M, k, H].

    ``weights`` fp32 [M, k], None for ones; ``owned`` bool [M, k]: only those rows are looked at.
    Rows whose weight was applied in FC2's epilogue come with it (``WeightsAt.EPILOGUE``).
    """
    tokens, k, columns = rows.shape
    total = torch.zeros((tokens, columns), dtype=torch.float32, device=rows.device)
    steps = range(k) if recipe.order is SumOrder.ASCENDING else reversed(range(k))
    for slot in steps:
        row = to_f32(rows[:, slot])
        if weights is None or recipe.weights_at is WeightsAt.EPILOGUE:
            added = add_rn(total, row)
        elif recipe.step is SumStep.FMA:
            added = fma_rn(weights[:, slot, None].expand_as(row), row, total)
        else:
            added = add_rn(total, mul_rn(weights[:, slot, None], row))
        total = torch.where(owned[:, slot, None], added, total)
    return cast_output(total, dtype)


def in_epilogue(weights: Tensor | None, recipe: CombineRecipe) -> Tensor | None:
    """Return the weights [P] of [M, k] that FC2's epilogue applies, None where it applies none."""
    if weights is None or recipe.weights_at is WeightsAt.TOPK_SUM:
        return None
    return weights.flatten()


def cast_output(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to the output type, bf16, fp16 or fp32."""
    if dtype is torch.bfloat16:
        return f32_to_bf16(total)
    return f32_to_f16(total) if dtype is torch.float16 else total


def sum_of(rows: Tensor, weights: Tensor, recipe: CombineRecipe) -> Tensor:
    """Combine fp32 rows [M, k, H] that were not yet rounded: the two stages of a weight's place."""
    if recipe.weights_at is WeightsAt.EPILOGUE:
        rows = mul_rn(rows, weights[:, :, None])
    owned = torch.ones(weights.shape, dtype=torch.bool, device=rows.device)
    return combine(f32_to_bf16(round_bf16(rows)), weights, owned, recipe)


# --- the stage ----------------------------------------------------------------------------------

DTYPES = {
    InputDtype.BF16: torch.bfloat16, InputDtype.FP16: torch.float16, InputDtype.FP32: torch.float32,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """The rows of every token's experts."""

    rows: Tensor
    """bf16 [M, k, H]; rows that are not owned hold NaN."""
    weights: Tensor | None
    """fp32 [M, k], None for ones."""
    ids: Tensor
    """Global expert ids int32 [M, k]."""
    expert_map: Tensor | None
    """int32 [E]: the local expert of a global one, or -1; None where the rank owns all."""
    expert: Tensor
    """The local expert of each pair, int64 [P]; -1 where the rank does not own it."""
    first: int = 0
    """The global id of expert 0."""
    experts: int = 1
    """Local experts."""


class Combine(Stage[ExpertRows]):
    """Sum a token's rows, each times its routing weight."""

    name = "combine"
    reads: ClassVar[Reads] = {
        **dict.fromkeys(("m", "e", "k", "h", "dtype", "ep_rank", "ep_size", "routing", "hazard")),
        "values": frozenset({Values.NORMAL, Values.AIMED}),
    }
    acting: ClassVar[Acting] = {"combine": frozenset({"combine.order", "combine.step"})}
    elsewhere = frozenset({"combine.weights_at"})
    sizes = ("m", "e", "k", "h")

    def inputs(self, case: Case, device: str = "cpu") -> ExpertRows:
        """Return rows [m, k, h]: aimed ones cancel far apart in k; foreign ones hold NaN."""
        self.check(case)
        rows = random_bits.normal(case.seed, "rows", case.m * case.k, case.h, device=device)
        rows = rows.view(case.m, case.k, case.h)
        weights = random_bits.uniform(case.seed, "weights", case.m, case.k, device=device)
        weights = 0.5 + 0.5 * weights
        if case.values is Values.AIMED and case.k > 2:
            rows[:, 0] *= 2.0**16
            rows[:, -1] = -rows[:, 0]
            weights[:, -1] = from_bits(bits_of(weights[:, 0].contiguous()) + 1)
        ids = draw_ids(case, device)
        expert = local_expert(ids, case.first_expert, case.local_experts)
        made = f32_to_bf16(rows)
        made[(expert < 0).view(case.m, case.k)] = float("nan")
        given = ExpertRows(
            rows=embed(made, case.hazard), weights=weights, ids=ids,
            expert_map=expert_map(case, device), expert=expert, first=case.first_expert,
            experts=case.local_experts,
        )  # fmt: skip
        return surround(given, case.hazard)

    def given(self, case: Case, tensors: Mapping[str, Tensor]) -> tuple[Case, ExpertRows]:
        """Take ``rows`` [M, k, H]; ``weights`` [M, k] and ``ids`` [M, k] if any."""
        own = Own(self.name, tensors)
        rows = own.take("rows", 3, (torch.bfloat16,))
        pairs = tuple(rows.shape[:2])
        ids = torch.zeros(pairs, dtype=torch.int32, device=rows.device)
        if "ids" in own:
            ids = own.take("ids", 2, IDS, pairs).int()
        weights = own.take("weights", 2, (torch.float32,), pairs) if "weights" in own else None
        e = experts_of(case, ids)
        case = dataclasses.replace(case, m=pairs[0], k=pairs[1], e=e, h=rows.shape[2])
        return case, ExpertRows(
            rows=rows, weights=weights, ids=ids, expert_map=expert_map(case, str(rows.device)),
            expert=local_expert(ids, case.first_expert, case.local_experts),
            first=case.first_expert, experts=case.local_experts,
        )  # fmt: skip

    def cost(self, case: Case) -> int:
        """Count pairs."""
        return case.m * case.k

    def witness_cases(self) -> Iterator[Case]:
        """Yield eight rows a token that cancel."""
        yield Case(m=24, e=8, k=8, h=256, values=Values.AIMED, seed=11)

    def outputs(self, case: Case, inputs: ExpertRows) -> Mapping[str, Output]:
        """Return one row a token, in the case's dtype."""
        tokens, _, columns = inputs.rows.shape
        kind, axes = Kind.VALUES, ("token", "column")
        dtype = DTYPES[case.dtype]
        return {"out": Output(kind=kind, shape=(tokens, columns), dtype=dtype, axes=axes)}

    def reference(self, case: Case, inputs: ExpertRows, recipe: Recipe) -> dict[str, Tensor]:
        """Return the sums."""
        part = recipe.of("combine", CombineRecipe)
        owned = (inputs.expert >= 0).view(inputs.ids.shape)
        return {"out": combine(inputs.rows, inputs.weights, owned, part, DTYPES[case.dtype])}

    def mistakes(self, case: Case, inputs: ExpertRows, recipe: Recipe) -> Iterator[Mistake]:
        """Yield those of a top-k sum."""
        part = recipe.of("combine", CombineRecipe)
        yield from mistakes(
            Sum(
                inputs=inputs, weighted=part.weights_at is WeightsAt.TOPK_SUM,
                ascending=part.order is SumOrder.ASCENDING, fused=part.step is SumStep.FMA,
                reference=lambda given: self.reference(case, given, recipe)["out"],
                cast=lambda total: cast_output(total, DTYPES[case.dtype]),
                some=lambda given, chosen: self.some(case, given, chosen).inputs,
            )
        )  # fmt: skip

    def units(self, inputs: ExpertRows) -> int:
        """Count tokens."""
        return inputs.ids.shape[0]

    def some(self, case: Case, inputs: ExpertRows, chosen: Tensor) -> Subset:
        """Return some tokens."""
        part = dataclasses.replace(
            inputs, rows=inputs.rows[chosen], ids=inputs.ids[chosen],
            weights=None if inputs.weights is None else inputs.weights[chosen],
            expert=inputs.expert.view(inputs.ids.shape)[chosen].flatten(),
        )  # fmt: skip
        case = dataclasses.replace(case, m=chosen.numel())
        return Subset(case=case, inputs=part, rows={"out": chosen})

    def spoiled(self, inputs: ExpertRows, chosen: Tensor, value: float) -> ExpertRows:
        """Return rows of which those of some tokens are one number."""
        return dataclasses.replace(inputs, rows=filled(inputs.rows, chosen, value))

    def sealed(self, inputs: ExpertRows) -> list[Tensor]:
        """Return rows, weights and routing."""
        found = (inputs.rows, inputs.weights, inputs.ids, inputs.expert_map)
        return [tensor for tensor in found if tensor is not None]


COMBINE = Combine()
