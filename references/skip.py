"""Why something does not run, as a value: a kind that the harness decides by, and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Why(StrEnum):
    """The kinds of reasons."""

    UNSUPPORTED = "unsupported"
    """The kernel does not take such a case."""
    ABSENT = "absent"
    """A package or a file is not there."""
    NEEDS_GPU = "needs_gpu"
    """There is no GPU here."""
    NEEDS_CHIP = "needs_chip"
    """There is a GPU, of a chip that has no model or no such kernel."""
    BUDGET = "budget"
    """It would take a CPU too long."""
    GIVEN_UP = "given_up"
    """The kernel has hung or crashed too often in this run."""


@dataclass(frozen=True)
class Skip:
    """A reason; the sentence is for people only."""

    why: Why
    sentence: str

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence

    @classmethod
    def of(cls, answer: Skip | str | None, why: Why = Why.UNSUPPORTED) -> Skip | None:
        """Return an answer as a reason; a bare sentence is of the kind ``why``."""
        if answer is None or isinstance(answer, Skip):
            return answer
        if not isinstance(answer, str) or not answer:
            raise TypeError(f"a reason is a sentence, or None for none; got {answer!r}.")
        return cls(why, answer)
