"""The orders in which programs run, and lanes of an atomic: the GPU promises none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

Order = Callable[[int], Array]
"""Takes a count, returns that many numbers from 0, each once."""


def orders(seed: int | None, backwards: bool) -> tuple[Order, Order]:
    """Return the orders of programs and of lanes: ascending, descending, or drawn from a seed.

    Raises ValueError where both are asked for.
    """
    if seed is not None and backwards:
        raise ValueError("a launch runs backwards or in the order of a seed, not both.")
    if seed is None:
        order = _descending if backwards else np.arange
        return order, order
    return _drawn(seed), _drawn(seed)


def _descending(count: int) -> Array:
    return np.arange(count)[::-1]


def _drawn(seed: int) -> Order:
    generator = np.random.default_rng(seed)

    def order(count: int) -> Array:
        drawn = generator.permutation(count)
        # of two programs every second draw would be the order of the first call once more
        return drawn[::-1] if (drawn[1:] > drawn[:-1]).all() else drawn

    return order
