"""Kernels under test: the registry, our own Triton kernels, adapters for other projects'."""

from moe_parity.kernels.call import Call, Fate, Produced
from moe_parity.kernels.registry import Kernel, all_kernels, find, load_file, register, select

__all__ = [
    "Call",
    "Fate",
    "Kernel",
    "Produced",
    "all_kernels",
    "find",
    "load_file",
    "register",
    "select",
]
