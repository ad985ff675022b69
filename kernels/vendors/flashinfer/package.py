"""FlashInfer as it is installed, and a second build of its block-FP8 GEMM for Hopper.

FlashInfer compiles TensorRT-LLM's source at first use, with ``-use_fast_math``; TensorRT-LLM does
without.  The second build is the same description of the module under another name, that flag taken
out, in the same workspace: nothing of the installed package is touched, and one process holds both.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.call import CannotCall
from moe_parity.references.language import Skip, Why

FAST_MATH = "-use_fast_math"
RUNNER = "get_fp8_blockscale_gemm_runner_sm90"
"""The function of ``flashinfer.gemm.gemm_base`` that builds the module and returns its runner."""
DESCRIPTION = "gen_fp8_blockscale_gemm_sm90_module"
FUNCTIONS = ("fp8_blockscale_gemm_sm90",)
NEEDED = {
    "flashinfer-python": "FlashInfer is not installed; install the extra: "
    "pip install 'moe-parity[flashinfer]'.",
    "apache-tvm-ffi": "FlashInfer needs apache-tvm-ffi, which is not installed; install the extra: "
    "pip install 'moe-parity[flashinfer]'.",
}
HOPPER = "FlashInfer's fp8_blockscale_gemm_sm90 needs a Hopper GPU."
NVCC = (
    "FlashInfer compiles its GEMM with nvcc, which is not found; set CUDA_HOME to a CUDA toolkit "
    "of 12.8 or later."
)
NINJA = "FlashInfer compiles its GEMM with ninja, which is not found; pip install ninja."


class Build(StrEnum):
    """How the module is compiled."""

    SHIPPED = "shipped"
    """As FlashInfer does, with ``-use_fast_math``."""
    EXACT = "exact"
    """Without that flag, as TensorRT-LLM does."""


def versions() -> Mapping[str, str]:
    """Return the versions of FlashInfer and of what loads its modules."""
    found = {}
    for name in NEEDED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@lru_cache(maxsize=1)
def unavailable() -> Skip | None:
    """Import FlashInfer; return None, or why it cannot run here.  Nothing is compiled yet."""
    for name, sentence in NEEDED.items():
        if name not in versions():
            return Skip(Why.ABSENT, sentence)
    if not torch.cuda.is_available():
        return Skip(Why.NEEDS_GPU, HOPPER)
    if torch.cuda.get_device_capability()[0] != 9:
        return Skip(Why.NEEDS_CHIP, HOPPER)
    if not _has_nvcc():
        return Skip(Why.ABSENT, NVCC)
    if shutil.which("ninja") is None:
        return Skip(Why.ABSENT, NINJA)
    try:
        base()
    except Exception as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        return Skip(Why.ABSENT, f"flashinfer does not import: {text}")
    return None


def lacking(build: Build) -> Skip | None:
    """Return None where a build can be called, else why not: the package, or a function of it."""
    reason = unavailable()
    if reason:
        return reason
    wanted = FUNCTIONS if build is Build.SHIPPED else (*FUNCTIONS, RUNNER, DESCRIPTION)
    missing = [name for name in wanted if not hasattr(base(), name)]
    if not missing:
        return None
    return Skip(Why.ABSENT, f"FlashInfer's gemm_base has no function {missing[0]}, expected it.")


def _has_nvcc() -> bool:
    """Whether there is a compiler where FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        return shutil.which("nvcc") is not None or Path("/usr/local/cuda/bin/nvcc").is_file()
    return (Path(home) / "bin" / "nvcc").is_file()


def base() -> Any:
    """Import ``flashinfer.gemm.gemm_base``, where the function and its runner are."""
    return importlib.import_module("flashinfer.gemm.gemm_base")


# --- the second build -----------------------------------------------------------------------------


def without_fast_math(spec: Any) -> Any:
    """Return the description of a module under another name, compiled without ``-use_fast_math``.

    The host's code of both builds holds the same names.  Those that a process has but once, such as
    a flag that a kernel was set up, would be shared, so the second one keeps its own.  Raises
    CannotCall where there is no such flag: that version is not what the first build stands for.
    """
    flags = list(spec.extra_cuda_cflags or [])
    if FAST_MATH not in flags:
        raise CannotCall(
            f"FlashInfer {versions().get('flashinfer-python', '')} compiles {spec.name} without "
            f"{FAST_MATH}: both builds would be one; 0.6.18 has the flag."
        )
    own = [flag for flag in flags if flag != FAST_MATH]
    return dataclasses.replace(
        spec, name=f"{spec.name}_exact",
        extra_cuda_cflags=[*own, "-Xcompiler=-fno-gnu-unique"],
        extra_cflags=[*(spec.extra_cflags or []), "-fno-gnu-unique"],
    )  # fmt: skip


@lru_cache(maxsize=1)
def exact_runner() -> Any:
    """Compile the second build, where that was not done before, and return its runner."""
    module = without_fast_math(getattr(base(), DESCRIPTION)()).build_and_load()
    source = importlib.import_module("flashinfer.jit.env").FLASHINFER_CSRC_DIR
    module.set_deepgemm_jit_include_dirs([str(source / "nv_internal" / "tensorrt_llm")])
    return module.init()


@contextmanager
def built_as(build: Build) -> Iterator[Callable[..., Tensor]]:
    """Return FlashInfer's function, which takes the runner of a build while this lasts."""
    module = base()
    if build is Build.SHIPPED:
        yield module.fp8_blockscale_gemm_sm90
        return
    shipped = getattr(module, RUNNER)
    setattr(module, RUNNER, exact_runner)
    try:
        yield module.fp8_blockscale_gemm_sm90
    finally:
        setattr(module, RUNNER, shipped)


def compile_now(build: Build) -> None:
    """Compile the module of a build, where that was not done before: about two minutes."""
    if build is Build.EXACT:
        exact_runner()
    else:
        getattr(base(), RUNNER)()
