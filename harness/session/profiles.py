"""Hypothesis profiles of our own: how many cases a run draws, and whether it draws the same ones.

A deadline would call the first launch of a kernel flaky (it compiles), so there is none.
Hypothesis registers a profile `ci` itself and loads it where the variable CI is set; ours takes
its place, under the same name, so that a CI run has a number of cases that we chose.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches

from hypothesis import HealthCheck, settings

from moe_parity.references.errors import ParityError

VARIABLE = "MOE_PARITY_PROFILE"

PROFILES: Mapping[str, tuple[int, bool]] = {
    "dev": (40, False),  # new cases every time, failures remembered in .hypothesis
    "ci": (40, True),  # the same cases every time: a red pull request is its own fault
    "nightly": (500, False),
    "fuzz": (10_000, False),
}
"""Name to (cases per test, the same cases every time)."""


CHOSEN = 5
"""How many times more cases are drawn where the kernels to test were named."""


def register(times: int = 1) -> None:
    """Register every profile; a module that decorates a test afterwards sees them."""
    for name, (cases, derandomize) in PROFILES.items():
        settings.register_profile(
            name,
            settings.get_profile("default"),
            max_examples=times * cases,
            derandomize=derandomize,
            # derandomize and a database exclude each other
            **({"database": None} if derandomize else {}),
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )


def activate(name: str | None = None, *, times: int = 1) -> str:
    """Register the profiles, each with so many times its cases, load one and return its name.

    Without a name: MOE_PARITY_PROFILE, then `ci` where hypothesis has noticed a CI, then `dev`.
    Raises ParityError for an unknown name.
    """
    in_ci = settings.get_current_profile_name() == "ci"
    register(times)
    name = name or os.environ.get(VARIABLE) or ("ci" if in_ci else "dev")
    if name not in PROFILES:
        close = get_close_matches(name, PROFILES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        known = ", ".join(PROFILES)
        raise ParityError(f"unknown profile {name!r}, expected one of {known}{hint}")
    settings.load_profile(name)
    return name
