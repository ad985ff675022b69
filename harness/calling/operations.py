"""What an operation of torch, or one that a kernel registered, does to memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

FRESH = {
    "empty": "torch.empty",
    "empty_like": "torch.empty_like",
    "empty_strided": "torch.empty_strided",
    "empty_permuted": "torch.empty_permuted",
    "new_empty": "new_empty",
    "new_empty_strided": "new_empty_strided",
}
"""Operations that return memory which nobody has written, and what a caller calls them."""
GROWS = ("resize_", "resize_as_")
MOVES_NOTHING = {
    "set_", "as_strided_", "t_", "transpose_", "squeeze_", "unsqueeze_", "rename_", "swapaxes_",
    "swapdims_", "detach_",
}  # fmt: skip
"""Operations in place that write to no element."""
TORCH = {
    "aten", "prim", "prims", "quantized", "_quantized", "mkl", "mkldnn", "mkldnn_prepacked",
    "onednn", "inductor", "c10d", "fsdp", "_c10d_functional", "_c10d_functional_autograd",
    "symm_mem", "streams", "profiler", "rngprims", "debugprims", "export", "flex_lib",
    "static_runtime", "torchvision", "torchaudio",
}  # fmt: skip
"""Namespaces of torch's own operations; what these take for themselves is left alone."""


@dataclass(frozen=True)
class Operation:
    """What an operation does to memory, as far as it matters here."""

    fresh: str = ""
    grows: bool = False
    users: bool = False
    """Whether a kernel's own package registered it, so that it may take memory as a kernel does."""
    writes: tuple[tuple[int, str], ...] = ()
    """Position and name of the arguments that it writes to; none of those in Python, which are seen
    to write inside."""


KNOWN: dict[Any, Operation] = {}


def operation(func: Any) -> Operation:
    """Return what a torch operation (an OpOverload) does to memory."""
    known = KNOWN.get(func)
    if known is None:
        known = KNOWN[func] = _operation(func)
    return known


def _operation(func: Any) -> Operation:
    name, overload = func._opname, func._overloadname
    if func.namespace == "aten" and name in FRESH and "out" not in overload:
        return Operation(fresh=FRESH[name])
    if func.namespace == "aten" and name in GROWS and "out" not in overload:
        return Operation(grows=True)
    users = func.namespace not in TORCH
    path = f"{func.namespace}/{name}" + (f".{overload}" if overload != "default" else "")
    python = users and any(known.startswith(path + "/") for known in torch.library._impls)
    if python or name in MOVES_NOTHING:
        return Operation(users=users)
    arguments = enumerate(func._schema.arguments)
    writes = ((n, a.name) for n, a in arguments if a.alias_info and a.alias_info.is_write)
    return Operation(users=users, writes=tuple(writes))
