"""Mistakes of the grouped GEMMs: K, scales, experts, rows, columns, accumulators, weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK, f32_to_bf16, round_bf16, to_f32
from moe_parity.references.arithmetic.rounding import add_rn, mul_rn
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Recipe
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.gemm.reference import INTERVALS, accumulate, biased, dot, hit
from moe_parity.references.stages.mistakes import routing
from moe_parity.references.stages.mistakes.anywhere import (
    Outputs,
    contiguous_reading,
    lost,
    reread,
    round_f16,
    rounded,
    shifts,
    stored_as,
    without,
)

if TYPE_CHECKING:
    from moe_parity.references.stages.gemm.stage import GroupedRows

Made = Callable[[], Outputs]
Rounding = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gemm:
    """One GEMM on given operands; what its dot products are is computed once."""

    inputs: GroupedRows
    recipe: GemmRecipe
    weight: Tensor | None
    """What the epilogue applies by the recipe."""
    reference: Callable[[GroupedRows], Tensor]
    """Operands -> BF16 rows [P, N]."""

    def of(self, **changes: Any) -> Made:
        """Return the rows of other operands."""
        return lambda: {"rows": self.reference(dataclasses.replace(self.inputs, **changes))}

    @cached_property
    def right(self) -> Tensor:
        """The rows without a mistake."""
        return self.finished(self.chain())

    def rows(self, change: Callable[[Tensor], Tensor]) -> Made:
        """Return the right rows, changed."""
        return lambda: {"rows": change(self.right)}

    def scaled(self, **scales: Tensor) -> Made:
        """Return the rows by other scales."""
        return lambda: {"rows": self.finished(self.chain(**scales))}

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
        total: Rounding = lambda t: t,
        partial: Rounding = lambda t: t,
        order: Callable[[list[int]], list[int]] = lambda starts: starts,
        parts: int = 1,
    ) -> Tensor:
        """Return fp32 accumulators [P, N] with other scales, or other steps between intervals.

        ``partial`` rounds each dot product, ``total`` the accumulator after each step; ``order`` is
        that of the intervals; K is cut into ``parts``, each with an accumulator of its own, which
        are added last.
        """
        given = self.inputs
        s_a = (given.a_scale if a_scale is None else a_scale)[given.source]
        own = (given.w_scale if w_scale is None else w_scale)[given.expert.clamp(min=0)]
        s_b = own.repeat_interleave(BLOCK, 1)[:, : given.w.shape[1]]
        starts = order(list(self.products))
        size = max(-(-len(starts) // parts), 1)
        sums = []
        for first in range(0, len(starts), size):
            acc = torch.zeros((s_b.shape[0], s_b.shape[1]), device=given.a.device)
            for start in starts[first : first + size]:
                p, block = partial(self.products[start]), start // BLOCK
                acc = total(accumulate(acc, p, s_a[:, block, None], s_b[:, :, block], self.recipe))
            sums.append(acc)
        for other in sums[1:]:
            sums[0] = add_rn(sums[0], other)
        return sums[0]


def mistakes(
    inputs: GroupedRows,
    recipe: Recipe,
    weight: Tensor | None,
    reference: Callable[[GroupedRows], Tensor],
    *,
    gated: bool,
) -> Iterator[Mistake]:
    """Yield what a grouped GEMM may do wrong; ``gated``: its columns are gate and up."""
    made = _Gemm(
        inputs=inputs, recipe=recipe.of("gemm", GemmRecipe), weight=weight, reference=reference
    )
    yield from _of_k(made)
    yield from _of_scales(made)
    yield from _of_experts(made)
    yield from _of_columns(made, gated=gated)
    yield from _of_rows(made)
    yield from _of_accumulators(made)
    yield from _of_epilogue(made)
    yield from lost(made.rows(lambda t: t))


# --- K ------------------------------------------------------------------------------------------


def _of_k(gemm: _Gemm) -> Iterator[Mistake]:
    a, k = gemm.inputs.a, gemm.inputs.a.shape[1]
    blocks = -(-k // BLOCK)
    cuts: list[tuple[str, slice]] = [
        (f"the last {n}", slice(k - n, k)) for n in (BLOCK, 64, 32, 16)
    ]
    cuts += [("the first 128", slice(0, BLOCK)), ("all but the first 128", slice(BLOCK, k))]
    cuts += [("the second half", slice(k // 2, k)), ("the first half", slice(0, k // 2))]
    cuts += [(f"the last {k % n}", slice(k // n * n, k)) for n in (256, 512) if k % n]
    cuts += [("the last column", slice(k - 1, k)), ("the last two blocks", slice(k - 2 * BLOCK, k))]
    for words, cut in cuts:
        if 0 <= (cut.start or 0) < (cut.stop or 0) and (cut.stop or 0) - (cut.start or 0) < k:
            yield Mistake(
                name="k_tail", words=f"{words} of K left out",
                outputs=gemm.of(a=without(a, (slice(None), cut))),
            )  # fmt: skip
    for first in (0, 1) if blocks > 1 else ():
        odd = torch.arange(k, device=a.device) // BLOCK % 2 == first
        yield Mistake(
            name="k_blocks_skipped", words=f"every second block of K left out, from block {first} on,",
            outputs=gemm.of(a=without(a, (slice(None), odd))),
        )  # fmt: skip
    for step, side in ((1, "next"), (-1, "previous")) if blocks > 1 else ():
        yield Mistake(
            name="k_shifted", words=f"the weights of the {side} block of K",
            outputs=gemm.of(w=gemm.inputs.w.roll(-step * BLOCK, 2)),
        )  # fmt: skip


# --- scales -------------------------------------------------------------------------------------


def _of_scales(gemm: _Gemm) -> Iterator[Mistake]:
    a, w = gemm.inputs.a_scale, gemm.inputs.w_scale
    for noun, name, scale in (("activations", "a_scale", a), ("weights", "w_scale", w)):

        def of(scale: Tensor, name: str = name) -> Made:
            return gemm.scaled(**{name: scale})

        dim = scale.dim() - 1
        for side, moved, inside in shifts(scale, dim):
            yield Mistake(
                name="scale_of_neighbour", words=f"the {noun}' scale of the {side} block of K",
                outputs=of(moved), local=inside or name == "w_scale",
            )  # fmt: skip
        paired = torch.arange(scale.shape[dim], device=scale.device)
        for count in (2, 4):
            index = paired // count * count
            yield Mistake(
                name="scale_of_the_first",
                words=f"one scale of the {noun} for {count} blocks of K, that of the first,",
                outputs=of(scale.index_select(dim, index)),
            )  # fmt: skip
            yield Mistake(
                name="scale_of_the_first",
                words=f"the {noun}' scales of a block of K that is {count} times too small",
                outputs=of(scale.index_select(dim, paired // count)),
            )  # fmt: skip
        for words, at in (("first", 0), ("last", -1)):
            yield Mistake(
                name="scale_of_one_block", words=f"the {noun}' scale of the {words} block for all of K",
                outputs=of(scale.select(dim, at).unsqueeze(dim).expand(scale.shape).contiguous()),
            )  # fmt: skip
        yield Mistake(
            name="scale_lost", words=f"no scales of the {noun}", outputs=of(torch.ones_like(scale))
        )
        yield Mistake(
            name="scale_twice", words=f"the {noun}' scales twice", outputs=of(mul_rn(scale, scale))
        )
        yield Mistake(
            name="scale_inverted", words=f"values divided by the scales of the {noun}",
            outputs=of(1.0 / scale),
        )  # fmt: skip
        for way, memory in ((reread, "row-major"), (stored_as, "column-major")):
            yield Mistake(
                name="transposed_scales", words=f"transposed scales of the {noun} ({memory} memory)",
                outputs=of(way(scale)), local=name == "w_scale",
            )  # fmt: skip
        yield Mistake(
            name="scale_rounded",
            words=f"the {noun}' scales rounded to BF16",
            outputs=of(round_bf16(scale)),
        )
        yield Mistake(
            name="scale_power", words=f"of the {noun}' scales the exponent alone",
            outputs=of((scale.view(torch.int32) & 0x7F800000).view(torch.float32)),
        )  # fmt: skip
        yield Mistake(
            name="k_reversed",
            words=f"the {noun}' scales of K from the end",
            outputs=of(scale.flip(dim)),
        )
    yield Mistake(
        name="scale_lost", words="no scales at all",
        outputs=gemm.scaled(a_scale=torch.ones_like(a), w_scale=torch.ones_like(w)),
    )  # fmt: skip
    for side, moved, _ in shifts(w, 1):
        yield Mistake(
            name="scale_of_neighbour", words=f"the weights' scale of the {side} 128 columns",
            outputs=gemm.scaled(w_scale=moved),
        )  # fmt: skip
    for side, moved, _ in shifts(w, 0):
        yield Mistake(
            name="scale_of_another_expert", words=f"the weights' scales of the {side} expert",
            outputs=gemm.scaled(w_scale=moved),
        )  # fmt: skip
    for words, at in (("first", 0), ("last", -1)):
        yield Mistake(
            name="scale_of_another_expert", words=f"the weights' scales of the {words} expert for all",
            outputs=gemm.scaled(w_scale=w[at].expand(w.shape).contiguous()),
        )  # fmt: skip
        yield Mistake(
            name="scale_of_one_block", words=f"the weights' scale of the {words} 128 columns for all",
            outputs=gemm.scaled(w_scale=w[:, at, None].expand(w.shape).contiguous()),
        )  # fmt: skip
    for side, moved, _ in shifts(a, 0):
        yield Mistake(
            name="scale_of_another_row", words=f"the activations' scales of the {side} row",
            outputs=gemm.scaled(a_scale=moved), local=False,
        )  # fmt: skip


# --- experts ------------------------------------------------------------------------------------


def _of_experts(gemm: _Gemm) -> Iterator[Mistake]:
    given = gemm.inputs
    wrong = routing.wrong_experts(given.expert, given.ids, given.first, given.w.shape[0])
    for name, words, expert in wrong:
        local = name != "expert_of_neighbour"
        yield Mistake(name=name, words=words, outputs=gemm.of(expert=expert), local=local)
    for side, moved, _ in shifts(given.w, 0):
        yield Mistake(
            name="wrong_expert", words=f"the codes of the {side} expert's weights, its own scales,",
            outputs=gemm.of(w=moved),
        )  # fmt: skip
    owned = given.expert >= 0
    masks = (
        ("duplicate_lost", "a token's second pair with the same expert left at zero",
         routing.second_ones(given.ids, owned)),
        ("pair_lost", "the last pair of each expert left at zero",
         routing.last_of_each(given.expert, given.w.shape[0])),
        *(("tile_lost", f"the rows past an expert's last full tile of {tile} left at zero",
           routing.past_full_tiles(given.expert, tile)) for tile in (16, 32, 64, 128)),
    )  # fmt: skip
    for name, words, mask in masks:
        if bool(mask.any()):
            yield Mistake(
                name=name, words=words, local=False,
                outputs=gemm.rows(lambda t, mask=mask: without(t, mask)),  # type: ignore[misc]
            )  # fmt: skip


# --- columns and rows ---------------------------------------------------------------------------


def _of_columns(gemm: _Gemm, *, gated: bool) -> Iterator[Mistake]:
    n = gemm.inputs.w.shape[1]
    column = torch.arange(n, device=gemm.inputs.w.device)
    half = n // 2
    orders: list[tuple[str, str, Tensor]] = []
    if gated and n % 2 == 0:
        orders = [
            ("gate_up_swapped", "gate and up swapped", (column + half) % n),
            ("gate_up_interleaved", "gate and up interleaved, not one after the other,",
             column // 2 + column % 2 * half),
            ("gate_up_interleaved", "interleaved columns taken apart into gate and up",
             column % half * 2 + column // half),
        ]  # fmt: skip
    orders += [
        ("half_tile", f"the two halves of every {size} columns swapped", column ^ (size // 2))
        for size in (2, 16, 32, 64, 128)
        if n % size == 0
    ]
    orders.append(("columns_reversed", "columns from the end", column.flip(0)))
    for name, words, order in orders:
        yield Mistake(
            name=name, words=words,
            outputs=gemm.rows(lambda t, order=order: t[:, order]),  # type: ignore[misc]
        )  # fmt: skip
    for step, side in ((1, "next"), (-1, "previous")):
        yield Mistake(
            name="column_of_neighbour", words=f"the {side} column in a column's place",
            outputs=gemm.rows(lambda t, step=step: t.roll(-step, 1)),  # type: ignore[misc]
        )  # fmt: skip
        yield Mistake(
            name="column_of_neighbour", words=f"the {side} 128 columns in the place of others",
            outputs=gemm.rows(lambda t, step=step: t.roll(-step * BLOCK, 1)),  # type: ignore[misc]
        )  # fmt: skip


def _of_rows(gemm: _Gemm) -> Iterator[Mistake]:
    given = gemm.inputs
    pairs, tokens = given.expert.numel(), given.a.shape[0]
    pair = torch.arange(pairs, device=given.a.device)
    reads = [
        ("row_of_neighbour", "the row of the next token", (given.source + 1) % max(tokens, 1)),
        ("row_of_neighbour", "the row of the previous token", (given.source - 1) % max(tokens, 1)),
        ("pair_for_token", "a pair's number taken for its token's", pair % max(tokens, 1)),
        ("pair_for_token", "a pair's number taken for its token's, up to the last,", pair.clamp(max=tokens - 1)),
        ("one_row", "the first token's row for all", torch.zeros_like(pair)),
    ]  # fmt: skip
    for name, words, source in reads if tokens > 1 else ():
        if bool((source != given.source).any()):
            yield Mistake(
                name=name, words=words, local=False,
                outputs=gemm.of(a=given.a[source], a_scale=given.a_scale[source]),
            )  # fmt: skip
    flat = contiguous_reading(given.a)
    if flat is not None:
        yield Mistake(
            name="row_stride", words="rows read with K as their stride", local=False,
            outputs=gemm.of(a=flat),
        )  # fmt: skip


# --- accumulators -------------------------------------------------------------------------------


def _of_accumulators(gemm: _Gemm) -> Iterator[Mistake]:
    def of(**how: Any) -> Made:
        return lambda: {"rows": gemm.finished(gemm.chain(**how))}

    for noun, way in (("a BF16", round_bf16), ("an FP16", round_f16)):
        yield Mistake(
            name="narrow_accumulator", words=f"{noun} accumulator, rounded after each block of K,",
            outputs=of(total=way),
        )  # fmt: skip
        yield Mistake(
            name="narrow_partial", words=f"each block's dot product rounded to {noun.split()[1]}",
            outputs=of(partial=way),
        )  # fmt: skip
    yield Mistake(
        name="k_order", words="K added from its end",
        outputs=of(order=lambda starts: starts[::-1]),
    )  # fmt: skip
    for parts in (2, 4):
        yield Mistake(
            name="split_k", words=f"K cut into {parts} parts that are added last",
            outputs=of(parts=parts),
        )  # fmt: skip
    if gemm.inputs.bias is None:
        weight = gemm.weight

        def exact() -> Tensor:
            acc = gemm.chain()
            return acc if weight is None else mul_rn(acc, weight[:, None])

        yield from rounded(exact, lambda rows: {"rows": rows})


# --- bias and weights ---------------------------------------------------------------------------


def _of_epilogue(gemm: _Gemm) -> Iterator[Mistake]:
    given = gemm.inputs
    if given.bias is not None:
        for words, bias in (
            ("no bias", torch.zeros_like(given.bias)),
            ("the bias twice", 2.0 * given.bias),
            ("the next expert's bias", given.bias.roll(-1, 0)),
            ("the previous expert's bias", given.bias.roll(1, 0)),
            ("the first expert's bias for all", given.bias[0].expand(given.bias.shape)),
            ("the bias rounded to BF16", round_bf16(given.bias)),
        ):
            yield Mistake(name="bias", words=words, outputs=gemm.of(bias=bias))
    if given.weights is None:
        return
    flat = given.weights.flatten()
    for words, weight in (("", flat), (" squared", mul_rn(flat, flat))):
        if gemm.weight is None or words:
            yield Mistake(
                name="weights_here", words=f"routing weights{words} applied in this GEMM",
                outputs=lambda w=weight: {"rows": gemm.finished(gemm.chain(), w)},  # type: ignore[misc]
            )  # fmt: skip
            yield Mistake(
                name="weights_here", words=f"routing weights{words} applied to the BF16 rows of this GEMM",
                outputs=gemm.rows(lambda t, w=weight: f32_to_bf16(mul_rn(to_f32(t), w[:, None]))),  # type: ignore[misc]
            )  # fmt: skip
    if gemm.weight is not None:
        yield Mistake(
            name="weight_of_neighbour", words="the weight of the token's next pair",
            outputs=lambda: {"rows": gemm.finished(gemm.chain(), given.weights.roll(-1, 1).flatten())},  # type: ignore[union-attr]
        )  # fmt: skip
