"""Atomics: one lane after another, on integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton._C.libtriton import ir

from moe_parity.kernels.virtual_gpu import abreast
from moe_parity.kernels.virtual_gpu.errors import unmodelled
from moe_parity.kernels.virtual_gpu.memory import Memory
from moe_parity.kernels.virtual_gpu.order import Order
from moe_parity.kernels.virtual_gpu.values import Array, Value

_ATOMICS: dict[Any, Callable[[Array, Array], Array]] = {
    ir.ATOMIC_OP.ADD: np.add,
    ir.ATOMIC_OP.AND: np.bitwise_and,
    ir.ATOMIC_OP.OR: np.bitwise_or,
    ir.ATOMIC_OP.XOR: np.bitwise_xor,
    ir.ATOMIC_OP.MAX: np.maximum,
    ir.ATOMIC_OP.UMAX: np.maximum,
    ir.ATOMIC_OP.MIN: np.minimum,
    ir.ATOMIC_OP.UMIN: np.minimum,
    ir.ATOMIC_OP.XCHG: lambda _, new: new,
}

_PROMISES = {
    ir.MEM_SEMANTIC.RELAXED: "relaxed",
    ir.MEM_SEMANTIC.ACQUIRE: "acquire",
    ir.MEM_SEMANTIC.RELEASE: "release",
    ir.MEM_SEMANTIC.ACQUIRE_RELEASE: "acq_rel",
}


class AtomicOperations:
    """The builder's part for atomics; those on floats round in an unknown order."""

    memory: Memory
    lanes: Order

    def create_atomic_rmw(
        self, op: Any, pointer: Value, value: Value, mask: Value, sem: Any, *_: Any
    ) -> Value:
        """Atomics on integers; those on floats round in an unknown order."""
        if op not in _ATOMICS or not value.dtype.is_int():
            unmodelled(f"tl.atomic_{str(op).split('.')[-1].lower()} on {value.dtype}")
        data, promise = value.data, _PROMISES[sem]
        old = self.memory.update(pointer, data, mask.data, _ATOMICS[op], self.lanes, promise)
        return Value(old, value.dtype)

    def create_atomic_cas(
        self, pointer: Value, expected: Value, value: Value, sem: Any, *_: Any
    ) -> Value:
        """``tl.atomic_cas`` on one integer."""
        abreast.alone("tl.atomic_cas", pointer, expected, value)
        if not value.dtype.is_int() or pointer.data.size != 1:
            unmodelled(f"tl.atomic_cas on {pointer.data.size} elements of {value.dtype}")

        def swap(old: Array, new: Array) -> Array:
            return np.where(old == expected.data, new, old)

        old = self.memory.update(pointer, value.data, None, swap, np.arange, _PROMISES[sem])
        return Value(old, value.dtype)
