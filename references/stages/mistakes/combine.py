"""Mistakes of the top-k sum: weights, pairs, the order and the accumulator."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK, round_bf16, to_f32
from moe_parity.references.arithmetic.rounding import add_rn, fma_rn, mul_rn
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes import routing
from moe_parity.references.stages.mistakes.anywhere import (
    Change,
    Make,
    contiguous_reading,
    lost,
    round_f16,
    rounded,
)
from moe_parity.references.stages.mistakes.geometry import misread

if TYPE_CHECKING:
    from moe_parity.references.stages.combine import ExpertRows

FACTORS = (2.0, 0.5, 2.5, 1.5, 0.25, 4.0, 8.0, 0.125)
"""What a sum may be multiplied by once too often: routed_scaling_factor, 1 / k."""

ONES = 8
"""Experts, or k, up to which each is tried alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sum:
    """A top-k sum that may go wrong."""

    inputs: ExpertRows
    weighted: bool
    """Whether the recipe applies weights here."""
    ascending: bool
    fused: bool
    reference: Callable[[ExpertRows], Tensor]
    cast: Change
    """fp32 -> the output's type."""
    some: Callable[[ExpertRows, Tensor], ExpertRows]
    """(inputs, some tokens int64 [T]) -> the inputs of those alone."""

    def of(self, **changes: Any) -> Make:
        """Return what gives the sums of other inputs."""
        return lambda: {"out": self.reference(dataclasses.replace(self.inputs, **changes))}

    def total(
        self,
        *,
        order: list[int] | None = None,
        weights: Tensor | None = None,
        owned: Tensor | None = None,
        product: Change | None = None,
        step: Change = lambda t: t,
    ) -> Tensor:
        """Return fp32 sums [M, H] with other steps; ``product`` rounds each weighted row."""
        rows, own = self.inputs.rows, self.owned if owned is None else owned
        tokens, k, columns = rows.shape
        slots = list(range(k)) if self.ascending else list(range(k))[::-1]
        total = torch.zeros((tokens, columns), device=rows.device)
        given = self.inputs.weights if weights is None else weights
        for slot in slots if order is None else order:
            row = to_f32(rows[:, slot])
            if given is None or not (self.weighted or weights is not None):
                added = add_rn(total, product(row) if product else row)
            elif self.fused and product is None:
                added = fma_rn(given[:, slot, None].expand_as(row), row, total)
            else:
                made = mul_rn(given[:, slot, None], row)
                added = add_rn(total, product(made) if product else made)
            total = torch.where(own[:, slot, None], step(added), total)
        return total

    def given(self, total: Callable[[], Tensor]) -> Make:
        """Return what gives the outputs of fp32 sums."""
        return lambda: {"out": self.cast(total())}

    @property
    def owned(self) -> Tensor:
        """Which pairs are owned, bool [M, k]."""
        return self.expert >= 0

    @property
    def expert(self) -> Tensor:
        """The local expert of each pair, int64 [M, k]."""
        return self.inputs.expert.view(self.inputs.ids.shape)


def mistakes(summing: Sum) -> Iterator[Mistake]:
    """Yield what a top-k sum may do wrong."""
    yield from _of_weights(summing)
    yield from _of_pairs(summing)
    yield from _of_sums(summing)
    nouns = {"rows": "rows", "ids": "ids"} | ({"weights": "weights"} if summing.weighted else {})
    yield from misread(
        summing.inputs, lambda given: {"out": summing.reference(given)}, nouns, known=("rows",),
        some=summing.some,
    )  # fmt: skip
    yield from lost(summing.of())


