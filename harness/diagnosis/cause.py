"""A cause as data: what reports group by, and the words that begin a sentence."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum


class CauseKind(StrEnum):
    """What sort of thing made a check red."""

    DECISION = "decision"
    """One rounding or two, or all those of another named recipe: the name says which options."""
    MISTAKE = "mistake"
    """A mistake of the catalogue (docs/mistakes.md)."""
    MEMORY = "memory"
    """What was left unwritten, read before it was written, written beside, or raced for."""
    CALL = "call"
    """The call itself: it raised, hung, or took its process down."""
    BATCH = "batch"
    """A row's bits depend on the other rows."""
    STATE = "state"
    """What an earlier call left behind, or a later one takes away."""
    PATTERN = "pattern"
    """Nothing known: what differs is described."""


SAID = 2
"""Alternatives that a sentence says; the record has all of them."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a check is red."""

    kind: CauseKind
    name: str
    """``quant.apply=divide``, ``k_tail``, ``unwritten``: short, the same for the same cause."""
    words: str
    """In words that begin a sentence and go on with ``in <stage> of <kernel>``."""
    others: tuple[str, ...] = ()
    """The names of what explains the same bits as well."""
    others_words: tuple[str, ...] = ()
    """The same in words."""
    where: str = ""
    """Where it acts, if not everywhere: ``for expert 3``."""

    def among(self, others: tuple[Cause, ...]) -> Cause:
        """Return the cause with others that explain the same bits; none has its own name."""
        return dataclasses.replace(
            self,
            others=tuple(dict.fromkeys(c.name for c in others if c.name != self.name)),
            others_words=tuple(dict.fromkeys(c.words for c in others)),
        )

    @property
    def phrase(self) -> str:
        """The words with the alternatives: ``A, or B``."""
        own = self.words + (f" {self.where}" if self.where else "")
        more = len(self.others_words) - SAID
        tail = (f"{more} more",) if more > 0 else ()
        said = (own, *self.others_words[:SAID], *tail)
        # words that end in a clause end with a comma of their own
        return ", or ".join((*(words.rstrip(",") for words in said[:-1]), said[-1]))


def opened(text: str) -> str:
    """Return words as the beginning of a sentence; the name of a decision keeps its letters."""
    first = text.split(" ", 1)[0]
    return text if "=" in first or "." in first else text[:1].upper() + text[1:]
