"""Cases drawn by hypothesis: drawn only, since judging, shrinking and keeping are done here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from moe_parity.references.language import Case

ROUND = 1000
"""Cases after which hypothesis begins anew, with another seed: its memory of them stays small."""


class Enough(BaseException):
    """No more cases: hypothesis hands on what is not an Exception."""


def derived(base: int, *place: int) -> int:
    """Return the seed of a place in a run, of 32 bits: the base itself for zeros."""
    if not any(place):
        return base
    text = "/".join(map(str, (base, *place)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def draw(strategy: st.SearchStrategy[Case], base: int, take: Callable[[Case], None]) -> None:
    """Hand drawn cases on to ``take`` until it raises Enough, or there are none."""
    turn = 0
    chosen = settings(
        max_examples=ROUND,
        phases=[Phase.generate],
        database=None,
        derandomize=False,
        deadline=None,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    while True:
        heard = 0

        def hear(case: Case) -> None:
            nonlocal heard
            heard += 1
            take(case)

        try:
            seed(derived(base, turn))(chosen(given(strategy)(hear)))()
        except Enough:
            return
        except Unsatisfiable:
            pass
        if not heard:
            return
        turn += 1
