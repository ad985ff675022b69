"""Operations for which numpy is exact: constants, integers, pointers, shapes.

Method names and arguments are those that ``triton.language.semantic`` calls on its IR builder; the
versions differ in trailing cache and eviction arguments, which are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import triton.language as tl

from moe_parity.kernels.virtual_gpu.abreast import alone, level
from moe_parity.kernels.virtual_gpu.errors import UnmodelledOperation
from moe_parity.kernels.virtual_gpu.memory import Memory
from moe_parity.kernels.virtual_gpu.models import f32_to_bf16
from moe_parity.kernels.virtual_gpu.values import Value, numpy_type

Binary = Callable[[Any, Value, Value], Value]


def _level(a: Any, b: Any) -> tuple[Any, ...]:
    return (a, b) if a.ndim == b.ndim else level(a, b)


def _elementwise(function: Callable[[Any, Any], Any]) -> Binary:
    def method(_: Any, a: Value, b: Value) -> Value:
        data = function(*_level(a.data, b.data))
        return Value(np.asarray(data).astype(a.data.dtype, copy=False), a.dtype)

    return method


def _test(function: Callable[[Any, Any], Any]) -> Binary:
    def method(_: Any, a: Value, b: Value) -> Value:
        return Value(np.asarray(function(*_level(a.data, b.data))), tl.int1)

    return method


def _quotient(a: Any, b: Any) -> Any:
    """Divide integers toward zero; by zero gives all ones, PTX leaves it open."""
    safe = np.where(b == 0, np.ones_like(b), b)
    ones = np.array(-1).astype(a.dtype) if a.dtype.kind == "i" else np.array(np.iinfo(a.dtype).max)
    return np.where(b == 0, ones, (a - np.fmod(a, safe)) // safe)


def _remainder(a: Any, b: Any) -> Any:
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, np.ones_like(b), b)))


def _logical_shift(a: Any, b: Any) -> Any:
    unsigned = a.view(np.dtype(f"u{a.dtype.itemsize}"))
    return np.right_shift(unsigned, b.astype(unsigned.dtype)).view(a.dtype)


def _high_product(a: Any, b: Any) -> Any:
    bits = 8 * a.dtype.itemsize
    a, b = (x.view(f"u{x.dtype.itemsize}").astype(object) for x in (a, b))
    return ((a * b) >> bits).astype(f"u{bits // 8}")


class PlainOperations:
    """The part of the builder that needs no model."""

    memory: Memory

    # constants ---------------------------------------------------------------------------------

    def get_null_value(self, ty: Any) -> Value:
        """Return zero of a type."""
        return Value(np.zeros(1, numpy_type(ty)), ty.scalar, constant=True)

    def get_all_ones_value(self, ty: Any) -> Value:
        """Return the integer whose bits are all set, or True."""
        kind = numpy_type(ty)
        ones = np.ones(1, bool) if kind == np.bool_ else np.array([-1]).astype(kind)
        return Value(ones, ty.scalar, constant=True)

    def get_fp32(self, value: float) -> Value:
        """Return an fp32 constant."""
        return Value(np.array([value], np.float32), tl.float32, constant=True)

    def get_fp16(self, value: float) -> Value:
        """Return an FP16 constant."""
        return Value(np.array([value], np.float32).astype(np.float16), tl.float16, constant=True)

    def get_bf16(self, value: float) -> Value:
        """Return a BF16 constant."""
        return Value(f32_to_bf16(np.array([value], np.float32)), tl.bfloat16, constant=True)

    def get_cache_policy(self, *_: Any) -> None:
        """Return nothing: caches do not change values."""

    def get_block_ty(self, ty: Any, shape: Sequence[int]) -> Any:
        """Return a block type."""
        return tl.block_type(ty, list(shape))

    def get_ptr_ty(self, ty: Any, space: int) -> Any:
        """Return a pointer type."""
        return tl.pointer_type(ty, space)

    # integers ----------------------------------------------------------------------------------

    create_add = _elementwise(np.add)
    create_sub = _elementwise(np.subtract)
    create_mul = _elementwise(np.multiply)
    create_and = _elementwise(np.bitwise_and)
    create_or = _elementwise(np.bitwise_or)
    create_xor = _elementwise(np.bitwise_xor)
    create_shl = _elementwise(np.left_shift)
    create_ashr = _elementwise(np.right_shift)
    create_lshr = _elementwise(_logical_shift)
    create_sdiv = create_udiv = _elementwise(_quotient)
    create_srem = create_urem = _elementwise(_remainder)
    create_minsi = create_minui = _elementwise(np.minimum)
    create_maxsi = create_maxui = _elementwise(np.maximum)
    create_umulhi = _elementwise(_high_product)
    create_icmpSLE = create_icmpULE = _test(np.less_equal)  # noqa: N815
    create_icmpSLT = create_icmpULT = _test(np.less)  # noqa: N815
    create_icmpSGE = create_icmpUGE = _test(np.greater_equal)  # noqa: N815
    create_icmpSGT = create_icmpUGT = _test(np.greater)  # noqa: N815
    create_icmpEQ = _test(np.equal)  # noqa: N815
    create_icmpNE = _test(np.not_equal)  # noqa: N815

    def create_iabs(self, a: Value) -> Value:
        """Integer magnitude; the smallest integer stays itself."""
        return Value(np.abs(a.data), a.dtype)

    def create_int_cast(self, a: Value, ty: Any, _signed: bool) -> Value:
        """Convert between integers, modulo the width of the result."""
        return Value(a.data.astype(numpy_type(ty)), ty.scalar, a.constant)

    def create_make_range(self, _ty: Any, start: int, stop: int) -> Value:
        """``tl.arange``."""
        return Value(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_histogram(self, a: Value, bins: int, mask: Value | None) -> Value:
        """Count int32 values; one outside the bins raises, since what the GPU does is unknown."""
        alone("tl.histogram", a, mask)
        values = a.data if mask is None else a.data[mask.data]
        if values.size and (values.min() < 0 or values.max() >= bins):
            raise UnmodelledOperation(
                f"tl.histogram met {values.min()}..{values.max()} with {bins} bins; values outside "
                "the bins are not modelled: mask them off."
            )
        return Value(np.bincount(values.ravel(), minlength=bins).astype(np.int32)[None], tl.int32)

    # pointers and bits -------------------------------------------------------------------------

    def create_addptr(self, pointer: Value, offset: Value) -> Value:
        """Move a pointer by elements, in 64 bits."""
        size = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
        step = offset.data.astype(np.uint64) * np.uint64(size)
        data = np.add(*_level(pointer.data, step))
        return Value(data, pointer.dtype, region=pointer.region)

    def create_bitcast(self, a: Value, ty: Any) -> Value:
        """Reinterpret bits, or a pointer's element type."""
        data = a.data if ty.scalar.is_ptr() else a.data.view(numpy_type(ty))
        return Value(data, ty.scalar, a.constant, a.region)

    def create_ptr_to_int(self, a: Value, ty: Any) -> Value:
        """Return an address as an integer; it no longer knows its tensor."""
        return Value(a.data.view(numpy_type(ty)), ty.scalar)

    create_int_to_ptr = create_ptr_to_int

    def create_select(self, condition: Value, a: Value, b: Value) -> Value:
        """``tl.where``: moves bits."""
        region = a.region if a.region is b.region else None
        return Value(np.where(*level(condition.data, a.data, b.data)), a.dtype, region=region)

    # shapes ------------------------------------------------------------------------------------

    @staticmethod
    def _shaped(a: Value, data: Any) -> Value:
        moved = None if a.product is None else replace(a.product, factors=None)
        return Value(data, a.dtype, a.constant, a.region, moved)

    def _large(self, data: Any, shape: Sequence[int]) -> Any:
        if len(data) > 1:
            self.memory.fits(prod(shape))
        return _stretched(data, shape)

    def create_splat(self, ty: Any, a: Value) -> Value:
        """Fill a block with a scalar; no copy is made."""
        return self._shaped(a, self._large(a.data.reshape(-1, *[1] * len(ty.shape)), ty.shape))

    def create_unsplat(self, a: Value) -> Value:
        """Return the only element."""
        return self._shaped(a, a.data.reshape(-1))

    def create_broadcast(self, a: Value, shape: Sequence[int]) -> Value:
        """Stretch dimensions of size 1; no copy is made."""
        return self._shaped(a, self._large(a.data, shape))

    def create_expand_dims(self, a: Value, axis: int) -> Value:
        """Insert a dimension of size 1."""
        return self._shaped(a, np.expand_dims(a.data, axis + 1))

    def create_reshape(self, a: Value, shape: Sequence[int], can_reorder: bool) -> Value:
        """Reshape in row-major order; where the compiler may reorder, the result is not known."""
        if can_reorder and max(len(shape), a.data.ndim - 1) > 1:
            raise UnmodelledOperation(
                "a reshape with can_reorder=True (tl.view, tl.ravel) leaves the order of elements "
                "to the compiler, so it is not modelled: use tl.reshape."
            )
        return self._shaped(a, a.data.reshape(-1, *shape))

    def create_trans(self, a: Value, order: Sequence[int]) -> Value:
        """Permute dimensions."""
        return self._shaped(a, np.transpose(a.data, (0, *(n + 1 for n in order))))

    def create_join(self, a: Value, b: Value) -> Value:
        """Stack two blocks along a new last dimension."""
        return Value(np.stack(np.broadcast_arrays(a.data, b.data), axis=-1), a.dtype)

    def create_split(self, a: Value) -> tuple[Value, Value]:
        """Take the two halves of a last dimension of size 2."""
        return Value(a.data[..., 0], a.dtype), Value(a.data[..., 1], a.dtype)

    def create_gather(self, a: Value, index: Value, axis: int) -> Value:
        """``tl.gather``; an index outside the axis raises."""
        if index.data.size and not (
            index.data.min() >= 0 and index.data.max() < a.data.shape[axis + 1]
        ):
            raise UnmodelledOperation(
                f"tl.gather met an index outside 0..{a.data.shape[axis + 1] - 1}, which the GPU "
                "leaves undefined: clamp the indices."
            )
        programs = max(len(a.data), len(index.data))
        data, at = (_stretched(x, x.shape[1:], programs) for x in (a.data, index.data))
        return Value(np.take_along_axis(data, at, axis + 1), a.dtype)


def _stretched(data: Any, shape: Sequence[int], programs: int | None = None) -> Any:
    return np.broadcast_to(data, (len(data) if programs is None else programs, *shape))


def _type(name: str) -> Callable[[Any], Any]:
    return lambda _: getattr(tl, name)


def _integer(name: str) -> Callable[[Any, int], Value]:
    ty = getattr(tl, name)

    def method(_: Any, value: int) -> Value:
        return Value(np.array([value]).astype(numpy_type(ty)), ty, constant=True)

    return method


for _name in ("int1", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))):
    setattr(PlainOperations, f"get_{_name}", _integer(_name))
    setattr(PlainOperations, f"get_{_name}_ty", _type(_name))
