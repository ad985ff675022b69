"""How far two recipes are apart over a whole layer, split by decision, in BF16 ulp.

For claims such as "bitwise at one token, else within one BF16 ulp".  An ulp is that of the expected
value, or of the outputs' root mean square where the value is smaller: near zero a plain ulp would
call nothing large.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.harness.checks.compare import comparable
from moe_parity.references.arithmetic.formats import to_f32
from moe_parity.references.language import Case, Recipe
from moe_parity.references.stages import LAYER
from moe_parity.references.stages.layer.reference import layer


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How many BF16 outputs differ, of how many, and by how much."""

    changed: str
    """The decisions that were changed."""
    differing: int
    outputs: int
    max_ulp: float
    over_one_ulp: int


def between(left: Tensor, right: Tensor, changed: str) -> Distance:
    """Compare two BF16 outputs, finite ones; ``right`` is what is expected."""
    got, want = to_f32(left).double(), to_f32(right).double()
    size = torch.maximum(want.abs(), want.square().mean().sqrt())
    unit = torch.exp2(torch.floor(torch.log2(size)) - 7)
    ulp = (got - want).abs() / unit
    return Distance(
        changed=changed,
        differing=int((comparable(left) != comparable(right)).sum()),
        outputs=ulp.numel(),
        max_ulp=float(ulp.max()) if ulp.numel() else 0.0,
        over_one_ulp=int((ulp > 1).sum()),
    )


def split(case: Case, base: Recipe, other: Recipe) -> Iterator[Distance]:
    """Yield the distance of each changed decision alone, then of all together."""
    inputs = LAYER.inputs(case)

    def output(recipe: Recipe) -> Tensor:
        return layer(inputs, recipe).out

    start = output(base)
    for changed, recipe in _single_changes(base, other):
        yield between(output(recipe), start, changed)
    yield between(output(other), start, "all of them")


def _single_changes(base: Recipe, other: Recipe) -> Iterator[tuple[str, Recipe]]:
    wanted = {f"{name}={option}" for name, _, option in base.changes(other, LAYER.acting)}
    for label, recipe in base.neighbours(LAYER.acting):
        if label in wanted:
            yield label, recipe
