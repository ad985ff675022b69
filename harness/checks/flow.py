"""The one flow of checks, for a kernel of any stage.

Every check of a kernel's contract starts from the same call and gives one verdict.  Zero tolerance:
the recipe is known, so every bit is.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.calling.canonical import BadOutput
from moe_parity.harness.calling.poison import POISONS
from moe_parity.harness.calling.run import Ran, other_order, run
from moe_parity.harness.checks import memory as memories
from moe_parity.harness.checks.compare import differences, where
from moe_parity.harness.checks.exact import every_stage, exact
from moe_parity.harness.checks.judged import Judged
from moe_parity.harness.checks.memory import Memory
from moe_parity.harness.checks.verdict import Verdict, caused, found
from moe_parity.harness.diagnosis.cause import Cause, CauseKind, opened
from moe_parity.harness.session import watch
from moe_parity.kernels import Kernel
from moe_parity.kernels.call import BadCall, CannotCall
from moe_parity.kernels.faults import MemoryFault
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Check, Recipe
from moe_parity.references.language.stage import Kind, Subset

BROKEN = (Exception, SystemExit)
"""What a kernel raises to be red; an interrupt and pytest's own outcomes pass through."""


NOT_DISPATCHED = ("0 active drivers", "cannot be accessed from Triton (cpu tensor?)")
"""What Triton says of a launch on CPU tensors, without a GPU and with one."""


def check(
    kernel: Kernel, case: Case, device: str, *, inputs: Any = None, power: bool = False
) -> Iterator[Verdict]:
    """Yield the verdict of every check in the kernel's contract.

    ``inputs`` replace those that the stage makes of the case; ``power`` counts the outputs that
    could have been red, at the cost of one reference a mutant.  A kernel that raises has failed; it
    may refuse input that lies in memory in another way than by default, with a ParityError.
    """
    try:
        made = kernel.stage.inputs(case, device) if inputs is None else inputs
    except torch.OutOfMemoryError as error:
        # others use the GPU as well
        reason = f"the GPU has no room for the inputs: {first_line(error)}"
        yield Verdict(check=Check.EXACT, verdict="skip", reason=reason)
        return
    try:
        kernel.supports(case, device)
        kernel.recipes(case, device)
    except BROKEN as error:
        yield raised(kernel, case, error)
        return
    try:
        ran = run(kernel, case, made)
    except BROKEN as error:
        refusal = isinstance(error, ParityError) and not isinstance(error, BadCall)
        if refusal and kernel.stage.may_be_refused(case):
            reason = f"refused: {first_line(error)}"
            yield Verdict(check=Check.EXACT, verdict="skip", reason=reason)
        else:
            verdict = raised(kernel, case, error)
            yield _by_memory(verdict, kernel, case, device, made, POISONS[0], error)
        return
    again: Memory | Verdict | None = None
    if kernel.contract.checks & {Check.WRITE_SET, Check.RERUN}:
        again = _again(kernel, case, device, made, ran)
    wrong = False
    for verdict in _exact(kernel, case, device, made, ran, power=power, again=again):
        wrong |= verdict.failed
        yield verdict
    yield from _others(kernel, case, device, made, ran, again, whole_is_right=not wrong)


def bits(kernel: Kernel, case: Case, device: str, inputs: Any = None) -> Verdict:
    """Call a kernel on a case and return the verdict of its bits alone, of the last output.

    Everything else of the contract is what ``check`` is for, at the cost of more calls.
    """
    made = kernel.stage.inputs(case, device) if inputs is None else inputs
    try:
        recipes = kernel.recipes(case, device)
        ran = run(kernel, case, made)
    except BROKEN as error:
        refusal = isinstance(error, ParityError) and not isinstance(error, BadCall)
        if refusal and kernel.stage.may_be_refused(case):
            return Verdict(
                check=Check.EXACT, verdict="skip", reason=f"refused: {first_line(error)}"
            )
        return raised(kernel, case, error)
    got = ran.outputs
    seen = {list(got)[-1]: list(got.values())[-1]} if kernel.stage.partial else got
    judged = Judged(
        who=kernel.name, stage=kernel.stage, case=case, inputs=made, got=seen, guess=kernel.guess
    )
    return exact(judged, recipes, check=Check.EXACT, power=False)


