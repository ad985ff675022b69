"""A grouped GEMM whose operands, scales and steps may be others than the recipe's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.arithmetic.rounding import add_rn
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.gemm.reference import (
    INTERVALS,
    accumulate,
    biased,
    cut,
    dot,
    hit,
)
from moe_parity.references.stages.mistakes.anywhere import Change, Make

if TYPE_CHECKING:
    from moe_parity.references.stages.gemm.stage import GroupedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """One GEMM on given operands; what its dot products are is computed once."""

    inputs: GroupedRows
    recipe: GemmRecipe
    weight: Tensor | None
    """What the epilogue applies by the recipe."""
    reference: Callable[[GroupedRows], Tensor]
    """Operands -> BF16 rows [P, N]."""

    def of(self, **changes: Any) -> Make:
        """Return the rows of other operands."""
        return lambda: {"rows": self.reference(dataclasses.replace(self.inputs, **changes))}

    @cached_property
    def right(self) -> Tensor:
        """The rows without a mistake."""
        return self.finished(self.chain())

    def made(self, accumulator: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Return the outputs of accumulators [P, N]."""
        return {"rows": self.finished(accumulator())}

    def rows(self, change: Change) -> Make:
        """Return the right rows, changed."""
        return lambda: {"rows": change(self.right)}

    def columns(self, order: Tensor) -> Make:
        """Return the right rows, their columns in another order."""
        return self.rows(lambda rows: rows[:, order])

    def scaled(
        self,
        a_scale: Tensor | None = None,
        w_scale: Tensor | None = None,
        *,
        rows: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> Make:
        """Return the rows by other scales, or by those of other rows or columns."""
        return lambda: {
            "rows": self.finished(
                self.chain(a_scale=a_scale, w_scale=w_scale, rows=rows, columns=columns)
            )
        }

    def finished(self, accumulator: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return BF16 rows of accumulators, zeros where nobody owns the pair."""
        expert = self.inputs.expert
        own = self.weight if weight is None else weight
        rows = biased(accumulator, self.inputs.bias, expert, self.recipe, own)
        return torch.where((expert >= 0)[:, None], rows, torch.zeros_like(rows))

    @cached_property
    def products(self) -> dict[int, Tensor]:
        """The dot products of each interval of K, by its start, fp32 [P, N]."""
        given, step = self.inputs, INTERVALS[self.recipe.interval]
        shape = given.expert.numel(), given.w.shape[1]
        starts = range(0, given.a.shape[1], step)
        made = {start: torch.zeros(shape, device=given.a.device) for start in starts}
        for index in hit(given.expert):
            rows = (given.expert == index).nonzero()[:, 0]
            a, w = given.a[given.source[rows]], given.w[index].t()
            for start in starts:
                cut = slice(start, start + step)
                made[start][rows] = dot(
                    a[:, cut].contiguous(), w[cut].contiguous(), self.recipe.unit
                )
        return made

    def chain(
        self,
        *,
        a_scale: Tensor | None = None,
        w_scale: Tensor | None = None,
        rows: Tensor | None = None,
        columns: Tensor | None = None,
        total: Change = lambda t: t,
        partial: Change = lambda t: t,
        order: Callable[[list[int]], list[int]] = lambda starts: starts,
        parts: int | None = None,
        of_part: Change = lambda t: t,
    ) -> Tensor:
        """Return fp32 accumulators [P, N] with other scales, or other steps between intervals.

        ``rows`` [P] are those whose activations' scales each pair takes, ``columns`` [N] the block
        whose weights' scales each column takes.  ``partial`` rounds each dot product, ``total`` the
        accumulator after each step; ``order`` is that of the intervals; K is cut into ``parts``, as
        the recipe has it unless they are given, each with an accumulator of its own, which
        ``of_part`` rounds and which are added last.
        """
        given = self.inputs
        s_a = given.a_scale if a_scale is None else a_scale
        s_a = s_a[given.source if rows is None else rows]
        own = (given.w_scale if w_scale is None else w_scale)[given.expert.clamp(min=0)]
        if columns is None:
            s_b = own.repeat_interleave(BLOCK, 1)[:, : given.w.shape[1]]
        else:
            s_b = own[:, columns]
        starts = order(list(self.products))
        sums = []
        for own_starts in self._cut(starts, parts):
            acc = torch.zeros((s_b.shape[0], s_b.shape[1]), device=given.a.device)
            for start in own_starts:
                p, block = partial(self.products[start]), start // BLOCK
                acc = total(accumulate(acc, p, s_a[:, block, None], s_b[:, :, block], self.recipe))
            sums.append(of_part(acc))
        for other in sums[1:]:
            sums[0] = add_rn(sums[0], other)
        return sums[0]

    def _cut(self, starts: list[int], parts: int | None) -> list[list[int]]:
        """Return the intervals of each accumulator, at least one list."""
        half = cut(self.inputs.a.shape[1], self.recipe)
        if parts is None and half is not None:
            return [[s for s in starts if s < half], [s for s in starts if s >= half]]
        size = max(-(-len(starts) // (parts or 1)), 1)
        return [starts[first : first + size] for first in range(0, max(len(starts), 1), size)]
