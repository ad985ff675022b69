"""Which configuration of a kernel a call takes: the first by default, another one inside a context.

A kernel has the configurations that it registered, and those of the autotuners that it launches;
the second are known once it has run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Choice:
    """What is chosen, and what there was to choose from."""

    registered: str | None = None
    """The name of a registered configuration; None for the first."""
    tuned: int | None = None
    """The place of an autotuner's configuration, counted from 0; None for what is usual."""
    met: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Autotuned kernel -> its configurations in words, in order: of the launches so far."""


_choice: ContextVar[Choice | None] = ContextVar("choice", default=None)


def chosen() -> Choice | None:
    """Return the choice that is in force, or None."""
    return _choice.get()


@contextmanager
def choosing(registered: str | None = None, tuned: int | None = None) -> Iterator[Choice]:
    """Make a choice for the calls inside; several autotuners take it modulo their numbers."""
    choice = Choice(registered=registered, tuned=tuned)
    token = _choice.set(choice)
    try:
        yield choice
    finally:
        _choice.reset(token)


def configured(tuned: int) -> object:
    """Return a context in which every autotuned launch takes its configuration of this number."""
    return choosing(tuned=tuned)
