"""Where vLLM's Triton kernels are, and their functions once loaded from there.

Loaded from disk at the first call (``kernels/vendors/source.py``), so that a machine without Triton
or vLLM can list the kernels.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from moe_parity.kernels.ours.stages import unavailable as no_triton
from moe_parity.kernels.vendors.vllm import package
from moe_parity.references.language import Skip

LAYERS = "vllm/model_executor/layers"
MOE = f"{LAYERS}/fused_moe/fused_moe.py"
UTILS = f"{LAYERS}/fused_moe/utils.py"
GATHER = f"{LAYERS}/fused_moe/deep_gemm_utils.py"
FP8 = f"{LAYERS}/quantization/utils/fp8_utils.py"
ALIGNMENT = 128
"""Rows to which vLLM pads each expert for DeepGEMM on SM90."""


def unavailable() -> Skip | None:
    """Return None where Triton and vLLM's files are at hand."""
    return no_triton() or package.no_source()


@lru_cache(maxsize=8)
def functions(path: str, *names: str) -> Any:
    """Return functions of one of the package's files, as on an H200."""
    made = importlib.import_module("moe_parity.kernels.vendors.source")
    given: dict[str, Any] = {"current_platform": made.PLATFORM}
    if path == MOE:
        given |= {
            "enable_swap_ab": functions(UTILS, "enable_swap_ab").enable_swap_ab,
            "warn_if_moe_use_td_ineffective": lambda *_, **__: None,
            "resolve_moe_use_td": lambda: False,
            "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False),
        }
    return made.File(package.package().root / path, names, given)
