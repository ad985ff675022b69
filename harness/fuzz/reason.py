"""Why a case is red, short enough to compare: what a failure is told apart by, and shrunk for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_parity.harness.checks.expect import repro
from moe_parity.harness.checks.flow import check, first_line, overran
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.session.watch import Overrun, current
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, parse_id

BROKEN = "cannot_be_judged"
"""The check of a case in which not the kernel but a check raised."""


@dataclass(frozen=True, order=True)
class Reason:
    """What makes two failures the same one: the check, the stage and the name of the cause."""

    check: str
    stage: str
    cause: str

    def __str__(self) -> str:
        """Return it in words: ``quant.apply=divide in act_quant (exact)``."""
        return f"{self.cause or 'differs'} in {self.stage} ({self.check})"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A red check of one case."""

    case: Case
    reason: Reason
    sentence: str
    kind: str = ""
    """The sort of cause (``CauseKind``); empty where there is none, or where a file was read."""
    others: tuple[str, ...] = ()
    """The causes that explain the same bits as well."""
    after: tuple[Case, ...] = ()
    """The calls before it, where it fails only after others."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            **dataclasses.asdict(self.reason),
            "case": self.case.id,
            "seed": self.case.seed,
            "sentence": self.sentence,
            "kind": self.kind,
            "others": list(self.others),
            "after": [[case.id, case.seed] for case in self.after],
        }


def from_json(data: Mapping[str, Any]) -> Failure:
    """Return what ``to_json`` made plain."""
    return Failure(
        case=case_of(data["case"], data["seed"]),
        reason=Reason(data["check"], data["stage"], data["cause"]),
        sentence=data["sentence"],
        kind=data["kind"],
        others=tuple(data["others"]),
        after=tuple(case_of(text, seed) for text, seed in data["after"]),
    )


def case_of(text: str, seed: int) -> Case:
    """Return the case of an id without a kernel; raises ParityError."""
    return parse_id(f"kernel-{text}", seed)[1]


Judge = Callable[[Case], tuple[Failure, ...]]
"""What a case has against a kernel: nothing, or a failure for each reason."""


def judge(kernel: Kernel, case: Case, device: str) -> tuple[Failure, ...]:
    """Run a kernel's contract on a case; return its failures, one for each stage and cause.

    What one cause makes red in several checks is told by the first. The time limit of the watch
    applies to the case.
    """
    watch = current()
    watch.begin(f"fuzz[{kernel.name}-{case.id}]", {"kernel": kernel.name})
    red: list[Verdict] = []
    try:
        with watch.limit():
            watch.case(f"{kernel.name}-{case.id}", repro(kernel, case))
            red = [verdict for verdict in check(kernel, case, device) if verdict.failed]
    except Overrun as error:
        red.append(overran(kernel, case, watch.seconds, error))
    except Exception as error:
        text = f"{type(error).__name__}: {first_line(error)}"
        sentence = f"{kernel.name} cannot be judged on {case.id}: {text}"
        reason = Reason(BROKEN, kernel.stage.name, type(error).__name__)
        return (Failure(case=case, reason=reason, sentence=sentence),)
    finally:
        watch.end()
    return failures_of(kernel, case, red)


def failures_of(kernel: Kernel, case: Case, red: list[Verdict]) -> tuple[Failure, ...]:
    """Return the failures of a case that its red verdicts tell, one for each stage and cause."""
    found: dict[tuple[str, str], Failure] = {}
    for verdict in red:
        stage = verdict.stage or kernel.stage.name
        reason = Reason(verdict.check, stage, verdict.cause)
        failure = Failure(
            case=case,
            reason=reason,
            sentence=verdict.message,
            kind=verdict.cause_kind,
            others=verdict.alternatives,
        )
        found.setdefault((stage, verdict.cause or verdict.check), failure)
    # a whole that is red because of a stage inside says nothing of its own
    own = [f for f in found.values() if f.reason.cause or not f.reason.check.startswith("exact_")]
    return tuple(own or found.values())


def same(reason: Reason, failures: tuple[Failure, ...]) -> Failure | None:
    """Return the failure for a reason among those of a case, None where it has none for it."""
    return next((failure for failure in failures if failure.reason == reason), None)
