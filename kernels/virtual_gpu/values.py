"""A value inside an interpreted kernel, and how Triton's types are held in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl

from moe_parity.kernels.virtual_gpu.region import Region

Array = np.ndarray[Any, Any]

_NUMPY = {
    "int1": np.bool_, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64,
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64,
    # Held as their bits.
    "bf16": np.uint16, "fp8e4nv": np.uint8, "fp8e5": np.uint8, "fp8e4b8": np.uint8,
    "fp8e5b16": np.uint8, "fp8e4b15": np.uint8,
}  # fmt: skip

_SIGNATURE = {
    "int1": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
}  # fmt: skip


def numpy_type(ty: Any) -> np.dtype[Any]:
    """Return the numpy dtype that holds one element of a Triton type (block, pointer or scalar)."""
    scalar = ty.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else np.dtype(_NUMPY[scalar.name])


def signature_name(ty: Any) -> str:
    """Return a scalar Triton type as kernel signatures spell it: ``i32``, ``bf16`` ..."""
    return _SIGNATURE.get(ty.name, str(ty.name))


@dataclass(slots=True, frozen=True)
class Product:
    """A product before its rounding, to be contracted with an addition into an FMA."""

    factors: tuple[Value, Value] | None
    """None where the product was reshaped or is the end of a longer sequence."""
    block: int
    """The stretch of straight-line code it was computed in."""


@dataclass(slots=True)
class Value:
    """What a ``tl.tensor`` holds here in place of an IR handle.

    ``data`` is [programs, *shape of the block], and [programs] for a scalar: the first axis has the
    programs that run as one (``abreast``), or 1 where all of them have the same value.  ``dtype``
    is the scalar or pointer type.
    """

    data: Array
    dtype: Any
    constant: bool = False
    """Known to the compiler, which may fold it or choose another instruction."""
    region: Region | None = None
    """For pointers: the tensor it was derived from, if that is one tensor."""
    product: Product | None = None
    """Where contraction is on: the factors, if this is a product that an addition may absorb."""


def wrap(data: Array, dtype: Any) -> Any:
    """Return ``data`` [programs, *shape] as a ``tl.tensor``: a scalar without further axes."""
    if data.ndim == 1:
        return tl.tensor(Value(data, dtype), dtype)
    return tl.tensor(Value(data, dtype), tl.block_type(dtype, list(data.shape[1:])))
