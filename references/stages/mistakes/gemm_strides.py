"""Mistakes of grouped GEMMs that read their activations at another stride, sorted or as they come.

A kernel may have sorted the rows by expert first, each expert's in whole blocks: then a row that
is read elsewhere is another expert's, or the zeros of a slot that no pair has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import Outputs
from moe_parity.references.stages.mistakes.strides import Axis, other_strides, reading
from moe_parity.references.stages.routing import pairs_of, place

if TYPE_CHECKING:
    from moe_parity.references.stages.gemm.stage import GroupedRows

BLOCKS = (1, 16, 32, 64, 128)
"""Rows that an expert's are padded to a multiple of, once they are sorted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wrong:
    """Rows that are read at another stride."""

    words: str
    stride: int
    right: int
    place: Tensor
    """The row of the memory that each pair reads, int64 [P]."""
    read: Callable[[], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Strides:
    """All of a GEMM's wrong strides; of a few tokens they are multiplied side by side.

    A reference costs little more for a hundred rows than for one.
    """

    inputs: GroupedRows
    give: Callable[[GroupedRows], Outputs]
    widths: Mapping[str, int]
    """Those of other tensors, by what they are called."""
    tried: dict[tuple[int, ...], list[Outputs]] = dataclasses.field(default_factory=dict)

    @cached_property
    def every(self) -> list[_Wrong]:
        """Each way to read the rows."""
        given, found = self.inputs, []
        if given.a.stride(1) == 1 and given.a.shape[0] > 1:
            found += list(self._of("the activations' codes", given.a, given.source))
        seen = [given.source]
        owned = given.expert >= 0
        for block in BLOCKS if int(owned.sum()) > 1 else ():
            placed = place(given.expert, given.w.shape[0], block)
            if any(bool((placed.slot == other)[owned].all()) for other in seen):
                continue
            seen.append(placed.slot)
            noun = f"the activations' codes, sorted by expert in blocks of {block},"
            if block == 1:
                noun = "the activations' codes, sorted by expert,"
            memory = given.a.new_zeros((placed.used, given.a.shape[1]))
            memory[placed.slot[owned]] = given.a[given.source[owned]]
            found += list(self._of(noun, memory, placed.slot.clamp(min=0)))
        return found

    def _of(self, noun: str, memory: Tensor, slots: Tensor) -> Iterator[_Wrong]:
        right, (_, k) = memory.stride(0), memory.shape
        for words, stride in other_strides(AXIS, right, self.widths):
            read = reading(memory, (stride, 1), zeros=True)
            if read is not None and (stride != k or memory.is_contiguous()):
                yield _Wrong(
                    words=f"{noun} read at {words}", stride=stride, right=right, place=slots,
                    read=read,
                )  # fmt: skip

    def whole(self, wrong: _Wrong) -> Outputs:
        """Return the outputs of rows that are read so."""
        return self.give(self._joined([wrong], None))

    def few(self, number: int, chosen: Tensor) -> Outputs:
        """Return the rows of some tokens."""
        key = tuple(chosen.tolist())
        if key not in self.tried:
            rows = self.give(self._joined(self.every, chosen))["rows"]
            self.tried[key] = [{"rows": part} for part in rows.chunk(len(self.every))]
        return self.tried[key][number]

    def _joined(self, wrongs: list[_Wrong], chosen: Tensor | None) -> GroupedRows:
        """Return the operands of pairs that each wrong way reads, one way after the other."""
        given, k, count = self.inputs, self.inputs.ids.shape[1], len(wrongs)
        if chosen is None:
            chosen = torch.arange(given.ids.shape[0], device=given.ids.device)
        pairs = pairs_of(chosen, k)
        return dataclasses.replace(
            given, a=torch.cat([wrong.read()[wrong.place[pairs]] for wrong in wrongs]),
            a_scale=given.a_scale[given.source[pairs]].repeat(count, 1),
            ids=given.ids[chosen].repeat(count, 1), expert=given.expert[pairs].repeat(count),
            weights=None if given.weights is None else given.weights[chosen].repeat(count, 1),
        )  # fmt: skip


AXIS = Axis(noun="row", dims=(0,))


def of_strides(
    inputs: GroupedRows, give: Callable[[GroupedRows], Outputs], widths: Mapping[str, int]
) -> Iterator[Mistake]:
    """Yield rows of activations that are read at other strides than theirs."""
    strides = _Strides(inputs=inputs, give=give, widths=widths)
    for number, wrong in enumerate(strides.every):
        yield Mistake(
            name="row_stride", words=wrong.words, local=False, late=True,
            figures=f"{wrong.stride} instead of {wrong.right}",
            outputs=partial(strides.whole, wrong), few=partial(strides.few, number),
        )  # fmt: skip