def _of_weights(summing: Sum) -> Iterator[Mistake]:
    weights = summing.inputs.weights
    if weights is None:
        return
    if not summing.weighted:
        yield Mistake(
            name="weights_here", words="routing weights applied in the sum, where rows have them,",
            outputs=summing.given(partial(summing.total, weights=weights)),
        )  # fmt: skip
        return
    owned = summing.owned
    share = torch.where(owned, weights, 0.0).sum(1, keepdim=True)
    ids, k = summing.inputs.ids.long(), weights.shape[1]
    of_experts, order = weights.gather(1, ids.clamp(0, k - 1)), ids.argsort(dim=1, stable=True)
    mean = torch.full_like(weights, 1.0 / weights.shape[1])
    alone: list[tuple[str, str, Tensor]] = [
        ("weights_lost", "no routing weights", torch.ones_like(weights)),
        ("weights_squared", "the square of the routing weights", mul_rn(weights, weights)),
        ("weights_normalized", "routing weights divided by their sum",
         weights / weights.sum(1, keepdim=True)),
        ("weights_normalized", "routing weights divided by the sum of those owned",
         weights / share),
        ("weights_normalized", "routing weights divided by their sum, then rounded to BF16,",
         round_bf16(weights / weights.sum(1, keepdim=True))),
        ("weights_normalized", "routing weights divided by their sum, times 2.5,",
         weights / weights.sum(1, keepdim=True) * 2.5),
        ("weights_softmax", "the softmax of the routing weights", weights.softmax(1)),
        ("weights_rounded", "routing weights rounded to BF16", round_bf16(weights)),
        ("weights_rounded", "routing weights rounded to FP16", round_f16(weights)),
        ("weights_mean", "the mean of the rows", mean),
        ("weight_of_neighbour", "the weight of the token's next pair", weights.roll(-1, 1)),
        ("weight_of_neighbour", "the weight of the token's previous pair", weights.roll(1, 1)),
        ("weight_of_neighbour", "a token's weights from the last k to the first", weights.flip(1)),
        ("weight_of_neighbour", "the weight of the first pair for all of a token",
         weights[:, :1].expand(weights.shape)),
        ("weights_of_experts", "the weight at the expert's number", of_experts),
        ("weights_of_experts", "the weight at the expert's number modulo k",
         weights.gather(1, ids.clamp(min=0) % k)),
        ("weights_sorted", "the weights sorted by expert, the rows not,",
         weights.gather(1, order)),
        ("weights_sorted", "the rows' weights taken as if they were sorted by expert",
         torch.empty_like(weights).scatter(1, order, weights)),
    ]  # fmt: skip
    slots, expert = torch.arange(k, device=weights.device), summing.expert
    alone += [
        ("weight_lost", f"a weight of 1 for k {slot}", torch.where(slots == slot, 1.0, weights))
        for slot in range(min(k, ONES))
    ]
    if summing.inputs.experts <= ONES:
        alone += [
            ("weight_lost", f"a weight of 1 for expert {one}",
             torch.where(expert == one, 1.0, weights))
            for one in range(summing.inputs.experts)
        ]  # fmt: skip
    together: list[tuple[str, str, Tensor]] = [
        ("weight_of_another_token", "the weights of the next token", weights.roll(-1, 0)),
        ("weight_of_another_token", "the weights of the previous token", weights.roll(1, 0)),
        ("weight_of_another_token", "the first token's weights for all",
         weights[:1].expand(weights.shape)),
        ("weights_transposed", "the weights of a [k, M] tensor",
         weights.t().reshape(weights.shape)),
        ("weights_transposed", "the weights taken from [k, M] memory",
         weights.reshape(weights.shape[::-1]).t()),
    ]  # fmt: skip
    for local, many in ((True, alone), (False, together)):
        for name, words, other in many:
            yield Mistake(
                name=name, words=words, local=local,
                outputs=summing.of(weights=other.contiguous()),
            )  # fmt: skip


