"""The check ``invariance``: a row's bits are its own, whichever rows it is called with.

Rows are called alone; in batches of several sizes, at their start, in their middle and at their
end; in the reverse order and turned round; as a batch of nothing but copies of one row, which puts
it at every place of a tile and gives its experts as many rows; beside rows of NaN, of infinities
and of the largest numbers.  Every row is compared with its own bits in the whole case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.calling.run import Ran, run
from moe_parity.harness.cases.sequences import EDGES
from moe_parity.harness.checks.compare import Difference, differences, where
from moe_parity.harness.checks.flow import BROKEN, not_comparable, raised
from moe_parity.harness.checks.memory import UNSTABLE
from moe_parity.harness.checks.verdict import Verdict, caused, found
from moe_parity.harness.diagnosis.cause import Cause, CauseKind
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, Check
from moe_parity.references.language.stage import Subset

DEPENDS = "depends_on_other_rows"
SPOILERS = {
    "NaN": float("nan"), "infinities": float("inf"), "the largest numbers": torch.finfo().max,
}  # fmt: skip
"""What the other rows are made of: words, and the number."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some units of a case, in some order and company."""

    words: str
    """How they are called, in words that follow ``other bits``."""
    part: Subset
    clean: Mapping[str, Tensor] | None = None
    """Output -> which of the whole case's rows are to be compared, int64; None for all."""


def invariance(kernel: Kernel, case: Case, device: str, inputs: Any = None) -> Iterator[Verdict]:
    """Yield the verdict of all batches of a case: red with the first row whose bits change.

    A part of a case is compared where the kernel takes it and follows the same recipe on it.
    """
    stage = kernel.stage
    made = stage.inputs(case, device) if inputs is None else inputs
    if stage.units(made) < 2:
        reason = "the case has no rows that can be called alone"
        yield Verdict(check=Check.INVARIANCE, verdict="skip", reason=reason)
        return
    compared = wrong = 0
    reason, first = "", None
    try:
        whole = run(kernel, case, made)
        for batch in batches(kernel, case, made):
            refusal = not_comparable(kernel, case, batch.part.case, device)
            if refusal:
                reason = reason or refusal
                continue
            every = against(kernel, batch, run(kernel, batch.part.case, batch.part.inputs), whole)
            compared += sum(d.of for d, _ in every)
            wrong += sum(d.wrong for d, _ in every)
            bad = next(((batch, d, row) for d, row in every if d.wrong), None)
            first = first or bad
        unstable = first is not None and _unstable(kernel, case, made, whole, first[0])
    except BROKEN as error:
        yield raised(kernel, case, error, Check.INVARIANCE)
        return
    if not compared:
        reason = reason or "no part of the case can be compared"
        yield Verdict(check=Check.INVARIANCE, verdict="skip", reason=reason)
    elif first is None:
        yield found(Check.INVARIANCE, "", compared=compared)
    else:
        yield _red(kernel, case, made, first, unstable=unstable, compared=compared, wrong=wrong)


def _red(
    kernel: Kernel,
    case: Case,
    inputs: Any,
    first: tuple[Batch, Difference, int],
    *,
    unstable: bool,
    compared: int,
    wrong: int,
) -> Verdict:
    batch, bad, row = first
    place = where(inputs, bad.output, (row, *bad.index[1:]))
    if unstable:
        again = "not_repeatable"
        text = f"{kernel.stage} of {kernel.name} {UNSTABLE[again]} of {case.id}: {bad.words}."
        cause = Cause(kind=CauseKind.MEMORY, name=again, words=UNSTABLE[again])
    else:
        text = (
            f"{kernel.stage} of {kernel.name}: {place} has other bits {batch.words}: {bad.got}, "
            f"among all of {case.id} {bad.want}; {bad.words}."
        )
        cause = Cause(kind=CauseKind.BATCH, name=DEPENDS, words=text, where=batch.words)
    return caused(found(Check.INVARIANCE, text, compared=compared, differing=wrong), cause)


def against(kernel: Kernel, batch: Batch, ran: Ran, whole: Ran) -> list[tuple[Difference, int]]:
    """Return how the rows of a batch differ from the same ones of the whole case.

    With each difference comes the row, of the whole, of its first mismatch.
    """
    stage, part = kernel.stage, batch.part
    outputs = stage.outputs(part.case, part.inputs)
    live = dict(stage.live(part.case, part.inputs))
    names = [name for name in part.rows if name in ran.outputs and name in whole.outputs]
    for name, rows in (batch.clean or {}).items():
        mask = torch.isin(part.rows[name], rows)
        live[name] = mask & live[name] if name in live else mask
    got = {name: ran.outputs[name] for name in names}
    want = {name: whole.outputs[name][part.rows[name]] for name in names}
    every = differences(outputs, got, want, live)
    return [(d, int(part.rows[d.name][d.index[0]]) if d.wrong else 0) for d in every]


def _unstable(kernel: Kernel, case: Case, inputs: Any, whole: Ran, batch: Batch) -> bool:
    """Whether the case itself, called again, has other bits: then no other row is to blame."""
    outputs, live = kernel.stage.outputs(case, inputs), kernel.stage.live(case, inputs)
    run(kernel, batch.part.case, batch.part.inputs)
    # twice, for what changes at every second call
    twice = [run(kernel, case, inputs) for _ in range(2)]
    return any(
        d.wrong for again in twice for d in differences(outputs, again.outputs, whole.outputs, live)
    )


# --- which rows, in which order -----------------------------------------------------------------


def batches(kernel: Kernel, case: Case, inputs: Any) -> Iterator[Batch]:
    """Yield batches of a case's units, those that tell most for their cost first."""
    stage = kernel.stage
    count, on = stage.units(inputs), stage.handed(inputs)[0].device
    every = torch.arange(count, device=on)
    middle = count // 2

    def chosen(words: str, units: Tensor) -> Batch:
        return Batch(words=words, part=stage.some(case, inputs, units.to(on)))

    for unit in dict.fromkeys((0, middle, count - 1)):
        yield chosen("alone", every[unit : unit + 1])
    odd = stage.some(case, inputs, every[1::2]).rows
    for words, value in SPOILERS.items():
        spoiled = stage.spoiled(inputs, every[::2], value)
        if spoiled is not None:
            part = stage.some(case, spoiled, every)
            yield Batch(words=f"beside rows of {words}", part=part, clean=odd)
    yield chosen(f"in the reverse order of {count}", every.flip(0))
    yield chosen(f"in an order turned by {middle} of {count}", every.roll(middle))
    yield chosen(f"in a batch of {count} copies", every[middle : middle + 1].repeat(count))
    # the same company in another order is another batch: drawn once, cut at every edge
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(case.seed)).to(on)
    for size in sorted(edge for edge in EDGES if 1 < edge < count):
        others = drawn[drawn != middle][: size - 1]
        at = (0, size // 2, size - 1)[size % 3]
        place = ("first", "in the middle", "last")[size % 3]
        units = torch.cat([others[:at], every[middle : middle + 1], others[at:]])
        yield chosen(f"in a batch of {size}, unit {middle} {place}", units)
