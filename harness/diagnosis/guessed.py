"""The recipe of a kernel whose version is not known, where no near one explains its bits.

Its recipe is that of the nearest known version, which is a guess: that it is refuted says less than
what the kernel computes instead, so every recipe there could be is tried, as ``parity identify``
does.
"""

from __future__ import annotations

from moe_parity.harness.checks.judged import Judged
from moe_parity.harness.diagnosis.cause import Cause, CauseKind
from moe_parity.harness.diagnosis.identify import Probe, Seen, explaining
from moe_parity.references.language import Recipe


def identified(judged: Judged, recipe: Recipe) -> Cause | None:
    """Return the decisions in which the kernel differs from ``recipe``; None where none explain.

    Of the recipes that give every bit the one with the fewest changes.
    """
    stage = judged.stage
    if stage.partial:
        return None  # a layer has thousands of recipes: ``parity identify`` tries them
    seen = Seen(Probe(stage=stage, case=judged.case, inputs=judged.inputs), judged.got)
    changes = [recipe.changes(other, stage.acting) for other in explaining([seen])]
    fewest = min(filter(None, changes), key=len, default=None)
    if fewest is None:
        return None
    return Cause(
        kind=CauseKind.DECISION, name=" and ".join(f"{n}={b.value}" for n, _, b in fewest),
        words=" and ".join(f"{n}={b.value} instead of {a.value}" for n, a, b in fewest),
    )  # fmt: skip
