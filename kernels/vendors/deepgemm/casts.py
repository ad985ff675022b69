"""DeepGEMM's own cast helpers, loaded from the installed package's file.

``import deep_gemm`` needs CUDA; its ``utils/math.py`` needs torch alone, so these real subjects run
on a CPU too.  Found on a GPU: torch turns ``amax / 448.0`` into a product with the reciprocal of
448, so the same source follows another scale form there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.signatures import Wanted
from moe_parity.references.language import (
    Case,
    Check,
    Contract,
    Recipe,
    ScaleFormat,
    ScaleLayout,
    Skip,
    Why,
)
from moe_parity.references.recipes.deepgemm import (
    DEEPGEMM,
    DEEPGEMM_CUDA,
    DEEPGEMM_CUDA_NAN,
    DEEPGEMM_NAN,
)

DISTRIBUTIONS = ("sgl-deep-gemm", "deep-gemm", "tokenspeed-deepgemm")
MISSING = "DeepGEMM is not installed; install the extra: pip install 'moe-parity[deepgemm]'."


def _math_file() -> Path | None:
    for name in DISTRIBUTIONS:
        try:
            path = Path(str(distribution(name).locate_file("deep_gemm/utils/math.py")))
        except PackageNotFoundError:
            continue
        if path.is_file():
            return path
    return None


def unavailable(*wanted: Wanted) -> Skip | None:
    """Return None where a DeepGEMM package is installed with the functions wanted, else why not."""
    file = _math_file()
    if file is None:
        return Skip(Why.ABSENT, MISSING)
    reason = next(filter(None, (one.refusal(file) for one in wanted)), "")
    return Skip(Why.ABSENT, reason) if reason else None


MATH = "deep_gemm/utils/math.py"
PER_TOKEN = Wanted(
    MATH, "per_token_cast_to_fp8", ("x",), ("use_ue8m0", "gran_k", "use_packed_ue8m0")
)
PER_BLOCK = Wanted(MATH, "per_block_cast_to_fp8", ("x",), ("use_ue8m0",))


def files() -> Mapping[str, Path]:
    """Return the file of the helpers, for the records."""
    file = _math_file()
    return {} if file is None else {MATH: file}


def versions() -> Mapping[str, str]:
    """Return the distribution that is installed and its version."""
    for name in DISTRIBUTIONS:
        try:
            return {name: version(name)}
        except PackageNotFoundError:
            continue
    return {}


@lru_cache(maxsize=1)
def helpers() -> ModuleType:
    """Return the package's ``deep_gemm/utils/math.py`` as a module of its own."""
    path = _math_file()
    if path is None:
        raise ModuleNotFoundError(MISSING)
    spec = importlib.util.spec_from_file_location("moe_parity_deep_gemm_math", path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_RECIPES = {
    ("cpu", True): (DEEPGEMM,),
    ("cpu", False): (DEEPGEMM_NAN,),
    ("cuda", True): (DEEPGEMM_CUDA,),
    ("cuda", False): (DEEPGEMM_CUDA_NAN,),
}
# The helpers allocate their own outputs and give no others.
_CONTRACT = Contract().without(Check.WRITE_SET)


def _recipes(case: Case, device: str) -> tuple[Recipe, ...]:
    return _RECIPES[device, _cast_saturates(device)]


@lru_cache(maxsize=2)
def _cast_saturates(device: str) -> bool:
    """Whether torch's own cast to E4M3 saturates: it differs between releases."""
    past = torch.tensor([1e9], device=device).to(torch.float8_e4m3fn)
    return int(past.view(torch.uint8)) == 0x7E


def _per_token(case: Case, device: str) -> str | None:
    if case.layout is not ScaleLayout.ROW:
        return "the helper returns row-major scales."
    if case.scale is ScaleFormat.UE8M0_PACKED and (case.h // case.group) % 4:
        return "the helper packs whole words only: K must be a multiple of 4 groups."
    return None


@register(
    "deepgemm_per_token",
    stage="act_quant",
    recipes=_recipes,
    supports=_per_token,
    unavailable=partial(unavailable, PER_TOKEN),
    contract=_CONTRACT,
    versions=versions,
    files=files,
)
def deepgemm_per_token(call: Call) -> tuple[Tensor, Tensor]:
    """DeepGEMM per_token_cast_to_fp8."""
    scale = call.case.scale
    codes, scales = helpers().per_token_cast_to_fp8(
        call.inputs.x,
        use_ue8m0=scale.is_power_of_two,
        gran_k=call.case.group,
        use_packed_ue8m0=scale is ScaleFormat.UE8M0_PACKED,
    )
    return codes.view(torch.uint8), scales


@register(
    "deepgemm_per_block",
    stage="weight_quant",
    recipes=_recipes,
    unavailable=partial(unavailable, PER_BLOCK),
    contract=_CONTRACT,
    versions=versions,
    files=files,
)
def deepgemm_per_block(call: Call) -> tuple[Tensor, Tensor]:
    """DeepGEMM per_block_cast_to_fp8."""
    codes, scales = helpers().per_block_cast_to_fp8(
        call.inputs.x, use_ue8m0=call.case.scale.is_power_of_two
    )
    return codes.view(torch.uint8), scales
