"""What of the collected tests runs: those of some kernels, and what -k answers to."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def only(
    items: Iterable[pytest.Item], kernels: frozenset[str]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that are about one of the kernels, by their marker, and all others."""
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        own = {mark.kwargs.get("kernel") for mark in item.iter_markers("moe")}
        (kept if own & kernels else dropped).append(item)
    return kept, dropped


def known_words(item: pytest.Item) -> set[str]:
    """Return the words of a test's case that its id leaves out, and the name of its stage."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    kernel, case = params.get("kernel"), params.get("case")
    if kernel is None or not hasattr(kernel, "stage"):
        return set()
    # Only a test that has loaded the kernels gets here: no torch for a bad option.
    from moe_parity.references.language import Case

    words = {kernel.stage.name}
    return words | set(case.words(kernel.stage.reads)) if isinstance(case, Case) else words
