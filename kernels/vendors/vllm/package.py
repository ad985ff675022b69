"""vLLM's package as its adapters ask for it; vllm itself is not imported.

The two libraries use torch's stable ABI and register their ops under one name each, so a process
has one version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from moe_parity.kernels.vendors.vllm.folders import Package, located
from moe_parity.references.language import Skip, Why

__all__ = ["Package", "located"]
LIBRARIES = {
    "_C": "_C_stable_libtorch.abi3.so", "_moe_C": "_moe_C_stable_libtorch.abi3.so",
}  # fmt: skip
"""The library of each namespace of ops."""


def package() -> Package:
    """Return the package; raises FileNotFoundError with the reason where there is none."""
    found = located()
    if isinstance(found, str):
        raise FileNotFoundError(found)
    return found


def divides() -> bool:
    """Whether the package's quantizer divides, or the nearest known one's; False without one."""
    found = located()
    return isinstance(found, Package) and found.divides


def versions() -> Mapping[str, str]:
    """Return the version of the located package, if there is one."""
    found = located()
    return {"vllm": found.version} if isinstance(found, Package) else {}


def no_source() -> Skip | None:
    """Return None where vLLM's Python files are on disk, else why not."""
    found = located()
    return Skip(Why.ABSENT, found) if isinstance(found, str) else None


@lru_cache(maxsize=2)
def no_library(name: str = LIBRARIES["_C"]) -> Skip | None:
    """Load a library of ops; return None, or why it cannot be used."""
    found = located()
    if isinstance(found, str):
        return Skip(Why.ABSENT, found)
    path = found.file(f"vllm/{name}")
    if not path.is_file():
        return Skip(Why.ABSENT, f"vLLM's library {path} does not exist.")
    if not torch.cuda.is_available():
        return Skip(Why.NEEDS_GPU, "vLLM's CUDA ops need a GPU.")
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        text = (str(error).splitlines() or [""])[0]
        return Skip(Why.ABSENT, f"vLLM's library does not load: {text}")
    return None


def op(space: str, name: str, *taken: int) -> Callable[[], Skip | None]:
    """Return what says why an op cannot be called: its library, or ``taken`` numbers of arguments.

    ``space`` is ``_C`` or ``_moe_C``; a version that lacks one op has the others.
    """

    def unavailable() -> Skip | None:
        return no_library(LIBRARIES[space]) or lacking(space, name, taken)

    return unavailable


def lacking(space: str, name: str, taken: tuple[int, ...]) -> Skip | None:
    """Return None where an op is registered and takes so many arguments, else why not."""
    found = getattr(getattr(torch.ops, space), name, None)
    numbers = " or ".join(map(str, taken))
    about = f"vLLM's {LIBRARIES[space]}"
    if found is None:
        return Skip(Why.ABSENT, f"{about} has no op {name}, expected one of {numbers} arguments.")
    count = len(found.default._schema.arguments)
    if count in taken:
        return None
    return Skip(Why.ABSENT, f"{about}: {name} takes {count} arguments, expected {numbers}.")
