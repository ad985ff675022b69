"""The check ``invariance``: a row's bits are its own, whichever rows it is called with.

Rows are called alone; in batches of several sizes, at their start, in their middle and at their
end; in the reverse order and turned round; as a batch of nothing but copies of one row, which puts
it at every place of a tile and gives its experts as many rows; beside rows of NaN, of infinities
and of the largest numbers.  Every row is compared with its own bits in the whole case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_parity.harness.calling.run import Ran, run
from moe_parity.harness.cases.sequences import EDGES
from moe_parity.harness.checks.calls import Player, cloned
from moe_parity.harness.checks.compare import Difference, differences, where
from moe_parity.harness.checks.culprit import Fresh, fresh_of
from moe_parity.harness.checks.flow import BROKEN, not_comparable, raised
from moe_parity.harness.checks.memory import UNSTABLE
from moe_parity.harness.checks.sequence import LEAKS, call_id
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


def invariance(
    kernel: Kernel, case: Case, device: str, inputs: Any = None, fresh: Fresh | None = None
) -> Iterator[Verdict]:
    """Yield the verdict of all batches of a case: red with the first row whose bits change.

    A part of a case is compared where the kernel takes it and follows the same recipe on it.
    ``fresh`` plays calls in a state that no call has touched: it is asked where what an earlier
    call left may be to blame.
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
            ran = run(kernel, batch.part.case, batch.part.inputs)
            every = against(kernel, batch, ran, whole)
            compared += sum(d.of for d, _ in every)
            wrong += sum(d.wrong for d, _ in every)
            bad = next((Changed(batch, ran, d, row) for d, row in every if d.wrong), None)
            first = first or bad
        verdict = first and _red(
            kernel, case, made, whole, first, fresh or fresh_of(kernel, device)
        )
    except BROKEN as error:
        yield raised(kernel, case, error, Check.INVARIANCE)
        return
    if verdict is not None:
        yield dataclasses.replace(verdict, compared=compared, differing=wrong)
    elif compared:
        yield found(Check.INVARIANCE, "", compared=compared)
    else:
        reason = reason or "no part of the case can be compared"
        yield Verdict(check=Check.INVARIANCE, verdict="skip", reason=reason)


class Changed(NamedTuple):
    """A row that has other bits in a batch."""

    batch: Batch
    ran: Ran
    how: Difference
    row: int
    """Its number in the whole case."""


def _red(
    kernel: Kernel, case: Case, inputs: Any, whole: Ran, first: Changed, fresh: Fresh
) -> Verdict:
    """Return the verdict of a row that changes: other rows are to blame, or an earlier call."""
    batch, bad, who = first.batch, first.how, f"{kernel.stage} of {kernel.name}"
    other = dataclasses.replace(case, seed=case.seed + 1)
    device = str(kernel.stage.handed(inputs)[0].device.type)
    calls = [case, other, case]
    number = Player(kernel, device).play(calls)
    if number > 1 and not any(fresh([[calls[number - 1]]])):
        text = (
            f"{who} gives other bits on {call_id(kernel, calls[number - 1])} after "
            f"{call_id(kernel, calls[number - 2])}: rows cannot be compared; alone it is right."
        )
        ids = tuple(call_id(kernel, called) for called in calls[:number])
        verdict = dataclasses.replace(found(Check.INVARIANCE, text), sequence=ids)
        return caused(verdict, LEAKS)
    if _unstable(kernel, case, inputs, whole, first):
        again = "not_repeatable"
        text = f"{who} {UNSTABLE[again]} of {case.id}: {bad.words}."
        cause = Cause(kind=CauseKind.MEMORY, name=again, words=UNSTABLE[again])
        return caused(found(Check.INVARIANCE, text), cause)
    place = where(inputs, bad.output, (first.row, *bad.index[1:]))
    text = (
        f"{who}: {place} has other bits {batch.words}: {bad.got}, among all of {case.id} "
        f"{bad.want}; {bad.words}."
    )
    cause = Cause(kind=CauseKind.BATCH, name=DEPENDS, words=text, where=batch.words)
    return caused(found(Check.INVARIANCE, text), cause)


def _unstable(kernel: Kernel, case: Case, inputs: Any, whole: Ran, first: Changed) -> bool:
    """Whether the case or the batch, called again in other memory, has other bits than before."""
    part = first.batch.part
    # the whole twice, for what changes at every second call
    every = [(case, inputs, whole), (case, inputs, whole), (part.case, part.inputs, first.ran)]
    for asked, given, before in every:
        again = run(kernel, asked, cloned(given))
        outputs, live = kernel.stage.outputs(asked, given), kernel.stage.live(asked, given)
        if any(d.wrong for d in differences(outputs, again.outputs, before.outputs, live)):
            return True
    return False


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
