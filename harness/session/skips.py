"""Skips of tests with a typed reason: the session decides by the kind, people read the sentence."""

from __future__ import annotations

from typing import NoReturn

from _pytest.outcomes import Skipped as PytestSkipped

from moe_parity.references.skip import Skip, Why

NO_GPU = Skip(Why.NEEDS_GPU, "needs a CUDA GPU")
LOST_GPU = frozenset({Why.NEEDS_GPU, Why.NEEDS_CHIP})
"""Reasons that a run for which a GPU is required does not accept."""


class Skipped(PytestSkipped):
    """pytest's own skip, with the reason as a value."""

    __module__ = "builtins"  # as pytest's own, so that its summary prints the sentence alone

    def __init__(self, skip: Skip) -> None:
        """Keep the reason."""
        super().__init__(msg=skip.sentence)
        self.skip = skip


def skip_test(skip: Skip) -> NoReturn:
    """Skip the running test."""
    __tracebackhide__ = True
    raise Skipped(skip)


def why_of(error: BaseException | None) -> Why | None:
    """Return the kind of a skip, None for one that somebody else raised."""
    return error.skip.why if isinstance(error, Skipped) else None