def _again(kernel: Kernel, case: Case, device: str, inputs: Any, ran: Ran) -> Memory | Verdict:
    """Call a second time: on other memory, and on the virtual GPU in another order of programs."""
    try:
        with other_order(kernel, case, device):
            second = run(kernel, case, inputs, poison=POISONS[1])
        return memories.memory(kernel, case, inputs, device, ran, second)
    except BROKEN as error:
        verdict = raised(kernel, case, error, Check.RERUN)
        return _by_memory(verdict, kernel, case, device, inputs, POISONS[1], error)


def _by_memory(
    verdict: Verdict, kernel: Kernel, case: Case, device: str, inputs: Any, poison: int,
    error: BaseException,
) -> Verdict:  # fmt: skip
    """Return a verdict of a call that failed; where memory decides that it does, with that cause.

    On a GPU nothing is called again after an error, which may have taken the device with it.
    """
    known = isinstance(error, ParityError | BadOutput)
    if known or verdict.cause_kind == CauseKind.MEMORY or kernel.runs_on(device) != "cpu":
        return verdict
    if not memories.fails_on(kernel, case, inputs, device, poison):
        return verdict
    words = f"{memories.FAILS}: {first_line(error)}"
    message = f"{verdict.message}. It {memories.FAILS}; on other contents it does not."
    cause = Cause(kind=CauseKind.MEMORY, name="poison_read", words=words)
    return caused(_with(verdict, message=message), cause)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def raised(kernel: Kernel, case: Case, error: BaseException, name: str = Check.EXACT) -> Verdict:
    """Return the red verdict of a kernel that raised; a skip where it finds it cannot be called."""
    if isinstance(error, CannotCall):
        return Verdict(check=name, verdict="skip", reason=first_line(error))
    if isinstance(error, MemoryFault):
        words, text = error.name.replace("_", " "), first_line(error)
        whole = f"{opened(words)} in {kernel.stage} of {kernel.name} on {case.id}: {text}"
        cause = Cause(kind=CauseKind.MEMORY, name=error.name, words=words)
        return caused(found(name, whole), cause)
    text, place = first_line(error), ""
    if not isinstance(error, BadOutput):
        text = f"{type(error).__name__}: {text}"
        place = _place(kernel, error)
    if any(words in text for words in NOT_DISPATCHED):
        place += (
            ": a Triton kernel was launched as kernel[grid](...) on CPU tensors; launch it with "
            "moe_parity.kernels.virtual_gpu.dispatch(kernel, grid, ...), and register it with "
            "triton=True"
        )
    verdict = found(name, f"{kernel.stage} of {kernel.name} fails on {case.id}: {text}{place}")
    what = "bad_output" if isinstance(error, BadOutput) else type(error).__name__
    return caused(verdict, Cause(kind=CauseKind.CALL, name=what, words=text))


def overran(kernel: Kernel, case: Case, seconds: float, error: BaseException) -> Verdict:
    """Return the red verdict of a case that took too long, with the line where it was stopped."""
    verdict = found(
        Check.EXACT,
        f"{kernel.stage} of {kernel.name} ran longer than the limit of {seconds:g} s on {case.id}"
        f"{_place(kernel, error)}: it hangs, or needs more than --timeout allows.",
    )
    return caused(verdict, Cause(kind=CauseKind.CALL, name="timeout", words="it hangs"))


