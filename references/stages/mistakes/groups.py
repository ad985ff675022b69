"""What a block quantizer quantizes, as groups in a grid, with its steps to be taken otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import CodeFormat
from moe_parity.references.arithmetic.rounding import f32, mul_rn
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import Change, Make, Outputs
from moe_parity.references.stages.quant.decisions import QuantRecipe, ScaleForm
from moe_parity.references.stages.quant.reference import codes_by, maxima, scale_of


@dataclass(frozen=True, kw_only=True)
class Groups:
    """What is quantized, as groups in a grid, and the way back to a stage's outputs."""

    values: Tensor
    """fp32 [G, L]."""
    grid: tuple[int, int]
    """Groups down and across; G is their product."""
    give: Callable[[Tensor, Tensor], Outputs]
    """(codes [G, L], scales [G]) -> outputs."""
    recipe: QuantRecipe
    power_of_two: bool
    form: CodeFormat
    shape: tuple[int, int]
    """Rows and columns of a group in the tensor: one row, or those of a tile."""
    packed: bool = False
    """Whether four scales make one word."""

    @cached_property
    def _amax(self) -> Tensor:
        return maxima(self.values, self.recipe)

    def amax(self) -> Tensor:
        """Return the maxima [G]."""
        return self._amax

    @property
    def rows(self) -> Tensor:
        """The values as rows of groups, fp32 [G, rows, columns]."""
        down, across = self.shape
        return self.values[:, : down * across].view(-1, down, across)

    @property
    def noun(self) -> str:
        """What a group is called."""
        return "group" if self.shape[0] == 1 else "tile"

    def floored(self) -> Tensor:
        """Return the maxima [G] with the recipe's floor under them."""
        plain = dataclasses.replace(self.recipe, scale_form=ScaleForm.DIV_448)
        return scale_of(
            self.amax(), plain, power_of_two=False, form=dataclasses.replace(self.form, largest=1.0)
        )

    def scale(self, amax: Tensor, *, power_of_two: bool | None = None) -> Tensor:
        """Return the scales [G] of some maxima."""
        power = self.power_of_two if power_of_two is None else power_of_two
        return scale_of(amax, self.recipe, power_of_two=power, form=self.form)

    def codes(self, amax: Tensor, scale: Tensor, cast: Change | None = None) -> Tensor:
        """Return the codes by some maxima and scales."""
        return codes_by(
            self.values, amax, scale, self.recipe, power_of_two=self.power_of_two, form=self.form,
            cast=cast,
        )  # fmt: skip

    def codes_of(self, scale: Tensor) -> Tensor:
        """Return codes by a scale that no maximum belongs to: what divides does so by it."""
        amax = mul_rn(scale, f32(self.form.largest, scale))
        return dataclasses.replace(self, power_of_two=False).codes(amax, scale)

    def on_grid(self, of_group: Tensor, change: Change) -> Tensor:
        """Return a number of each group, changed as a matrix of the grid."""
        return change(of_group.view(self.grid)).reshape(-1)

    # --- outputs ---------------------------------------------------------------------------------

    def by(self, amax: Tensor, cast: Change | None = None) -> Outputs:
        """Return the outputs with other maxima, or another cast to codes."""
        scale = self.scale(amax)
        return self.give(self.codes(amax, scale, cast), scale)

    def right(self) -> Outputs:
        """Return the outputs without a mistake."""
        return self.by(self.amax())

    def reduced(self, change: Change) -> Make:
        """Return what gives the outputs with the maxima changed."""
        return lambda: self.by(change(self.amax()))

    def cast(self, cast: Change) -> Make:
        """Return what gives the outputs with another cast to codes."""
        return lambda: self.by(self.amax(), cast)

    def stored(self, change: Change) -> Make:
        """Return what gives the right codes, and the scales changed as they are stored."""

        def make() -> Outputs:
            amax = self.amax()
            scale = self.scale(amax)
            return self.give(self.codes(amax, scale), change(scale))

        return make

    def by_scale(self, scale: Tensor) -> Outputs:
        """Return the outputs by other scales, which are stored too."""
        return self.give(self.codes_of(scale), scale)

    def divided(self, change: Change) -> Make:
        """Return what gives the right scales, and codes by the scales changed."""

        def make() -> Outputs:
            scale = self.scale(self.amax())
            return self.give(self.codes_of(change(scale)), scale)

        return make

    def neighbours(
        self, name: str, words: str, made: Callable[[Change], Make]
    ) -> Iterator[Mistake]:
        """Yield a number of each group taken from a neighbour: next to it, in its row or below.

        ``words`` have a place for the neighbour; ``made`` gives the outputs of a change of it.
        """
        down, across = self.grid
        for dim, noun, size in ((1, "group", across), (0, "row", down)):
            for step, side in ((1, "next"), (-1, "previous")):
                # the end of a row has the other end for a neighbour, or itself
                for clamp in (False, True) if size > 1 else ():
                    moved = partial(_shifted, dim=dim, step=step, clamp=clamp)
                    yield Mistake(
                        name=name, words=words.format(f"{side} {noun}"), local=dim == 1,
                        outputs=made(partial(self.on_grid, change=moved)),
                    )  # fmt: skip

    def rows_apart(
        self, name: str, words: str, made: Callable[[Change], Make]
    ) -> Iterator[Mistake]:
        """Yield a number of each group taken from another row of its block of 16 or 32 rows."""
        row = torch.arange(self.grid[0], device=self.values.device)
        for size in (16, 32) if self.shape[0] == 1 else ():
            for of, index in (
                (f"the first of every {size} rows", row // size * size),
                (f"the row {size} before", torch.where(row < size, row, row - size)),
            ):
                if self.grid[0] > size:
                    taken = partial(torch.index_select, dim=0, index=index)
                    yield Mistake(
                        name=name, words=words.format(of), local=False,
                        outputs=made(partial(self.on_grid, change=taken)),
                    )  # fmt: skip


def _shifted(t: Tensor, dim: int, step: int, clamp: bool) -> Tensor:
    if not clamp:
        return t.roll(-step, dim)
    index = (torch.arange(t.shape[dim], device=t.device) + step).clamp(0, t.shape[dim] - 1)
    return t.index_select(dim, index)
