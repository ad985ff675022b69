"""How far two layers lie apart, and which single decision of one accounts for how much of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.harness.checks.compare import comparable, ordered
from moe_parity.harness.diagnosis.chains import Chain
from moe_parity.references.language import Recipe
from moe_parity.references.stages import LAYER


@dataclass(frozen=True, kw_only=True)
class Split:
    """What a layer's output has in other bits than a recipe."""

    of: int
    """Outputs compared."""
    ulps: dict[int, int]
    """Distance in values of the format -> outputs that lie so far apart, those that are equal
    aside; -1 for a NaN on one side alone."""
    by_decision: dict[str, int]
    """One decision changed -> the differing outputs that have the changed recipe's bits."""
    left: int
    """Differing outputs that no single decision's change gives."""

    @property
    def differing(self) -> int:
        """Outputs that differ."""
        return sum(self.ulps.values())

    @property
    def words(self) -> str:
        """Return the whole in one line."""
        if not self.ulps:
            return f"0 of {self.of} outputs differ"
        far = ", ".join(
            f"{count} by {'a NaN' if ulp < 0 else f'{ulp} ulp'}"
            for ulp, count in sorted(self.ulps.items())
        )
        why = ", ".join(f"{label} {n}" for label, n in self.by_decision.items() if n)
        return (
            f"{self.differing} of {self.of} outputs differ ({far}); of them one decision gives: "
            f"{why or 'none'}; no single one {self.left}"
        )


def split(chain: Chain, recipe: Recipe, got: Tensor, toward: Recipe | None = None) -> Split:
    """Return how bf16 ``got`` [M, H] differs from a recipe on a chain's inputs, by decision.

    ``toward`` keeps to decisions in which another recipe differs, changed as it has them.
    """
    want = chain.trace(recipe)["out"]
    left, right = comparable(got), comparable(want)
    bad = left != right
    explained = torch.zeros_like(bad)
    by_decision = {}
    for label, changed in LAYER.neighbours(recipe):
        if toward is not None and not _nearer(changed, recipe, toward):
            continue
        hit = bad & (comparable(chain.trace(changed)["out"]) == left)
        by_decision[label] = int(hit.sum())
        explained |= hit
    lone = bad & (torch.isnan(got) != torch.isnan(want))
    apart = (ordered(left[bad & ~lone], 16) - ordered(right[bad & ~lone], 16)).abs()
    ulps = Counter(int(n) for n in apart.tolist())
    if bool(lone.any()):
        ulps[-1] = int(lone.sum())
    return Split(
        of=bad.numel(), ulps=dict(ulps), by_decision=by_decision, left=int((bad & ~explained).sum())
    )


def _nearer(changed: Recipe, recipe: Recipe, toward: Recipe) -> bool:
    """Whether what was changed is now as ``toward`` has it."""
    return all(
        getattr(changed.parts[part], name) == getattr(toward.parts[part], name)
        for part in LAYER.acting
        for name in vars(changed.parts[part])
        if getattr(changed.parts[part], name) != getattr(recipe.parts[part], name)
    )
