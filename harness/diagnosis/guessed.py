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
    probe = Probe(stage=stage, case=judged.case, inputs=judged.inputs)
    # decisions that the case does not ask for have an option, but nobody's
    asked = {decision.name for _, _, decision in probe.fields}
    changes = [
        [change for change in recipe.changes(other, stage.acting) if bare(change[0]) in asked]
        for other in explaining([Seen(probe, judged.got)])
    ]
    fewest = min(filter(None, changes), key=len, default=None)
    if fewest is None:
        return None
    return Cause(
        kind=CauseKind.DECISION, name=" and ".join(f"{n}={b.value}" for n, _, b in fewest),
        words=" and ".join(f"{n}={b.value} instead of {a.value}" for n, a, b in fewest),
    )  # fmt: skip


def bare(label: str) -> str:
    """Return the decision of a label, without the part that it belongs to."""
    return label.rpartition(": ")[2]