def _place(kernel: Kernel, error: BaseException) -> str:
    """Return the file and line of the kernel that an exception came from, else of the innermost."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if frame.filename == str(kernel.source)]
    frames = [frame for frame in frames if frame.filename != watch.__file__]
    return "".join(
        f" ({frame.filename.rsplit('/', 1)[-1]}, line {frame.lineno})"
        for frame in (own or frames)[-1:]
    )


def _exact(
    kernel: Kernel,
    case: Case,
    device: str,
    inputs: Any,
    ran: Ran,
    *,
    power: bool,
    again: Memory | Verdict | None,
) -> Iterator[Verdict]:
    """Judge the stages inside, each on the kernel's own upstream tensors, then the whole."""
    cause, settled = (again.cause, again.settled) if isinstance(again, Memory) else (None, False)
    judged = Judged(
        who=kernel.name, stage=kernel.stage, case=case, inputs=inputs, got=ran.outputs,
        settled=settled, guess=kernel.guess,
    )  # fmt: skip
    yield from every_stage(judged, kernel.recipes(case, device), power=power, cause=cause)


def _with(verdict: Verdict, **changes: Any) -> Verdict:
    return Verdict(**{**verdict.fields(), **changes})


def _others(
    kernel: Kernel,
    case: Case,
    device: str,
    inputs: Any,
    ran: Ran,
    again: Memory | Verdict | None,
    *,
    whole_is_right: bool,
) -> Iterator[Verdict]:
    checks = kernel.contract.checks
    cause = again.cause if isinstance(again, Memory) else None
    if Check.INPUT_KEPT in checks:
        fault = "" if ran.input_kept else f"{kernel.stage} of {kernel.name} writes to its input."
        compared = sum(t.numel() for t in kernel.stage.handed(inputs))
        yield found(Check.INPUT_KEPT, fault, compared=compared)
    if Check.FINITE in checks:
        verdict = finite(kernel, case, inputs, ran, kernel.recipes(case, device))
        yield caused(verdict, cause) if verdict.failed and cause is not None else verdict
    if isinstance(again, Verdict):
        yield again
    elif again is not None:
        if Check.WRITE_SET in checks:
            yield write_set(kernel, ran, again)
        if Check.RERUN in checks:
            yield rerun(kernel, again)
    if Check.ROW_SUBSET in checks:
        verdict = row_subset(kernel, case, device, inputs, ran, whole_is_right=whole_is_right)
        # what memory held explains that as well
        yield caused(verdict, cause) if verdict.failed and cause is not None else verdict


def finite(
    kernel: Kernel, case: Case, inputs: Any, ran: Ran, recipes: tuple[Recipe, ...]
) -> Verdict:
    """Every live output is finite where the reference is, by any of the recipes it may follow."""
    stage = kernel.stage
    wanted = [stage.reference(case, inputs, recipe) for recipe in recipes]
    names, outputs = " or ".join(r.name for r in recipes), stage.outputs(case, inputs)
    live = stage.live(case, inputs)
    compared = wrong = 0
    fault = ""
    for name, got in ran.outputs.items():
        output = outputs[name]
        if output.kind is Kind.INTEGERS:
            continue
        broken = output.codes.is_nan if output.kind is Kind.CODES else _not_finite
        bad = broken(got)
        for want in wanted:
            bad &= ~broken(want[name])
        if name in live:
            bad &= live[name].view(-1, *[1] * (bad.dim() - 1))
        compared += bad.numel()
        if bool(bad.any()):
            wrong += int(bad.sum())
            place = where(inputs, output, tuple(int(n) for n in bad.nonzero()[0]))
            fault = fault or (
                f"{stage} of {kernel.name} is not finite at {place} of {name}, where recipe "
                f"{names} is"
            )
    if all(output.kind is Kind.INTEGERS for output in outputs.values()):
        return Verdict(check=Check.FINITE, verdict="skip", reason="integers are all finite")
    text = f"{fault}; {wrong} outputs in all." if fault else ""
    return found(Check.FINITE, text, recipe=recipes[0].name, compared=compared, differing=wrong)


def _not_finite(values: Tensor) -> Tensor:
    return ~torch.isfinite(values)


def write_set(kernel: Kernel, ran: Ran, again: Memory) -> Verdict:
    """All that is owned is written, and nothing beside it: guards, stride gaps, padding."""
    if not ran.memory and not ran.guarded:
        reason = "the kernel takes no memory that is not written at once"
        return Verdict(check=Check.WRITE_SET, verdict="skip", reason=reason)
    compared = sum(output.storage.numel() for output in ran.memory) + ran.guarded
    return _of_memory(kernel, Check.WRITE_SET, again.left or again.hit, compared=compared)


