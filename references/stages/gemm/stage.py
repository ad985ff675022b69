"""The stages ``fc1`` and ``fc2``: grouped GEMMs, each pair with its own expert's weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import (
    BLOCK,
    E4M3,
    WHOLE_SCALES,
    ScaleFormat,
    ScaleLayout,
)
from moe_parity.references.language.case import Case, Hazard, Values
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Acting, Recipe
from moe_parity.references.language.stage import Kind, Output, Reads, Stage, Subset, filled
from moe_parity.references.stages.combine import CombineRecipe, in_epilogue
from moe_parity.references.stages.gemm.aims import codes, every_code, nudged
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.gemm.reference import biased, grouped, hit
from moe_parity.references.stages.gemm.scales import coded, silenced
from moe_parity.references.stages.hazards import embed, lay, surround
from moe_parity.references.stages.mistakes.gemm import mistakes
from moe_parity.references.stages.mistakes.gemm_offsets import small, wrapped
from moe_parity.references.stages.owned import CODES as CODES_OF
from moe_parity.references.stages.owned import IDS, Own
from moe_parity.references.stages.routing import draw_ids, local_expert, pairs_of
from moe_parity.references.stages.sparse import LARGE, room

WITNESSED = Case(m=24, e=4, k=2, h=512, i=256, values=Values.AIMED, seed=11)


CODES = {1: codes, 2: every_code}
"""Version of the pool -> what draws the operands."""


@dataclass(frozen=True, kw_only=True)
class GroupedRows:
    """The operands of a grouped GEMM."""

    a: Tensor
    """E4M3 codes [T, K], uint8; a row serves ``top_k`` pairs in ``fc1``, one in ``fc2``."""
    a_scale: Tensor
    """fp32 [T, ceil(K / 128)], with the strides of the case's layout."""
    w: Tensor
    """E4M3 codes [E, N, K], uint8."""
    w_scale: Tensor
    """fp32 [E, ceil(N / 128), ceil(K / 128)]; the last two transposed unless the layout is row."""
    ids: Tensor
    """Global expert ids int32 [M, k]."""
    expert: Tensor
    """The local expert of each pair, int64 [P]; -1 where the rank does not own it."""
    weights: Tensor | None
    """Routing weights fp32 [M, k], None for ones; an ``fc2`` kernel may apply them itself."""
    first: int = 0
    """The global id of expert 0."""
    bias: Tensor | None = None
    """fp32 [E, N]."""

    @property
    def top_k(self) -> int:
        """How many pairs a row of ``a`` serves."""
        return self.expert.numel() // max(self.a.shape[0], 1)

    @property
    def source(self) -> Tensor:
        """The row of ``a`` that each pair reads, int64 [P]."""
        pairs = torch.arange(self.expert.numel(), device=self.expert.device)
        return pairs // max(self.top_k, 1)


