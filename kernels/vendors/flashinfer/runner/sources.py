"""What the libraries are made of: FlashInfer's folder, the compiler, the sources and the flags."""

from __future__ import annotations

import os
import shutil
import site
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from moe_parity.kernels.vendors.flashinfer.package import FAST_MATH, Build
from moe_parity.references.errors import ParityError

VERSION = "0.6.18"
"""The FlashInfer that the interface in ``runner.cu`` is written against."""
CACHE = "MOE_PARITY_FUSED_MOE"
"""The environment variable that names the folder of the objects and libraries."""
OURS = Path(__file__).parent


@dataclass(frozen=True)
class Source:
    """One object file."""

    name: str
    path: str
    """Below FlashInfer's ``csrc``, or a file beside this one."""
    device: bool = True
    """Whether it holds device code, which differs between the builds; nvcc compiles it."""

    def located(self, csrc: Path) -> Path:
        """Return its file."""
        return OURS / self.path if "/" not in self.path else csrc / self.path


KERNELS = "nv_internal/tensorrt_llm/kernels/cutlass_kernels"
SOURCES = (
    Source("runner", "runner.cu"),
    Source("blockscale", f"{KERNELS}/fp8_blockscale_gemm/fp8_blockscale_gemm.cu"),
    Source("other_gemms", "other_gemms.cu"),
    Source("tma_input", f"{KERNELS}/moe_gemm/moe_gemm_tma_warp_specialized_input.cu"),
    Source("prequant", "nv_internal/tensorrt_llm/kernels/preQuantScaleKernel.cu"),
    Source("memory", "nv_internal/cpp/common/memoryUtils.cu"),
    Source("heuristic", f"{KERNELS}/cutlass_heuristic.cpp", device=False),
    Source("environment", "nv_internal/cpp/common/envUtils.cpp", device=False),
    Source("logger", "nv_internal/cpp/common/logger.cpp", device=False),
    Source("strings", "nv_internal/cpp/common/stringUtils.cpp", device=False),
    Source("exception", "nv_internal/cpp/common/tllmException.cpp", device=False),
)
"""The longest first."""

DEFINED = (
    "FLASHINFER_ENABLE_F16", "FLASHINFER_ENABLE_BF16", "FLASHINFER_ENABLE_FP8_E4M3",
    "FLASHINFER_ENABLE_FP8_E5M2", "FLASHINFER_ENABLE_FP8_E8M0", "FLASHINFER_ENABLE_FP4_E2M1",
    "NDEBUG", "CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", "COMPILE_HOPPER_TMA_GEMMS",
    "COMPILE_HOPPER_TMA_GROUPED_GEMMS", "ENABLE_BF16", "ENABLE_FP8", "ENABLE_FP8_BLOCK_SCALE",
    "ENABLE_FP4", "USING_OSS_CUTLASS_MOE_GEMM", "CUTLASS_ENABLE_GDC_FOR_SM90=1",
    "CUTLASS_MIXED_GEMM_FP4_FP8_PREPROCESSED_SIGNS=1",
)  # fmt: skip
"""As ``flashinfer/jit/fused_moe.py`` and ``jit/core.py`` define them for Hopper."""
SEARCHED = (
    "nv_internal", "nv_internal/include", "nv_internal/tensorrt_llm/cutlass_extensions/include",
    f"{KERNELS}/include", KERNELS, f"{KERNELS}/moe_gemm", f"{KERNELS}/fp8_blockscale_gemm",
    "fused_moe/cutlass_backend",
)  # fmt: skip
"""Folders of headers below ``csrc``."""
# Names that a process has but once are shared between its libraries, and the builds hold the same.
HOST = ("-std=c++17", "-O3", "-fPIC", "-fno-gnu-unique", "-w")
DEVICE = (
    "-std=c++17", "-O3", "-w", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr",
    "-static-global-template-stub=false", "-Xfatbin=-compress-all", "--compress-mode=size",
    "-Xcompiler=-fPIC,-fno-gnu-unique",
)  # fmt: skip


def data() -> Path:
    """Return ``flashinfer/data``.

    Raises ParityError where FlashInfer is not installed, or lacks a source that the layer is made
    of: the interface is that of one version's source, which the compiler holds another one to.
    """
    try:
        found = distribution("flashinfer-python")
    except PackageNotFoundError:
        raise ParityError(
            f"FlashInfer is not installed; pip install --no-deps flashinfer-python=={VERSION}."
        ) from None
    made = Path(str(found.locate_file("flashinfer/data")))
    for source in SOURCES if found.version != VERSION else ():
        file = source.located(made / "csrc")
        if not file.is_file():
            raise ParityError(
                f"FlashInfer {found.version} has no {file}, expected as in {VERSION}, from which "
                f"the fused layer is built; pip install --no-deps flashinfer-python=={VERSION}."
            )
    return made


def version() -> str:
    """Return the version of the FlashInfer at hand, else the one that is written against."""
    try:
        return distribution("flashinfer-python").version
    except PackageNotFoundError:
        return VERSION


def jit_headers() -> Path:
    """Return the folder with ``deep_gemm``, which a library compiles its GEMMs from."""
    return data() / "csrc" / "nv_internal" / "tensorrt_llm"


def cache() -> Path:
    """Return the folder of the objects and libraries; it need not exist."""
    named = os.environ.get(CACHE)
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "moe-parity" / f"flashinfer-{version()}"


def library(build: Build) -> Path:
    """Return where the library of a build lies or would lie."""
    return cache() / f"fused_moe_{build}.so"


def nvcc() -> Path | None:
    """Return the compiler, looked for where FlashInfer looks, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        found = Path(home) / "bin" / "nvcc"
        return found if found.is_file() else None
    on_path = shutil.which("nvcc")
    usual = Path("/usr/local/cuda/bin/nvcc")
    return Path(on_path) if on_path else usual if usual.is_file() else None


def curand() -> Path | None:
    """Return a folder of cuRAND's headers beside Python's packages, None where there is none."""
    for folder in (*site.getsitepackages(), *sys.path):
        for made in ("nvidia/cu13/include", "nvidia/curand/include"):
            if (Path(folder) / made / "curand_kernel.h").is_file():
                return Path(folder) / made
    return None


def includes(root: Path) -> Iterator[str]:
    """Yield the options that say where headers are; ``root`` is FlashInfer's ``data``."""
    yield f"-I{OURS / 'absent'}"
    for folder in SEARCHED:
        yield f"-I{root / 'csrc' / folder}"
    for folder in ("cccl/cub", "cccl/libcudacxx/include", "cccl/thrust"):
        yield f"-I{root / folder}"
    others = ("include", "csrc", "cutlass/include", "cutlass/tools/util/include", "spdlog/include")
    for folder in others:
        yield from ("-isystem", str(root / folder))


def flags(source: Source, build: Build) -> tuple[str, ...]:
    """Return the flags of an object, as FlashInfer's but for what keeps the builds apart."""
    defined = tuple(f"-D{name}" for name in DEFINED)
    if not source.device:
        return (*HOST, *defined)
    beside = curand()
    # Not before the toolkit's own: the folder may hold all headers of another release.
    after = () if beside is None else (f"-Xcompiler=-idirafter,{beside}",)
    return (*DEVICE, *((FAST_MATH,) if build is Build.SHIPPED else ()), *defined, *after)
