"""Mistakes of the grouped GEMMs: K, experts, rows, columns, accumulators, bias and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK, round_bf16
from moe_parity.references.arithmetic.rounding import mul_rn
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Recipe
from moe_parity.references.stages.gemm.decisions import GemmRecipe, half_of
from moe_parity.references.stages.mistakes import routing
from moe_parity.references.stages.mistakes.anywhere import (
    Change,
    Make,
    Outputs,
    contiguous_reading,
    lost,
    round_f16,
    rounded,
    shifts,
    without,
)
from moe_parity.references.stages.mistakes.gemm_scales import of_scales
from moe_parity.references.stages.mistakes.gemm_steps import Gemm
from moe_parity.references.stages.mistakes.gemm_strides import of_strides
from moe_parity.references.stages.mistakes.gemm_weights import of_bias, of_weights
from moe_parity.references.stages.mistakes.geometry import Some, misread

if TYPE_CHECKING:
    from moe_parity.references.stages.gemm.stage import GroupedRows


def mistakes(
    inputs: GroupedRows,
    recipe: Recipe,
    weight: Tensor | None,
    reference: Callable[[GroupedRows], Tensor],
    some: Some,
    *,
    gated: bool,
) -> Iterator[Mistake]:
    """Yield what a grouped GEMM may do wrong.

    ``some`` gives the operands of a few tokens; ``gated``: its columns are gate and up.
    """
    made = Gemm(
        inputs=inputs, recipe=recipe.of("gemm", GemmRecipe), weight=weight, reference=reference
    )
    yield from _of_k(made)
    yield from of_scales(made, gated=gated)
    yield from _of_experts(made)
    yield from _of_columns(made, gated=gated)
    yield from _of_rows(made)
    yield from _of_accumulators(made)
    yield from of_bias(made)
    yield from of_weights(made)
    nouns = READ if weight is not None else {n: w for n, w in READ.items() if n != "weights"}
    widths = {"N": inputs.w.shape[1], "N / 2": inputs.w.shape[1] // 2}

    def give(given: GroupedRows) -> Outputs:
        return {"rows": reference(given)}

    yield from misread(inputs, give, nouns, known=("a",), some=some, widths=widths)
    yield from lost(made.rows(lambda rows: rows))
    yield from of_strides(inputs, give, widths)


READ = {
    "a": "the activations' codes", "a_scale": "the activations' scales",
    "w": "the weights' codes", "w_scale": "the weights' scales", "ids": "ids",
    "weights": "routing weights",
}  # fmt: skip
"""What the inputs of a grouped GEMM are called."""
BLOCKS = 8
"""Blocks of K of which each is tried."""
FACTORS = (0.5, 2.0, 0.25, 4.0, 2.5)
"""What a result may be multiplied by: a format's other bias, routed_scaling_factor."""


# --- K ------------------------------------------------------------------------------------------


