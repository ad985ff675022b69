"""Tensor descriptors: what the GPU's tensor memory accelerator (TMA) loads and stores by.

A descriptor is a base, a shape, strides and the shape of a box.  A box may hang over the edges of
the shape on every side: elements outside load as zero, or as NaN where that was asked for, and are
not stored.  Elements inside the shape are accesses like any other (``memory``), in the tensor that
the base points into; a shape or stride that leads out of that tensor is OutOfBounds.

What hardware or Triton ask of a descriptor is checked where it is made, in a kernel or at a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from moe_parity.kernels.virtual_gpu.abreast import common
from moe_parity.kernels.virtual_gpu.errors import UnmodelledOperation
from moe_parity.kernels.virtual_gpu.memory import Memory
from moe_parity.kernels.virtual_gpu.values import Value, numpy_type

Array = np.ndarray[Any, Any]

ALIGNED = 16
"""Bytes: of the base, of the outer strides, and the least of an inner box and step of a box."""
WIDEST = 1 << 40
"""Bytes that a stride must be below."""
LARGEST = 1 << 20
"""Elements of a box, Triton's own bound."""

_NANS = {"fp16": 0x7FFF, "bf16": 0x7FFF, "fp32": 0x7FFFFFFF}
"""The NaN of the padding; like every NaN's, its payload is part of no claim."""


@dataclass(eq=False)
class Descriptor:
    """What a ``tl.tensor_descriptor`` holds here in place of an IR handle.

    ``base`` is a scalar pointer; ``shape`` and ``strides`` are in elements, ``box`` the shape of a
    block.  Raises ValueError for what no descriptor can be, UnmodelledOperation for what has no
    exact model.
    """

    base: Value
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    padded_with_nan: bool = False
    steps: tuple[Array, ...] = field(init=False)
    """For each axis the index inside the box, int64, in a shape that broadcasts to [1, *box]."""

    def __post_init__(self) -> None:
        """Check it."""
        self._check_form()
        self._check_memory()
        rank = len(self.box)
        self.steps = tuple(
            np.arange(n).reshape([1, *(-1 if a == axis else 1 for a in range(rank))])
            for axis, n in enumerate(self.box)
        )

    @property
    def element(self) -> Any:
        """The Triton type of an element."""
        return self.base.dtype.element_ty

    def _check_form(self) -> None:
        rank, size = len(self.box), numpy_type(self.element).itemsize
        if not 1 <= rank <= 5 or len(self.shape) != rank or len(self.strides) != rank:
            raise ValueError(
                f"a tensor descriptor has one to five dimensions, shape, strides and box alike, "
                f"got {len(self.shape)}, {len(self.strides)} and {rank}."
            )
        if any(n < 1 or n & (n - 1) for n in self.box) or prod(self.box) > LARGEST:
            raise ValueError(
                f"the box of a tensor descriptor must be powers of 2, at most {LARGEST} elements, "
                f"got {list(self.box)}."
            )
        if self.box[-1] * size < ALIGNED:
            raise ValueError(
                f"the box of a tensor descriptor must have at least {ALIGNED} bytes in its last "
                f"dimension, got {self.box[-1]} x {size} bytes."
            )
        if min(self.shape) < 1 or max(self.shape) >= 1 << 31:
            raise ValueError(
                f"the shape of a tensor descriptor must be positive, got {list(self.shape)}: make "
                "none for a tensor without elements."
            )

    def _check_memory(self) -> None:
        size = numpy_type(self.element).itemsize
        astray = self.base.data % np.uint64(ALIGNED)
        if self.strides[-1] != 1:
            raise ValueError(
                "the last stride of a tensor descriptor must be 1, got strides "
                f"{list(self.strides)}: hand over contiguous rows."
            )
        if any(not 0 < n * size < WIDEST or n * size % ALIGNED for n in self.strides[:-1]):
            raise ValueError(
                f"the outer strides of a tensor descriptor must be positive multiples of {ALIGNED} "
                f"bytes below 2^40, got {list(self.strides)} elements of {size} bytes: pad the "
                "rows."
            )
        if astray.any():
            of = "" if self.base.region is None else f" in {self.base.region}"
            raise ValueError(
                f"the base of a tensor descriptor must be aligned to {ALIGNED} bytes, and lies "
                f"{int(astray.max())} past that{of}."
            )
        if self.padded_with_nan and self.element.name not in _NANS:
            raise UnmodelledOperation(
                f"a tensor descriptor of {self.element} padded with NaN has no exact model of an "
                "H200, which has NaN for fp16, bf16 and fp32 alone: pad with zero."
            )

    def padding(self) -> Array | None:
        """Return what elements outside load as, as Triton's element is held; None for zero."""
        if not self.padded_with_nan:
            return None
        kind = numpy_type(self.element)
        return np.array([_NANS[self.element.name]], f"u{kind.itemsize}").view(kind)

    def at(self, offsets: Sequence[Array]) -> tuple[Value, Array | None]:
        """Return the pointers of the box at ``offsets``, and which lanes lie inside the shape.

        An offset is int64 [programs]; None for all lanes; lanes outside have an address without
        meaning.
        """
        size = numpy_type(self.element).itemsize
        if (offsets[-1] * size % ALIGNED).any():
            raise UnmodelledOperation(
                f"a tensor descriptor's box at {[int(n[0]) for n in offsets]}: Triton asks for a "
                f"last offset in multiples of {ALIGNED} bytes, and what the GPU does with others "
                "has no model here."
            )
        inside: Array | None = None
        rank = len(self.box)
        address = np.zeros((1,) * (rank + 1), np.int64)
        for start, steps, length, stride in zip(
            offsets, self.steps, self.shape, self.strides, strict=True
        ):
            index = steps + start.reshape(-1, *[1] * rank)
            address = address + index * (stride * size)
            if start.min() < 0 or start.max() + steps.size > length:
                lanes = (index >= 0) & (index < length)
                inside = lanes if inside is None else inside & lanes
        pointers = self.base.data.reshape(-1, *[1] * rank) + address.view(np.uint64)
        if inside is not None:
            inside = np.broadcast_to(inside, (len(inside), *self.box))
        return Value(pointers, self.base.dtype, region=self.base.region), inside