def _of_pairs(summing: Sum) -> Iterator[Mistake]:
    given = summing.inputs
    owned, (tokens, k) = summing.owned, given.ids.shape
    last, first = owned.clone(), owned.clone()
    last[:, -1], first[:, 0] = False, False
    only = torch.zeros_like(owned)
    only[:, 0] = owned[:, 0]
    second = routing.second_ones(given.ids, owned.flatten()).view(owned.shape)
    once_more = routing.second_ones(given.ids.flip(1), owned.flip(1).flatten())
    expert, local = summing.expert, (given.ids >= 0) & (given.ids < given.experts)
    past = given.ids >= given.first + given.experts
    masks: list[tuple[str, str, Tensor]] = [
        ("pair_lost", "the last pair of each token left out", last),
        ("pair_lost", "the first pair of each token left out", first),
        ("pair_lost", "all but the first pair of each token left out", only),
        ("duplicate_lost", "a token's second pair with the same expert left out", owned & ~second),
        ("duplicate_lost", "all but a token's last pair with the same expert left out",
         owned & ~once_more.view(owned.shape).flip(1)),
        ("rank_ignored", "global ids taken for local ones", local),
        ("foreign_pair", "pairs added that nobody owns", torch.ones_like(owned)),
        ("foreign_pair", "pairs added whose id is negative", owned | (given.ids < 0)),
        ("foreign_pair", "pairs added whose id lies past the last expert", owned | past),
        ("last_expert_lost", "pairs of the last expert left out",
         owned & (expert != given.experts - 1)),
        ("first_expert_lost", "pairs of expert 0 left out", owned & (expert != 0)),
    ]  # fmt: skip
    slot = torch.arange(k, device=owned.device)
    masks += [
        ("pair_lost", f"all but the first {count} pairs of each token left out",
         owned & (slot < count))
        for count in (2, 4, 8, 16)
    ]  # fmt: skip
    masks += [
        (name, words, owned & ~mask.view(owned.shape))
        for name, words, mask in routing.past_of_expert(given.expert)
    ]
    masks += [
        ("expert_lost", f"the pairs of experts from {power} on left out", owned & (expert < power))
        for power in routing.powers_below(given.experts)
        if power > ONES
    ]
    if given.experts <= ONES:
        masks += [
            ("expert_lost", f"the pairs of expert {one} left out", owned & (expert != one))
            for one in range(1, given.experts - 1)
        ]
    for name, words, mask in masks:
        if bool((mask != owned).any()):
            other = torch.where(mask.flatten(), given.expert.clamp(min=0), -1)
            yield Mistake(name=name, words=words, outputs=summing.of(expert=other))
    rows = given.rows
    moves = (
        ("rows_transposed", "rows taken from [k, M] memory",
         rows.reshape(k, tokens, rows.shape[2]).transpose(0, 1)),
        ("rows_transposed", "rows of a [k, M] tensor", rows.transpose(0, 1).reshape(rows.shape)),
        ("row_of_neighbour", "the rows of the next token", rows.roll(-1, 0)),
        ("row_of_neighbour", "the rows of the previous token", rows.roll(1, 0)),
        ("row_of_neighbour", "the row of the token's next pair", rows.roll(-1, 1)),
        ("row_of_neighbour", "the row of the token's previous pair", rows.roll(1, 1)),
        ("one_row", "the token's first row for all of its pairs", rows[:, :1].expand(rows.shape)),
    )  # fmt: skip
    for name, words, moved in moves:
        yield Mistake(
            name=name, words=words, outputs=summing.of(rows=moved.contiguous()), local=False
        )
    flat = contiguous_reading(rows)
    if flat is not None:
        yield Mistake(
            name="row_stride", words="rows read with H as their stride", local=False,
            outputs=summing.of(rows=flat),
        )  # fmt: skip


