"""The named recipes: what each project's kernels do, a file a project.

Each names the code it was read from; whether a recipe is proven against the real kernel, and on
what, is in docs/measurements.
"""

from __future__ import annotations

from moe_parity.references.errors import ParityError
from moe_parity.references.language.recipe import Recipe
from moe_parity.references.recipes import (
    deepgemm,
    flashinfer,
    ours,
    pytorch,
    sglang,
    tensorrt_llm,
    vllm,
)

PROJECTS = (ours, tensorrt_llm, deepgemm, vllm, sglang, flashinfer, pytorch)

ALL: dict[str, Recipe] = {
    recipe.name: recipe
    for project in PROJECTS
    for name, recipe in vars(project).items()
    if isinstance(recipe, Recipe) and not name.startswith("_")
}


def recipe_named(name: str) -> Recipe:
    """Return a recipe; raises ParityError, listing them, for a name that is none."""
    if name not in ALL:
        raise ParityError(f"unknown recipe {name!r}; `parity recipes` lists: {', '.join(ALL)}.")
    return ALL[name]
