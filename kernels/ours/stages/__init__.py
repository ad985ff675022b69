"""Our kernels of single stages as the harness sees them, a module for each family of stages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from moe_parity.kernels.registry import Cost, Run, Supports, register
from moe_parity.references.language import Check, Contract, Recipe, Skip, Stage, Why
from moe_parity.references.recipes.ours import OURS


def unavailable() -> Skip | None:
    """Return None where Triton is installed, else what to do."""
    if importlib.util.find_spec("triton") is None:
        missing = "Triton is not installed (it exists for Linux only); references need none."
        return Skip(Why.ABSENT, missing)
    return None


SERVING = Contract().promising(Check.NO_SYNC, Check.NO_RECOMPILE)
"""What all of ours promise: they are called in a CUDA graph, at any number of tokens."""


def ours(
    name: str,
    stage: Stage[Any],
    *,
    recipe: Recipe = OURS,
    supports: Supports | None = None,
    note: str = "",
    configs: Mapping[str, Any] | None = None,
    cost: Cost | None = None,
) -> Callable[[Run], Run]:
    """Return a decorator that registers a kernel of ours, in Triton, under our contract."""
    return register(
        name, stage=stage, recipes=recipe, supports=supports, unavailable=unavailable,
        triton=True, note=note, contract=SERVING, configs=configs, cost=cost,
    )  # fmt: skip