def _of_sums(summing: Sum) -> Iterator[Mistake]:
    narrow: tuple[tuple[str, Change], ...] = (("BF16", round_bf16), ("FP16", round_f16))
    for noun, way in narrow:
        yield Mistake(
            name="narrow_accumulator", words=f"the sum rounded to {noun} after each row",
            outputs=summing.given(partial(summing.total, step=way)),
        )  # fmt: skip
        yield Mistake(
            name="narrow_product", words=f"each weighted row rounded to {noun}",
            outputs=summing.given(partial(summing.total, product=way)),
        )  # fmt: skip
        yield Mistake(
            name="narrow_accumulator", words=f"each weighted row and the sum rounded to {noun}",
            outputs=summing.given(partial(summing.total, product=way, step=way)),
        )  # fmt: skip
    _tokens, k, columns = summing.inputs.rows.shape
    other = list(range(k))[:: -1 if summing.ascending else 1]
    for product, noun in ((None, "the sum"), (round_bf16, "each weighted row and the sum")):
        yield Mistake(
            name="narrow_accumulator",
            words=f"rows added in the other order of k, and {noun} rounded to BF16",
            outputs=summing.given(
                partial(summing.total, order=other, product=product, step=round_bf16)
            ),
        )
    yield from _of_order(summing)
    for factor in FACTORS:
        yield Mistake(
            name="factor", words=f"the sum times {factor:g}",
            outputs=summing.given(partial(_times, summing, factor)),
        )  # fmt: skip
        if math.frexp(factor)[0] != 0.5:
            yield Mistake(
                name="factor", words=f"the sum times {factor:g} after its rounding to BF16",
                outputs=summing.given(partial(_times_late, summing, factor)),
            )  # fmt: skip
    if columns >= 2 * BLOCK:
        yield Mistake(
            name="column_of_neighbour",
            words="the last 128 columns taken from the block before",
            outputs=summing.given(lambda: _last_block_again(summing.total())),
        )
    yield Mistake(
        name="mean",
        words="the sum divided by k",
        outputs=summing.given(lambda: summing.total() / k),
    )
    if summing.cast(torch.zeros(1)).dtype is torch.bfloat16:
        yield from rounded(summing.total, lambda out: {"out": out})
    else:
        yield Mistake(
            name="through_bf16", words="the sum rounded to BF16 on the way",
            outputs=summing.given(lambda: round_bf16(summing.total())),
        )  # fmt: skip


def _times(summing: Sum, factor: float) -> Tensor:
    return summing.total() * factor


def _times_late(summing: Sum, factor: float) -> Tensor:
    return round_bf16(summing.total()) * factor


def _last_block_again(total: Tensor) -> Tensor:
    return torch.cat([total[:, :-BLOCK], total[:, -2 * BLOCK : -BLOCK]], 1)


def _of_order(summing: Sum) -> Iterator[Mistake]:
    k = summing.inputs.ids.shape[1]
    if k <= 2:
        return
    evens = [*range(0, k, 2), *range(1, k, 2)]
    orders: tuple[tuple[str, Callable[[], Tensor]], ...] = (
        ("even k added before odd ones", partial(summing.total, order=evens)),
        ("rows added in pairs, then the pairs,", partial(_tree, summing)),
        ("rows added by the number of their expert", partial(_by_expert, summing)),
    )
    for words, total in orders:
        yield Mistake(name="sum_order", words=words, outputs=summing.given(total))


def _weighted(summing: Sum) -> list[Tensor]:
    rows, weights = summing.inputs.rows, summing.inputs.weights
    found = []
    for slot in range(rows.shape[1]):
        row = to_f32(rows[:, slot])
        if weights is not None and summing.weighted:
            row = mul_rn(weights[:, slot, None], row)
        found.append(torch.where(summing.owned[:, slot, None], row, torch.zeros_like(row)))
    return found


def _tree(summing: Sum) -> Tensor:
    level = _weighted(summing)
    while len(level) > 1:
        pairs = [add_rn(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def _by_expert(summing: Sum) -> Tensor:
    order = summing.inputs.ids.long().argsort(dim=1, stable=True)
    given = summing.inputs
    index = order[:, :, None].expand(-1, -1, given.rows.shape[2])
    sorted_inputs = dataclasses.replace(
        given, rows=given.rows.gather(1, index),
        weights=None if given.weights is None else given.weights.gather(1, order),
        expert=given.expert.view(given.ids.shape).gather(1, order).flatten(),
    )  # fmt: skip
    return dataclasses.replace(summing, inputs=sorted_inputs, ascending=True).total()