class DescriptorOperations:
    """The builder's part for descriptors; gather, scatter and reductions have no model."""

    memory: Memory

    def create_make_tensor_descriptor(
        self, base: Value, shape: Sequence[Value], strides: Sequence[Value], box: Sequence[int],
        _signed: bool, padding: Any, *_: Any,
    ) -> Descriptor:  # fmt: skip
        """``tl.make_tensor_descriptor``."""
        return Descriptor(
            base, tuple(common(*(n.data for n in shape))),
            tuple(common(*(n.data for n in strides))), tuple(int(n) for n in box),
            padding == ir.PADDING_OPTION.PAD_NAN,
        )  # fmt: skip

    def create_descriptor_load(
        self, descriptor: Descriptor, offsets: Sequence[Value], *_: Any
    ) -> Value:
        """Load a box."""
        pointers, inside = descriptor.at(_offsets(offsets))
        kind = numpy_type(descriptor.element)
        data = self.memory.load(pointers, inside, descriptor.padding(), kind)
        return Value(data, descriptor.element)

    def create_descriptor_store(
        self, descriptor: Descriptor, value: Value, offsets: Sequence[Value], *_: Any
    ) -> None:
        """Store a box."""
        pointers, inside = descriptor.at(_offsets(offsets))
        self.memory.store(pointers, value.data, inside)


def _offsets(values: Sequence[Value]) -> list[Array]:
    return [value.data.reshape(-1).astype(np.int64) for value in values]


def from_host(value: Any, base: Value) -> Any:
    """Return a ``TensorDescriptor`` argument as the kernel's body sees it; ``base`` points to it.

    Checked again, since a hook may have changed the object after it was made.
    """
    if getattr(value, "round_f32_to_tf32", False):
        raise UnmodelledOperation(
            "a tensor descriptor that rounds fp32 to TF32 has no exact model of an H200: load "
            "fp32 as it is."
        )
    shape, strides = (tuple(int(n) for n in row) for row in (value.shape, value.strides))
    box = tuple(int(n) for n in value.block_shape)
    handle = Descriptor(base, shape, strides, box, value.padding == "nan")
    return tl.tensor_descriptor(
        handle,
        [_scalar(n, tl.int32) for n in shape],
        [_scalar(n, tl.int64) for n in strides],
        tl.block_type(handle.element, list(box)),
    )


def _scalar(number: int, ty: Any) -> Any:
    return tl.tensor(Value(np.array([number], numpy_type(ty)), ty), ty)