def _of_k(gemm: Gemm) -> Iterator[Mistake]:
    a, k = gemm.inputs.a, gemm.inputs.a.shape[1]
    cuts = [(f"the last {n}", k - n, k) for n in (BLOCK, 64, 32, 16)]
    cuts += [
        ("the first 128", 0, BLOCK),
        ("all but the first 128", BLOCK, k),
        ("the second half", k // 2, k),
        ("the first half", 0, k // 2),
    ]
    cuts += [(f"the last {k % n}", k // n * n, k) for n in (256, 512) if k % n]
    cuts += [("the last column", k - 1, k), ("the last two blocks", k - 2 * BLOCK, k)]
    for words, start, stop in cuts:
        if 0 <= start < stop and stop - start < k:
            yield Mistake(
                name="k_tail", words=f"{words} of K left out",
                outputs=gemm.of(a=without(a, (slice(None), slice(start, stop)))),
            )  # fmt: skip
    if k <= BLOCK:
        return
    for first in (0, 1):
        skipped = torch.arange(k, device=a.device) // BLOCK % 2 == first
        yield Mistake(
            name="k_blocks_skipped",
            words=f"every second block of K left out, from block {first} on,",
            outputs=gemm.of(a=without(a, (slice(None), skipped))),
        )
    for block in range(min(-(-k // BLOCK), BLOCKS)):
        for name, words, count in (("lost", "left out", 0), ("twice", "counted twice", 2)):
            yield Mistake(
                name=f"k_block_{name}", words=f"block {block} of K {words}",
                outputs=partial(gemm.made, partial(_counted, gemm, block, count)),
            )  # fmt: skip
    for step, side in ((1, "next"), (-1, "previous")):
        yield Mistake(
            name="k_shifted", words=f"the weights of the {side} block of K",
            outputs=gemm.of(w=gemm.inputs.w.roll(-step * BLOCK, 2)),
        )  # fmt: skip


def _counted(gemm: Gemm, block: int, count: int) -> Tensor:
    """Return accumulators of a K of which one block counts otherwise."""

    def order(starts: list[int]) -> list[int]:
        mine = [start for start in starts if start // BLOCK == block]
        before = [start for start in starts if start // BLOCK < block]
        after = [start for start in starts if start // BLOCK > block]
        return before + mine * count + after

    return gemm.chain(order=order)


# --- experts ------------------------------------------------------------------------------------


def _of_experts(gemm: Gemm) -> Iterator[Mistake]:
    given = gemm.inputs
    experts, owned = given.w.shape[0], given.expert >= 0
    for name, words, expert in routing.wrong_experts(
        given.expert, given.ids, experts, "'s weights"
    ):
        local = name not in ("expert_of_neighbour", "expert_of_tile")
        yield Mistake(name=name, words=words, outputs=gemm.of(expert=expert), local=local)
    for power in routing.powers_below(experts):
        cut = torch.where(owned, given.expert % power, -1)
        if bool((cut != given.expert).any()):
            yield Mistake(
                name="expert_cut", words=f"experts modulo {power}", outputs=gemm.of(expert=cut)
            )
    for side, moved, _ in shifts(given.w, 0):
        yield Mistake(
            name="wrong_expert", words=f"the codes of the {side} expert's weights, its own scales,",
            outputs=gemm.of(w=moved),
        )  # fmt: skip
    for noun, changes in (
        ("weights", {"w": given.w & 0x7F}), ("activations", {"a": given.a & 0x7F})
    ):  # fmt: skip
        yield Mistake(
            name="sign_lost", words=f"{noun} without their sign", outputs=gemm.of(**changes)
        )
    masks = [
        ("duplicate_lost", "a token's second pair with the same expert left at zero",
         routing.second_ones(given.ids, owned)),
        ("pair_lost", "the last pair of each expert left at zero",
         routing.last_of_each(given.expert, experts)),
    ]  # fmt: skip
    masks += [
        ("tile_lost", f"the rows past an expert's last full tile of {tile} left at zero",
         routing.past_full_tiles(given.expert, tile))
        for tile in (16, 32, 64, 128)
    ]  # fmt: skip
    pair = torch.arange(owned.numel(), device=owned.device)
    masks += [
        (name, words.replace("left out", "left at zero"), mask & owned)
        for name, words, mask in routing.past_of_k(pair, given.ids.shape[1])
    ]
    for name, words, mask in masks:
        if bool(mask.any()):
            yield Mistake(
                name=name, words=words, local=False,
                outputs=gemm.rows(partial(without, index=mask)),
            )  # fmt: skip


# --- columns and rows ---------------------------------------------------------------------------


def _of_columns(gemm: Gemm, *, gated: bool) -> Iterator[Mistake]:
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
    for step, side in ((1, "next"), (-1, "previous")):
        orders += [
            ("column_of_neighbour", f"the {side} column in a column's place",
             column.roll(-step)),
            ("column_of_neighbour", f"the {side} 128 columns in the place of others",
             column.roll(-step * BLOCK)),
        ]  # fmt: skip
    for name, words, order in orders:
        yield Mistake(name=name, words=words, outputs=gemm.columns(order))
    for tile in (16, 32, 64, 128):
        if n % tile and n > tile:
            yield Mistake(
                name="last_columns_lost", local=False,
                words=f"the columns past the last full {tile} left at zero",
                outputs=gemm.rows(partial(_cut_columns, kept=n - n % tile)),
            )  # fmt: skip


def _cut_columns(rows: Tensor, *, kept: int) -> Tensor:
    made = rows.clone()
    made[:, kept:] = 0
    return made


def _of_rows(gemm: Gemm) -> Iterator[Mistake]:
    given = gemm.inputs
    tokens = given.a.shape[0]
    for name, words, source in routing.wrong_rows(given.source, tokens, given.ids.shape[1]):
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


def _of_accumulators(gemm: Gemm) -> Iterator[Mistake]:
    def of(chain: Callable[[], Tensor]) -> Make:
        return lambda: {"rows": gemm.finished(chain())}

    narrow: tuple[tuple[str, str, Change], ...] = (
        ("a BF16", "BF16", round_bf16),
        ("an FP16", "FP16", round_f16),
    )
    for article, noun, way in narrow:
        yield Mistake(
            name="narrow_accumulator",
            words=f"{article} accumulator, rounded after each block of K,",
            outputs=of(partial(gemm.chain, total=way)),
        )
        yield Mistake(
            name="narrow_partial", words=f"each block's dot product rounded to {noun}",
            outputs=of(partial(gemm.chain, partial=way)),
        )  # fmt: skip
    yield Mistake(
        name="k_order", words="K added from its end",
        outputs=of(partial(gemm.chain, order=lambda starts: starts[::-1])),
    )  # fmt: skip
    for parts in (2, 4):
        # where K has halves of whole blocks, two parts are an option of the decision
        if parts > 2 or half_of(gemm.inputs.a.shape[1]) is None:
            yield Mistake(
                name="split_k", words=f"K cut into {parts} parts that are added last",
                outputs=of(partial(gemm.chain, parts=parts)),
            )  # fmt: skip
        yield Mistake(
            name="split_k", words=f"K cut into {parts} parts that are rounded to BF16 and added",
            outputs=of(partial(gemm.chain, parts=parts, of_part=round_bf16)),
        )  # fmt: skip
    for factor in FACTORS:
        yield Mistake(
            name="factor", words=f"the result times {factor:g}",
            outputs=of(partial(_times, gemm, factor)),
        )  # fmt: skip
    if gemm.inputs.bias is None:
        weight = gemm.weight

        def exact() -> Tensor:
            acc = gemm.chain()
            return acc if weight is None else mul_rn(acc, weight[:, None])

        yield from rounded(exact, lambda rows: {"rows": rows})


def _times(gemm: Gemm, factor: float) -> Tensor:
    return gemm.chain() * factor
