"""Mistakes of a grouped GEMM's scales: those of a neighbour, none, transposed, rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK, round_bf16
from moe_parity.references.arithmetic.rounding import mul_rn
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes import routing
from moe_parity.references.stages.mistakes.anywhere import Make, reread, shifts, stored_as
from moe_parity.references.stages.mistakes.gemm_steps import Gemm
from moe_parity.references.stages.mistakes.geometry import extremes

ENDS = (("first", 0), ("last", -1))


TILES = (16, 32, 64)
"""Rows of an expert that are computed together."""


def of_scales(gemm: Gemm, *, gated: bool) -> Iterator[Mistake]:
    """Yield what may be wrong with the scales of a GEMM."""
    a, w = gemm.inputs.a_scale, gemm.inputs.w_scale
    of_weights = {wrong[:2]: wrong[2] for wrong in extremes("operands", w, nan=False)}
    for name, words, other in extremes("operands", a, nan=False):
        if (name, words) in of_weights:  # what reads a scale wrongly does so on either side
            both = gemm.scaled(a_scale=other, w_scale=of_weights[name, words])
            yield Mistake(name=name, words=words, outputs=both)
    yield from _of_operand("activations", a, lambda scale: gemm.scaled(a_scale=scale), alone=False)
    yield from _of_operand("weights", w, lambda scale: gemm.scaled(w_scale=scale), alone=True)
    yield Mistake(
        name="scale_lost", words="no scales at all",
        outputs=gemm.scaled(torch.ones_like(a), torch.ones_like(w)),
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
    for words, at in ENDS:
        yield Mistake(
            name="scale_of_another_expert",
            words=f"the weights' scales of the {words} expert for all",
            outputs=gemm.scaled(w_scale=_of_one(w, 0, at)),
        )
        yield Mistake(
            name="scale_of_one_block",
            words=f"the weights' scale of the {words} 128 columns for all",
            outputs=gemm.scaled(w_scale=_of_one(w, 1, at)),
        )
    for side, moved, _ in shifts(a, 0):
        yield Mistake(
            name="scale_of_another_row", words=f"the activations' scales of the {side} row",
            outputs=gemm.scaled(a_scale=moved), local=False,
        )  # fmt: skip

    yield from _of_both(gemm)
    yield from _of_columns(gemm, gated=gated)
    yield from _of_rows(gemm)


def _of_both(gemm: Gemm) -> Iterator[Mistake]:
    """Yield blocks of K that have the scales of others, of both operands alike."""
    a, w = gemm.inputs.a_scale, gemm.inputs.w_scale
    block = torch.arange(a.shape[1], device=a.device)
    for count in (2, 4):
        index = block // count * count
        yield Mistake(
            name="scale_of_the_first",
            words=f"one scale of each operand for {count} blocks of K, that of the first,",
            outputs=gemm.scaled(a.index_select(1, index), w.index_select(2, index)),
        )

    def at_the_end(at: int) -> Tensor:
        scale = mul_rn(
            a[gemm.inputs.source, at, None],
            w[gemm.inputs.expert.clamp(min=0), :, at]
            .repeat_interleave(BLOCK, 1)[:, : gemm.inputs.w.shape[1]],
        )  # fmt: skip
        return mul_rn(gemm.chain(a_scale=torch.ones_like(a), w_scale=torch.ones_like(w)), scale)

    for words, at in ENDS:
        yield Mistake(
            name="scale_of_one_block",
            words=f"both operands' scales of the {words} block for all of K",
            outputs=gemm.scaled(_of_one(a, 1, at), _of_one(w, 2, at)),
        )
        yield Mistake(
            name="scale_at_the_end",
            words=f"all of K added unscaled, and the scales of the {words} block applied last",
            outputs=partial(gemm.made, partial(at_the_end, at)),
        )


def _of_columns(gemm: Gemm, *, gated: bool) -> Iterator[Mistake]:
    """Yield columns with the weights' scales of another block of columns."""
    n, last = gemm.inputs.w.shape[1], gemm.inputs.w_scale.shape[1] - 1
    column = torch.arange(n, device=gemm.inputs.w.device)
    yield Mistake(
        name="scale_of_64_columns", words="the weights' scales of a block counted in 64 columns",
        outputs=gemm.scaled(columns=(column // 64).clamp(max=last)),
    )  # fmt: skip
    if not gated or n % 2:
        return
    swapped = (column + n // 2) % n
    yield Mistake(
        name="gate_scales_for_up", words="the weights' scales of the gate for up too",
        outputs=gemm.scaled(columns=column % (n // 2) // BLOCK),
    )  # fmt: skip
    yield Mistake(
        name="gate_up_scales_swapped", words="the weights' scales of gate and up swapped",
        outputs=gemm.scaled(columns=swapped // BLOCK),
    )  # fmt: skip
    yield Mistake(
        name="gate_up_codes_swapped",
        words="the weights' codes of gate and up swapped, not their scales,",
        outputs=partial(gemm.made, lambda: gemm.chain(columns=swapped // BLOCK)[:, swapped]),
    )


def _of_rows(gemm: Gemm) -> Iterator[Mistake]:
    """Yield rows with the activations' scales of another row."""
    given = gemm.inputs
    tokens, (_, k) = given.a.shape[0], given.ids.shape
    pair = torch.arange(given.expert.numel(), device=given.a.device)
    rows: list[tuple[str, str, Tensor]] = []
    if given.top_k > 1:
        rows = [
            ("pair_for_token", "the activations' scales at a pair's number, up to the last,",
             pair.clamp(max=tokens - 1)),
            ("pair_for_token", "the activations' scales at a pair's number", pair % tokens),
        ]  # fmt: skip
    elif k > 1:
        rows = [("token_for_pair", "the activations' scales at a pair's token", pair // k)]
    for tile in TILES:
        first, before = routing.in_tiles(given.expert, tile)
        rows += [
            ("scale_of_another_row",
             f"the activations' scales of the first of every {tile} rows of an expert",
             given.source[first]),
            ("scale_of_another_row",
             f"the activations' scales of the row of an expert that is {tile} before",
             given.source[before]),
        ]  # fmt: skip
    for name, words, other in rows:
        if bool((other != given.source)[given.expert >= 0].any()):
            yield Mistake(name=name, words=words, outputs=gemm.scaled(rows=other), local=False)


def _of_operand(
    noun: str, scale: Tensor, by: Callable[[Tensor], Make], *, alone: bool
) -> Iterator[Mistake]:
    """Yield what may be wrong with the scales of one operand.

    ``by`` gives the rows by other scales; ``alone``: a row keeps its scales when it is called
    alone, because they are not its own.
    """
    dim = scale.dim() - 1
    for side, moved, inside in shifts(scale, dim):
        yield Mistake(
            name="scale_of_neighbour", words=f"the {noun}' scale of the {side} block of K",
            outputs=by(moved), local=inside or alone,
        )  # fmt: skip
    block = torch.arange(scale.shape[dim], device=scale.device)
    for count in (2, 4):
        yield Mistake(
            name="scale_of_the_first",
            words=f"one scale of the {noun} for {count} blocks of K, that of the first,",
            outputs=by(scale.index_select(dim, block // count * count)),
        )
        yield Mistake(
            name="scale_of_the_first",
            words=f"the {noun}' scales of a block of K that is {count} times too small",
            outputs=by(scale.index_select(dim, block // count)),
        )
    for words, at in ENDS:
        yield Mistake(
            name="scale_of_one_block",
            words=f"the {noun}' scale of the {words} block for all of K",
            outputs=by(_of_one(scale, dim, at)),
        )
    ways = (
        ("scale_lost", f"no scales of the {noun}", torch.ones_like(scale)),
        ("scale_twice", f"the {noun}' scales applied twice", mul_rn(scale, scale)),
        ("scale_inverted", f"values divided by the scales of the {noun}", 1.0 / scale),
    )
    for name, words, other in ways:
        yield Mistake(name=name, words=words, outputs=by(other))
    for way, memory in ((reread, "row-major"), (stored_as, "column-major")):
        yield Mistake(
            name="transposed_scales", words=f"transposed scales of the {noun} ({memory} memory)",
            outputs=by(way(scale)), local=alone,
        )  # fmt: skip
    power = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    ways = (
        ("scale_rounded", f"the {noun}' scales rounded to BF16", round_bf16(scale)),
        ("scale_power", f"the exponent of the {noun}' scales alone", power),
        ("k_reversed", f"the {noun}' scales of K from the end", scale.flip(dim)),
    )
    for name, words, other in (*ways, *extremes(noun, scale, nan=not alone)):
        yield Mistake(name=name, words=words, outputs=by(other))


def _of_one(scale: Tensor, dim: int, at: int) -> Tensor:
    """Return scales that are those at one index of a dimension everywhere."""
    return scale.select(dim, at).unsqueeze(dim).expand(scale.shape).contiguous()
