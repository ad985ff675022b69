"""What a tile of vLLM's Triton GEMMs decides: the scale order, the unit, how much of K at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from moe_parity.kernels.vendors.vllm.stored import Config, Stored
from moe_parity.references.language import Recipe
from moe_parity.references.recipes.vllm import VLLM_TRITON, VLLM_TRITON_SWAP
from moe_parity.references.stages.gemm.decisions import DotUnit, GemmRecipe, Interval

INTERVALS = {32: Interval.K32, 64: Interval.K64}
"""What of K a tile that is shorter than a block of scales takes at once."""


def recipe_of(tile: Config) -> Recipe:
    """Return the recipe of the grouped GEMM by BLOCK_SIZE_M, _N and _K (128 where it is not said).

    Swap-AB, with the other scale order, is for tiles of less than 64 tokens and 64 columns or more
    (``enable_swap_ab``).  Triton has WGMMA where the first operand of the dot has 64 rows or more
    and the second 16 columns, since 3.8 also 8 columns; else the dot is ``mma.sync`` on FP16.
    """
    tokens, columns = tile["BLOCK_SIZE_M"], tile["BLOCK_SIZE_N"]
    if tokens < 64 <= columns:
        return _of(VLLM_TRITON_SWAP, columns, tokens, tile)
    return _of(VLLM_TRITON, tokens, columns, tile)


def linear_recipe_of(tile: Config) -> Recipe:
    """Return the recipe of the dense GEMM: its operands never change places."""
    return _of(VLLM_TRITON, tile["BLOCK_SIZE_M"], tile["BLOCK_SIZE_N"], tile)


def _of(recipe: Recipe, first: int, second: int, tile: Config) -> Recipe:
    """Return a recipe with the unit for so many rows and columns of a dot, and a tile's K."""
    if first < 64 or second < narrowest():
        recipe = _changed(recipe, "mma", unit=DotUnit.MMA_F16)
    # the launcher takes no more than a block of the scales
    depth = tile.get("BLOCK_SIZE_K", 128)
    if depth in INTERVALS:
        recipe = _changed(recipe, f"k{depth}", interval=INTERVALS[depth])
    return recipe


def _changed(recipe: Recipe, word: str, **decisions: DotUnit | Interval) -> Recipe:
    gemm = dataclasses.replace(recipe.of("gemm", GemmRecipe), **decisions)  # type: ignore[arg-type]
    return dataclasses.replace(recipe.with_parts(gemm=gemm), name=f"{recipe.name}_{word}")


def narrowest() -> int:
    """Return the columns from which on the installed Triton has WGMMA for a dot of FP8."""
    try:
        found = [int(n) for n in version("triton").split(".")[:2]]
    except (PackageNotFoundError, ValueError):
        return 16
    return 8 if found >= [3, 8] else 16


def spans(
    file: Stored, rule: Callable[[Config], Recipe] = recipe_of, most: int = 8192
) -> Iterator[tuple[int, int, str, str, str]]:
    """Yield (M from, to, scale order, unit, K at once) of a file, a line for each kind."""
    parts = [rule(file.of(m)).of("gemm", GemmRecipe) for m in range(1, most + 1)]
    chosen = [(p.scale_order.value, p.unit.value, p.interval.value) for p in parts]
    at = 1
    for kind, same in itertools.groupby(chosen):
        count = len(list(same))
        yield (at, at + count - 1, *kind)
        at += count
