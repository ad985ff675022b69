"""A library of the fused layer as Python calls it: ctypes, addresses and sizes."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_parity.kernels.vendors.flashinfer.package import Build
from moe_parity.kernels.vendors.flashinfer.runner import sources
from moe_parity.references.errors import ParityError

DRIVER = "libcuda.so.1"
COMPILER = "TRTLLM_DG_NVCC_COMPILER"
"""The variable by which the library finds nvcc: it compiles a GEMM at the first use of a shape."""

_ADDRESS, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Layer(ctypes.Structure):
    """What one call is about: ``MoeLayer`` of ``runner.cu``, in its order."""

    _fields_ = (
        *((name, _ADDRESS) for name in (
            "input", "selected", "final_scales", "fc1", "fc2", "fc1_scales", "fc2_scales",
            "swiglu_alpha", "swiglu_beta", "swiglu_limit", "output", "workspace",
        )),
        *((name, _LONG) for name in ("rows", "hidden", "inter")),
        *((name, _INT) for name in (
            "experts", "top_k", "ep_size", "ep_rank", "dependent_launch",
        )),
    )  # fmt: skip


class Library:
    """One build, with the one runner that FlashInfer too has for a process."""

    def __init__(self, path: Path, headers: Path) -> None:
        """Load a library and make its runner; ``headers`` is the folder with ``deep_gemm``.

        Raises ParityError where either fails.
        """
        try:
            # The library leaves the driver's functions open.
            ctypes.CDLL(DRIVER, mode=ctypes.RTLD_GLOBAL)
            self.functions: Any = ctypes.CDLL(str(path), mode=os.RTLD_LAZY | os.RTLD_LOCAL)
        except OSError as error:
            raise ParityError(f"FlashInfer's fused layer does not load: {error}.") from None
        self.runner = ctypes.c_void_p()
        self._done(
            self.functions.moe_runner_create(os.fsencode(headers), ctypes.byref(self.runner))
        )

    def workspace(self, layer: Layer) -> int:
        """Return the bytes of workspace that a call needs."""
        size = ctypes.c_size_t()
        self._done(
            self.functions.moe_runner_workspace(
                self.runner, ctypes.byref(layer), ctypes.byref(size)
            )
        )
        return size.value

    def run(self, layer: Layer, stream: int) -> None:
        """Put a call on a stream of the current device."""
        self._done(
            self.functions.moe_runner_run(self.runner, ctypes.byref(layer), ctypes.c_void_p(stream))
        )

    def _done(self, status: int) -> None:
        if status:
            error = self.functions.moe_runner_error
            error.restype = ctypes.c_char_p
            said = error().decode(errors="replace").splitlines()
            raise ParityError(f"FlashInfer's fused layer: {(said or ['no reason given'])[0]}")


@lru_cache(maxsize=len(Build))
def loaded(build: Build) -> Library:
    """Return the library of a build; raises ParityError where it cannot be loaded."""
    nvcc = sources.nvcc()
    if nvcc is not None:
        # Without a compiler the library would end the process at its first GEMM.
        os.environ.setdefault(COMPILER, str(nvcc))
    return Library(sources.library(build), sources.jit_headers())