def operand(
    case: Case, name: str, rows: int, k: int, tall: int, device: str, number: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes [rows, k] and scales [ceil(rows / tall), ceil(k / 128)].

    ``number`` is the global one of an expert whose weights they are.  ``scales``: see ``scales``.
    Aimed: the second half of K is the first one, a weight's negated, and its scales are moved by a
    few 2^-20, so that a sum over K ends in a small difference.  Codes span six binades, in pool 2
    all that there are, which only so tell a unit of 25 bits from the exact sum.
    """
    aimed = case.values is Values.AIMED and k % (2 * BLOCK) == 0
    half = k // 2 if aimed else k
    down, across = -(-rows // tall), -(-half // BLOCK)
    made = CODES[case.pool](case.seed, name, rows, half, device=device)
    if case.values is Values.SCALES:
        scale = coded(
            case.seed, name, (number or 0) * down, down, across, device=device,
            power_of_two=case.scale.is_power_of_two, nan=number is None,
        )  # fmt: skip
        return made if number is not None else silenced(made, BLOCK), scale
    scale = 1.0 + random_bits.uniform(case.seed, f"{name}/scale", down, across, device=device)
    if case.scale.is_power_of_two:
        scale = torch.exp2((4.0 * (scale - 1.0)).floor())
    if not aimed:
        return made, scale
    moved = scale
    if not case.scale.is_power_of_two:
        moved = scale * nudged(case.seed, f"{name}/move", down, across, device=device)
    mirrored = made if number is None else made ^ 0x80
    return torch.cat([made, mirrored], 1), torch.cat([scale, moved], 1)


def _of_weights(layout: ScaleLayout) -> ScaleLayout:
    """Return the layout of the weights' scales: nobody pads them."""
    return ScaleLayout.ROW if layout is ScaleLayout.ROW else ScaleLayout.COLUMN


class _Grouped(Stage[GroupedRows]):
    """What the two GEMMs share."""

    reads: ClassVar[Reads] = {
        **dict.fromkeys(("m", "e", "k", "h", "i", "ep_rank", "ep_size", "routing")),
        "hazard": None,
        "layout": None,
        "scale": WHOLE_SCALES,
        "values": frozenset({Values.NORMAL, Values.AIMED, Values.SCALES}),
        "pool": frozenset(CODES),
    }
    sizes = ("m", "e", "k", "h", "i")
    geometry = frozenset({"hazard", "layout"})
    shared: ClassVar[bool]
    """Whether a row of the input serves all of its token's pairs."""

    def extent(self, case: Case) -> tuple[int, int]:
        """Return N and K."""
        raise NotImplementedError

    def inputs(self, case: Case, device: str = "cpu") -> GroupedRows:
        """Return the operands; experts without a row hold NaN codes and scales.

        The codes are zeros in weights of ``sparse.LARGE`` elements and more, which cost only what
        is hit.
        """
        self.check(case)
        n, k = self.extent(case)
        count, tokens = case.local_experts, case.m if self.shared else case.m * case.k
        ids = draw_ids(case, device)
        expert = local_expert(ids, case.first_expert, count)
        a, a_scale = operand(case, f"{self.name}/a", tokens, k, 1, device)
        w = room(
            (count, n, k), case.codes.nan, device, dtype=torch.uint8,
            far=case.hazard is Hazard.FAR,
        )  # fmt: skip
        shape = (count, -(-n // BLOCK), -(-k // BLOCK))
        w_scale = torch.full(shape, float("nan"), device=device)
        for index in hit(expert):
            number = case.first_expert + index
            name = f"{self.name}/w/{number}"
            w[index], w_scale[index] = operand(case, name, n, k, BLOCK, device, number)
        if case.values is Values.SCALES:
            owned = (expert >= 0).view(tokens, -1) if tokens else (expert >= 0)[:, None]
            a_scale[~owned.any(1)] = float("nan")
        weights = random_bits.uniform(case.seed, "weights", case.m, case.k, device=device)
        made = GroupedRows(
            a=embed(a, case.hazard), a_scale=lay(a_scale, case.layout), w=w,
            w_scale=lay(w_scale, _of_weights(case.layout)), ids=ids,
            expert=expert, weights=0.5 + 0.5 * weights, first=case.first_expert,
        )  # fmt: skip
        return surround(made, case.hazard)

    def given(self, case: Case, tensors: Mapping[str, Tensor]) -> tuple[Case, GroupedRows]:
        """Take ``a``, ``a_scale``, ``w``, ``w_scale``, ``ids``; ``weights`` and ``bias`` if any."""
        own = Own(self.name, tensors)
        ids = own.take("ids", 2, IDS).int()
        w = own.take("w", 3, CODES_OF)
        experts, n, k = w.shape
        case = dataclasses.replace(case, e=experts * case.ep_size)
        rows = ids.shape[0] if self.shared else ids.numel()
        blocks = -(-k // BLOCK)
        fp32 = (torch.float32,)
        given = GroupedRows(
            a=own.take("a", 2, CODES_OF, (rows, k)),
            a_scale=own.take("a_scale", 2, fp32, (rows, blocks)), w=w,
            w_scale=own.take("w_scale", 3, fp32, (experts, -(-n // BLOCK), blocks)), ids=ids,
            expert=local_expert(ids, case.first_expert, experts),
            weights=own.take("weights", 2, fp32, tuple(ids.shape)) if "weights" in own else None,
            first=case.first_expert,
            bias=own.take("bias", 2, fp32, (experts, n)) if "bias" in own else None,
        )  # fmt: skip
        h, i = (k, n // 2) if self.shared else (n, k)
        return dataclasses.replace(case, m=ids.shape[0], k=ids.shape[1], h=h, i=i), given

    def cost(self, case: Case) -> int:
        """Count blocks of 16 rows by 64 columns, times blocks of K."""
        n, k = self.extent(case)
        pairs = case.m * case.k
        return min(pairs, case.e + pairs // 16) * -(-n // 64) * -(-k // BLOCK)

    def witness_cases(self) -> Iterator[Case]:
        """Yield small differences in both formats, a batch past 64 tokens, and a dense GEMM."""
        dense = dataclasses.replace(WITNESSED, e=1, k=1, m=48)
        for case in (WITNESSED, dense):
            yield case
            yield dataclasses.replace(case, scale=ScaleFormat.UE8M0)
        yield dataclasses.replace(WITNESSED, m=65, h=256, i=128)

    def probes(self) -> Iterator[Case]:
        """Yield operands of all codes whose sums are small differences: few rows, many, dense.

        The dense one has four blocks of K: of two, halves that are added last hide the steps.
        """
        yield dataclasses.replace(WITNESSED, h=256, pool=2)
        yield dataclasses.replace(WITNESSED, m=65, h=256, pool=2)
        h, i = (512, 128) if self.shared else (256, 512)
        yield dataclasses.replace(WITNESSED, m=48, e=1, k=1, h=h, i=i, pool=2)

    def outputs(self, case: Case, inputs: GroupedRows) -> Mapping[str, Output]:
        """BF16 rows of every pair; those that are not owned belong to nobody."""
        shape = (inputs.expert.numel(), inputs.w.shape[1])
        return {
            "rows": Output(
                kind=Kind.VALUES, shape=shape, dtype=torch.bfloat16, axes=("pair", "column")
            )
        }

    def reference(self, case: Case, inputs: GroupedRows, recipe: Recipe) -> dict[str, Tensor]:
        """Return the rows, +0 where a pair is not owned."""
        gemm, source = recipe.of("gemm", GemmRecipe), inputs.source
        rows = grouped(
            inputs.a[source], inputs.a_scale[source], inputs.w, inputs.w_scale, inputs.expert, gemm
        )
        rows = biased(rows, inputs.bias, inputs.expert, gemm, self.weight(inputs, recipe))
        return {"rows": torch.where((inputs.expert >= 0)[:, None], rows, torch.zeros_like(rows))}

    def weight(self, inputs: GroupedRows, recipe: Recipe) -> Tensor | None:
        """Return the weight [P] that the epilogue applies, None for none."""
        return None

    def live(self, case: Case, inputs: GroupedRows) -> Mapping[str, Tensor]:
        """Return the owned pairs."""
        return {"rows": inputs.expert >= 0}

    def mistakes(self, case: Case, inputs: GroupedRows, recipe: Recipe) -> Iterator[Mistake]:
        """Yield those of a grouped GEMM."""
        yield from wrapped(inputs, lambda given: self.reference(case, given, recipe))
        inputs = small(inputs)
        weight = self.weight(inputs, recipe)

        def rows(given: GroupedRows) -> Tensor:
            return self.reference(case, given, recipe)["rows"]

        def some(given: GroupedRows, chosen: Tensor) -> GroupedRows:
            made: GroupedRows = self.some(case, given, chosen).inputs
            return made

        yield from mistakes(inputs, recipe, weight, rows, some, gated=self.shared)

    def units(self, inputs: GroupedRows) -> int:
        """Count tokens."""
        return inputs.ids.shape[0]

    def some(self, case: Case, inputs: GroupedRows, chosen: Tensor) -> Subset:
        """Return some tokens."""
        pairs = pairs_of(chosen, inputs.ids.shape[1])
        rows = chosen if self.shared else pairs
        part = dataclasses.replace(
            inputs, a=inputs.a[rows], a_scale=lay(inputs.a_scale[rows], case.layout),
            ids=inputs.ids[chosen], expert=inputs.expert[pairs],
            weights=None if inputs.weights is None else inputs.weights[chosen],
        )  # fmt: skip
        case = dataclasses.replace(case, m=chosen.numel())
        return Subset(case=case, inputs=part, rows={"rows": pairs})

    def spoiled(self, inputs: GroupedRows, chosen: Tensor, value: float) -> GroupedRows:
        """Return operands in which some tokens' scales are one number, and their codes the largest.

        For NaN the codes are NaN as well.
        """
        rows = chosen if self.shared else pairs_of(chosen, inputs.ids.shape[1])
        a = inputs.a.clone()
        a[rows] = E4M3.nan if math.isnan(value) else E4M3.nan - 1
        return dataclasses.replace(inputs, a=a, a_scale=filled(inputs.a_scale, rows, value))

    def handed(self, inputs: GroupedRows) -> list[Tensor]:
        """Return all tensors; of large weights those of the experts that are hit."""
        if inputs.w.numel() < LARGE:
            return super().handed(inputs)
        others = super().handed(dataclasses.replace(inputs, w=inputs.w[:0]))
        return [*others, *(inputs.w[index] for index in hit(inputs.expert))]

    def sealed(self, inputs: GroupedRows) -> list[Tensor]:
        """Return the operands, the routing and the weights."""
        weights = [] if inputs.weights is None else [inputs.weights]
        operands = [inputs.a, inputs.a_scale, inputs.w, inputs.w_scale]
        return [*operands, inputs.ids, inputs.expert, *weights]


class Fc1(_Grouped):
    """The first GEMM: gate and up rows of the weights."""

    name = "fc1"
    acting: ClassVar[Acting] = {"gemm": None}
    shared = True

    def extent(self, case: Case) -> tuple[int, int]:
        """Return 2 I and H."""
        return 2 * case.i, case.h


class Fc2(_Grouped):
    """The second GEMM, on the quantized activations."""

    name = "fc2"
    acting: ClassVar[Acting] = {"gemm": None, "combine": frozenset({"combine.weights_at"})}
    needs = frozenset({"gemm"})
    shared = False

    def extent(self, case: Case) -> tuple[int, int]:
        """Return H and I."""
        return case.h, case.i

    def weight(self, inputs: GroupedRows, recipe: Recipe) -> Tensor | None:
        """Return the routing weights where the recipe has them here."""
        if "combine" not in recipe.parts:
            return None
        return in_epilogue(inputs.weights, recipe.of("combine", CombineRecipe))


FC1 = Fc1()
FC2 = Fc2()
