"""Where vLLM is: an installed one, or the folder of an unpacked wheel; vllm itself is not imported.

``MOE_PARITY_VLLM`` names the folder that holds ``vllm/`` and its ``vllm-<version>.dist-info``.  The
two libraries use torch's stable ABI and register their ops under one name each, so a process has
one version.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from moe_parity.references.language import Skip, Why

VARIABLE = "MOE_PARITY_VLLM"
LIBRARIES = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so")
KNOWN = ("0.33.0", "0.26.0")
"""The versions whose recipes are stated."""


@dataclass(frozen=True)
class Package:
    """A vLLM on disk."""

    root: Path
    """The folder that holds ``vllm/``."""
    version: str

    @property
    def divides(self) -> bool:
        """Whether per_token_group_fp8_quant computes x / s; later versions x * (1 / s)."""
        return tuple(int(n) for n in self.version.split(".")[:2]) <= (0, 26)


@lru_cache(maxsize=1)
def located() -> Package | str:
    """Return the package, or why there is none, in one sentence."""
    named = os.environ.get(VARIABLE)
    if named:
        return _unpacked(Path(named))
    try:
        found = distribution("vllm")
    except PackageNotFoundError:
        return f"vLLM is not installed and {VARIABLE} names no unpacked wheel."
    return _known(Package(Path(str(found.locate_file(""))), found.version))


def _unpacked(root: Path) -> Package | str:
    if not (root / "vllm").is_dir():
        return f"{VARIABLE}={root} holds no folder vllm; unpack a wheel there."
    for info in sorted(root.glob("vllm-*.dist-info")):
        match = re.fullmatch(r"vllm-(.+)\.dist-info", info.name)
        if match:
            return _known(Package(root, match[1]))
    return f"{VARIABLE}={root} holds no vllm-<version>.dist-info, which says the version."


def _known(package: Package) -> Package | str:
    if package.version in KNOWN:
        return package
    return f"vLLM {package.version} is not one whose recipes are stated: {', '.join(KNOWN)}."


def package() -> Package:
    """Return the package; raises FileNotFoundError with the reason where there is none."""
    found = located()
    if isinstance(found, str):
        raise FileNotFoundError(found)
    return found


def divides() -> bool:
    """Whether the located package's quantizer divides; False where there is none."""
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
def no_library(name: str = LIBRARIES[0]) -> Skip | None:
    """Load a library of ops; return None, or why it cannot be used."""
    found = located()
    if isinstance(found, str):
        return Skip(Why.ABSENT, found)
    path = found.root / "vllm" / name
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


def no_moe_library() -> Skip | None:
    """Load the library of ``torch.ops._moe_C``; see :func:`no_library`."""
    return no_library(LIBRARIES[1])
