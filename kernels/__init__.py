"""Kernels under test: the registry, our own Triton kernels, adapters for other projects'."""

from moe_parity.kernels.call import Call
from moe_parity.kernels.errors import KernelError
from moe_parity.kernels.registry import Kernel, all_kernels, find, load_file, register, select

__all__ = [
    "Call",
    "Kernel",
    "KernelError",
    "all_kernels",
    "find",
    "load_file",
    "register",
    "select",
]