def rerun(kernel: Kernel, again: Memory) -> Verdict:
    """Demand the same canonical bits on other memory."""
    counts = {"compared": again.compared, "differing": again.differing}
    return _of_memory(kernel, Check.RERUN, again.moved, **counts)


def _of_memory(kernel: Kernel, name: Check, cause: Cause | None, **counts: int) -> Verdict:
    if cause is None:
        return found(name, "", **counts)
    return caused(found(name, f"{kernel.stage} of {kernel.name} {cause.words}.", **counts), cause)


def row_subset(
    kernel: Kernel, case: Case, device: str, inputs: Any, ran: Ran, *, whole_is_right: bool
) -> Verdict:
    """Demand that some rows, called alone, keep their bits.

    Where the whole has the recipe's bits the rows alone have not, and why is looked for there: a
    kernel that is wrong for 3 rows is wrong for 3 of 7.
    """
    compared = wrong = 0
    text = reason = ""
    why: Verdict | None = None
    for part in kernel.stage.subsets(case, inputs):
        reason = not_comparable(kernel, case, part.case, device)
        if reason:
            break
        try:
            alone = run(kernel, part.case, part.inputs)
        except BROKEN as error:
            return raised(kernel, part.case, error, Check.ROW_SUBSET)
        total, bad, fault = _against_whole(kernel, part, alone, ran)
        if fault and not text and whole_is_right:
            why = _why_alone(kernel, part, device, alone)
        compared, wrong, text = compared + total, wrong + bad, text or fault
    if not compared:
        reason = reason or "the case has no proper subset of rows"
        return Verdict(check=Check.ROW_SUBSET, verdict="skip", reason=reason)
    verdict = found(Check.ROW_SUBSET, text, compared=compared, differing=wrong)
    if not verdict.failed:
        return verdict
    if why is not None:
        return _with(
            verdict, message=f"{why.message} Seen in rows alone: {text}",
            cause_kind=why.cause_kind, cause=why.cause, alternatives=why.alternatives,
        )  # fmt: skip
    return caused(verdict, Cause(kind=CauseKind.BATCH, name="depends_on_other_rows", words=text))


def _why_alone(kernel: Kernel, part: Subset, device: str, alone: Ran) -> Verdict | None:
    """Return the red verdict of a call of some rows that says why, or None where none does."""
    again = _again(kernel, part.case, device, part.inputs, alone)
    known = CauseKind.DECISION, CauseKind.MISTAKE, CauseKind.MEMORY
    every = _exact(kernel, part.case, device, part.inputs, alone, power=False, again=again)
    return next((v for v in every if v.failed and v.cause_kind in known), None)


def not_comparable(kernel: Kernel, case: Case, part: Case, device: str) -> str:
    """Return why the rows of a case and of a part of it need not have the same bits, or nothing."""
    refusal = kernel.declines(part, device)
    if refusal is not None:
        return f"the kernel does not take the rows alone: {refusal}"
    if kernel.recipes(part, device) != kernel.recipes(case, device):
        return "the recipe changes with the number of rows"
    return ""


def _against_whole(kernel: Kernel, part: Subset, alone: Ran, whole: Ran) -> tuple[int, int, str]:
    stage = kernel.stage
    names = [name for name in part.rows if name in alone.outputs and name in whole.outputs]
    got = {name: alone.outputs[name] for name in names}
    want = {name: whole.outputs[name][part.rows[name]] for name in names}
    outputs = stage.outputs(part.case, part.inputs)
    every = differences(outputs, got, want, stage.live(part.case, part.inputs))
    bad = next((d for d in every if d.wrong), None)
    fault = ""
    if bad is not None:
        fault = (
            f"{stage} of {kernel.name}: the rows alone give other bits at "
            f"{where(part.inputs, bad.output, bad.index)} of {part.case.id}: {bad.got}, among the "
            f"others {bad.want}; {bad.words}."
        )
    return sum(d.of for d in every), sum(d.wrong for d in every), fault
