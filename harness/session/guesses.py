"""Packages whose version is not known, so that the recipes are those of the nearest known one."""

from __future__ import annotations

import os

from moe_parity.harness.session import environment
from moe_parity.references.versions import guess

FOLDERS = "MOE_PARITY_VLLM"
"""The variable by which files are run that no distribution tells of."""


def packages(names: frozenset[str] | None) -> dict[str, str]:
    """Return what a run line adds about the kernels that run: versions, and whose recipes.

    ``names`` are those of the kernels, None for all.  Without torch where all that is installed is
    known.
    """
    installed = environment.versions()
    installed.pop("torch")
    unknown = any(guess(name, version) for name, version in installed.items())
    if not unknown and not os.environ.get(FOLDERS):
        return {}
    from moe_parity.kernels.registry import all_kernels

    chosen = [k for k in all_kernels() if names is None or k.name in names]
    found: dict[str, str] = {}
    for kernel in chosen:
        found |= {name: version for name, version in kernel.versions().items() if name != "torch"}
    guesses = dict.fromkeys(kernel.guess for kernel in chosen if kernel.guess)
    return found | ({"recipes of": "; ".join(guesses)} if guesses else {})
