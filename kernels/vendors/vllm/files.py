"""Where vLLM's Triton kernels are, and their functions once loaded from there.

Loaded from disk at the first call (``kernels/vendors/source.py``), so that a machine without Triton
or vLLM can list the kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moe_parity.kernels.ours.stages import unavailable as no_triton
from moe_parity.kernels.vendors.signatures import Wanted
from moe_parity.kernels.vendors.vllm import package
from moe_parity.references.language import Skip, Why

LAYERS = "vllm/model_executor/layers"
MOE = f"{LAYERS}/fused_moe/fused_moe.py"
UTILS = f"{LAYERS}/fused_moe/utils.py"
GATHER = f"{LAYERS}/fused_moe/deep_gemm_utils.py"
FP8 = f"{LAYERS}/quantization/utils/fp8_utils.py"
ALIGNMENT = 128
"""Rows to which vLLM pads each expert for DeepGEMM on SM90."""


def needs(*wanted: Wanted) -> Callable[[], Skip | None]:
    """Return what says why a kernel cannot be called: Triton, vLLM's files, or a function."""

    def unavailable() -> Skip | None:
        missing = no_triton() or package.no_source()
        if missing:
            return missing
        found = package.package()
        refusals = (one.refusal(found.file(one.path)) for one in wanted)
        reason = next(filter(None, refusals), "")
        return Skip(Why.ABSENT, f"vLLM {found.version}: {reason}") if reason else None

    return unavailable


def used(*wanted: Wanted) -> Callable[[], Mapping[str, Path]]:
    """Return what names the files that a kernel is taken from, for the records."""

    def files() -> Mapping[str, Path]:
        found = package.located()
        if isinstance(found, str):
            return {}
        return {found.named(one.path): found.file(one.path) for one in wanted}

    return files


def functions(path: str, *names: str, batch_invariant: bool = False) -> Any:
    """Return functions of one of the package's files, as on an H200.

    ``batch_invariant`` is what they read of ``VLLM_BATCH_INVARIANT``.
    """
    return _functions(package.package().file(path), path, names, batch_invariant)


@lru_cache(maxsize=16)
def _functions(file: Path, path: str, names: tuple[str, ...], batch_invariant: bool) -> Any:
    made = importlib.import_module("moe_parity.kernels.vendors.source")
    envs = SimpleNamespace(VLLM_BATCH_INVARIANT=batch_invariant)
    given: dict[str, Any] = {"current_platform": made.PLATFORM, "envs": envs}
    if path == MOE:
        given |= {
            "enable_swap_ab": functions(UTILS, "enable_swap_ab").enable_swap_ab,
            "warn_if_moe_use_td_ineffective": lambda *_, **__: None,
            "resolve_moe_use_td": lambda: False,
        }
    return made.File(file, names, given)
