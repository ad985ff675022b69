"""The check ``sequence``: the calls before a call, and after it, change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from moe_parity.harness.checks.calls import Called, Player
from moe_parity.harness.checks.culprit import Fresh, fresh_of, smallest
from moe_parity.harness.checks.exact import NO_ROUNDING, exact
from moe_parity.harness.checks.flow import first_line, raised
from moe_parity.harness.checks.judged import Judged
from moe_parity.harness.checks.verdict import Verdict, caused, found
from moe_parity.harness.diagnosis.cause import Cause, CauseKind
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, Check, Hazard

LEAKS = Cause(
    kind=CauseKind.STATE, name="leaks_state", words="what an earlier call left behind is used"
)
WORKSPACE = Cause(
    kind=CauseKind.STATE, name="returns_workspace", words="a result lies in memory of later calls"
)


def call_id(kernel: Kernel, case: Case) -> str:
    """Return what `parity repro` takes for a call: ``<kernel>-<case id>@<seed>``."""
    return f"{kernel.name}-{case.id}@{case.seed}"


def sequence(
    kernel: Kernel, cases: Sequence[Case], device: str, fresh: Fresh | None = None
) -> Iterator[Verdict]:
    """Call a kernel on some cases of its stage, one after the other, and yield what is wrong.

    Every call has the bits of its recipe, a case that comes again those of its first call, and
    what a call has returned is the same after all others.  A kernel may refuse a case.  ``fresh``
    plays calls in a state that no call has touched; left out, that is a process of its own.  One
    verdict where nothing is wrong.
    """
    player = Player(kernel, device)
    if device == "cuda":  # where memory is real, one such case takes up to 17 GiB, and all are kept
        cases = [case for case in cases if case.hazard is not Hazard.FAR]
    for case in cases:
        if player.call(case).error is not None:
            break  # what it has left behind is anything
    yield from verdicts(kernel, player, fresh or fresh_of(kernel, device))


def verdicts(kernel: Kernel, player: Player, fresh: Fresh | None) -> Iterator[Verdict]:
    """Yield what is wrong with the calls that were played, or that nothing is.

    Without ``fresh`` all calls up to the bad one are to blame.
    """
    ran = [called for called in player.calls if called.ran is not None]
    counts = {"compared": sum(called.compared for called in ran)}
    bad = next((called for called in player.calls if called.bad), None)
    taken = next((called for called in ran if called.taken), None)
    if bad is not None:
        yield _of_bits(kernel, player, bad, fresh, counts)
    if taken is not None:
        yield _of_results(kernel, player, taken, counts)
    if bad is None and taken is None and len(ran) < 2:
        reason = "the kernel takes no two cases of the sequence"
        yield Verdict(check=Check.SEQUENCE, verdict="skip", reason=reason)
    elif bad is None and taken is None:
        yield found(Check.SEQUENCE, "", **counts)


def _of_bits(
    kernel: Kernel, player: Player, bad: Called, fresh: Fresh | None, counts: dict[str, Any]
) -> Verdict:
    """Return the verdict of a bad call: what is wrong, and which earlier call it comes from."""
    calls = player.calls[: bad.number]
    numbers = list(range(len(calls)))
    if fresh is not None:
        numbers = smallest(fresh, [called.case for called in calls])
    if numbers == [len(calls) - 1]:
        if bad.wrong or bad.error is not None:
            return _alone(kernel, bad, player.device, counts)
        numbers = []  # it follows one recipe now and another one then
    chosen = [calls[n] for n in numbers] or calls
    # another process may see an earlier call go wrong: what is said is what was seen in this one
    last = chosen[-1] if chosen[-1].bad else bad
    before = " and ".join(_said(kernel, called) for called in chosen[:-1])
    how = "." if fresh is None else "; alone it is right."
    if not numbers:
        before = "the calls before it"
        how = "; in a process of their own these calls are right: it comes from calls before them."
    text = (
        f"{kernel.stage} of {kernel.name} {'fails' if last.error else 'gives other bits'} in "
        f"{_said(kernel, last)} after {before}: {fault_of(last)}{how}"
    )
    wrong = sum(d.wrong for d in last.wrong or last.moved)
    verdict = dataclasses.replace(
        found(Check.SEQUENCE, text, **counts, differing=wrong or 1),
        recipe=last.recipe.name if last.recipe is not None else "",
        sequence=tuple(call_id(kernel, called.case) for called in chosen),
    )
    return caused(verdict, LEAKS)


def _alone(kernel: Kernel, bad: Called, device: str, counts: dict[str, Any]) -> Verdict:
    """Return the verdict of a call that no earlier one is to blame for: why it is wrong."""
    ids = (call_id(kernel, bad.case),)
    if bad.ran is None:
        assert bad.error is not None
        verdict = raised(kernel, bad.case, bad.error, Check.SEQUENCE)
        return dataclasses.replace(verdict, sequence=ids)
    stage, got = kernel.stage, bad.ran.outputs
    seen = {list(got)[-1]: list(got.values())[-1]} if stage.partial else got
    judged = Judged(
        who=kernel.name, stage=stage, case=bad.case, inputs=stage.inputs(bad.case, device),
        got=seen, guess=kernel.guess,
    )  # fmt: skip
    recipes = kernel.recipes(bad.case, device)
    verdict = exact(judged, recipes, check=Check.SEQUENCE, power=False)
    return dataclasses.replace(verdict, sequence=ids, compared=counts["compared"])


def _of_results(kernel: Kernel, player: Player, taken: Called, counts: dict[str, Any]) -> Verdict:
    """Return the verdict of a result that a later call has overwritten."""
    by = player.calls[taken.taken_by - 1]
    chosen = [taken, by]
    again = Player(kernel, player.device)
    for called in chosen:
        again.call(called.case)
    if not again.calls[0].taken:  # a ring of workspaces comes round after some calls
        chosen = player.calls[taken.number - 1 : by.number]
    text = (
        f"{kernel.stage} of {kernel.name} returns memory that a later call writes to: the result "
        f"of {_said(kernel, taken)} is changed by {_said(kernel, by)}: {taken.taken}."
    )
    verdict = dataclasses.replace(
        found(Check.SEQUENCE, text, **counts),
        sequence=tuple(call_id(kernel, called.case) for called in chosen),
    )
    return caused(verdict, WORKSPACE)


def _said(kernel: Kernel, called: Called) -> str:
    return f"call {called.number} ({call_id(kernel, called.case)})"


def fault_of(called: Called) -> str:
    """Return what is wrong with a call, in words."""
    if called.error is not None:
        return f"{type(called.error).__name__}: {first_line(called.error)}"
    every = called.wrong or called.moved
    first = every[0]
    named = f" of {first.name}" if len(called.outputs) > 1 else ""
    recipe = called.recipe.name if called.recipe is not None else NO_ROUNDING
    by = "" if recipe == NO_ROUNDING else f" by recipe {recipe}"
    if not called.wrong:
        by = " as in its first call"
    text = f"at {called.place}{named} got {first.got}, expected {first.want}{by}"
    equals = f", the bits of call {called.equals}" if called.equals else ""
    return f"{text}; {', '.join(d.words for d in every)}{equals}"


__all__ = ["LEAKS", "WORKSPACE", "call_id", "fault_of", "sequence", "verdicts"]
