"""`parity repro`: one kernel, one case or several calls, every check, printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moe_parity.harness.checks.calls import Player
from moe_parity.harness.checks.configs import chosen_by
from moe_parity.harness.checks.flow import check, first_line
from moe_parity.harness.checks.invariance import invariance
from moe_parity.harness.checks.promises import served
from moe_parity.harness.checks.sequence import fault_of, verdicts
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.session import environment
from moe_parity.kernels import Kernel, find, load_file
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Check, parse_id


def run(
    ids: Sequence[str], seed: int, device: str | None = None, files: Iterable[str] = (),
    only: str | None = None, config: str | None = None,
) -> int:  # fmt: skip
    """Run the checks of ``<kernel>-<case id>`` and print a line for each; return 0 or 1.

    Several ids are calls of one kernel, in one process and in this order, with a line for each
    call.  ``@<seed>`` behind an id replaces the seed; ``files`` are kernel files to load first;
    ``only`` is ``invariance`` for that check alone; ``config`` is the configuration to take, by
    its name, or its number counted from 0.  Raises ParityError for an id that is not
    understood, an unknown kernel, a case that the kernel does not take here, or several kernels.
    """
    for file in files:
        load_file(file)
    read = [parse_id(text, seed) for text in ids]
    names = {name for name, _ in read}
    if len(names) > 1:
        raise ParityError(
            f"calls of several kernels, {' and '.join(sorted(names))}: the calls of a sequence "
            "are those of one kernel."
        )
    if only is not None and len(read) > 1:
        raise ParityError(f"--check {only} is about one case, got {len(read)} ids.")
    kernel, cases = find(read[0][0]), [case for _, case in read]
    device = device or ("cuda" if environment.gpu() else "cpu")
    for case in cases:
        reason = kernel.why_not(case, device)
        if reason:
            raise ParityError(f"{kernel.name} does not take {case.id} here: {reason}")
    try:
        red = 0
        with chosen_by(kernel, cases[0], device, config):
            for verdict in _verdicts(kernel, cases, device, only):
                red += verdict.failed
                detail = verdict.message or verdict.reason or f"{verdict.compared} outputs compared"
                if verdict.could_show:
                    detail += f", {verdict.could_show} could have been red"
                print(f"{verdict.verdict:4}  {verdict.check:18}  {detail}")
    except (RuntimeError, MemoryError, OverflowError) as error:
        text = f"{type(error).__name__}: {first_line(error)}"
        raise ParityError(f"{' '.join(ids)} cannot be run: {text}") from None
    return 1 if red else 0


def _verdicts(
    kernel: Kernel, cases: list[Case], device: str, only: str | None
) -> Iterator[Verdict]:
    if only == Check.INVARIANCE:
        yield from invariance(kernel, cases[0], device)
    elif len(cases) == 1:
        yield from check(kernel, cases[0], device, power=True)
        yield from served(kernel, cases[0], device)
    else:
        player = Player(kernel, device)
        for case in cases:
            called = player.call(case)
            word = "fail" if called.bad else "skip" if called.ran is None else "pass"
            detail = fault_of(called) if called.bad else f"{called.compared} outputs compared"
            detail = "refused" if word == "skip" else detail
            print(f"{word:4}  call {called.number:<13}  {case.id}@{case.seed}: {detail}")
            if called.error is not None:
                break
        # this process has called nothing before: which of the calls are needed was found already
        yield from verdicts(kernel, player, None)
