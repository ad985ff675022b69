"""Mistakes of a grouped GEMM's scales: those of a neighbour, none, transposed, rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import round_bf16
from moe_parity.references.arithmetic.rounding import mul_rn
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import Make, reread, shifts, stored_as
from moe_parity.references.stages.mistakes.gemm_steps import Gemm

ENDS = (("first", 0), ("last", -1))


def of_scales(gemm: Gemm) -> Iterator[Mistake]:
    """Yield what may be wrong with the scales of a GEMM."""
    a, w = gemm.inputs.a_scale, gemm.inputs.w_scale
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
    for name, words, other in ways:
        yield Mistake(name=name, words=words, outputs=by(other))


def _of_one(scale: Tensor, dim: int, at: int) -> Tensor:
    """Return scales that are those at one index of a dimension everywhere."""
    return scale.select(dim, at).unsqueeze(dim).expand(scale.shape).contiguous()
