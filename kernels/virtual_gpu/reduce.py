"""Reductions and scans: exact where the order of combination cannot show, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from moe_parity.kernels.virtual_gpu.abreast import level
from moe_parity.kernels.virtual_gpu.builder import VirtualBuilder
from moe_parity.kernels.virtual_gpu.errors import UnmodelledOperation, unmodelled
from moe_parity.kernels.virtual_gpu.values import Array, Value, wrap

_standard = tl.standard
# Keys are the plain functions: hashing a JITFunction would read the source of all it refers to.
_EXTREMA = {_standard._elementwise_max.fn: "max", _standard._elementwise_min.fn: "min"}
_ARG = {
    _standard._argmax_combine_tie_break_left.fn: (np.argmax, True),
    _standard._argmax_combine_tie_break_fast.fn: (np.argmax, False),
    _standard._argmin_combine_tie_break_left.fn: (np.argmin, True),
    _standard._argmin_combine_tie_break_fast.fn: (np.argmin, False),
}
_SCANS: dict[Any, Callable[..., Array]] = {
    _standard._sum_combine.fn: np.cumsum,
    _standard._prod_combine.fn: np.cumprod,
}


def _name(combine: Any) -> str:
    return str(getattr(combine, "__name__", combine)).strip("_")


def reduce(builder: VirtualBuilder, inputs: Any, axis: Any, combine: Any, keep_dims: Any) -> Any:
    """``tl.reduce``: one tensor or a tuple of them, along ``axis`` or over all of it if None."""
    if isinstance(inputs, tl.tensor):
        return reduce(builder, (inputs,), axis, combine, keep_dims)[0]
    axis, keep_dims = (getattr(v, "value", v) for v in (axis, keep_dims))
    rank = len(inputs[0].shape)
    arrays = _together(inputs)
    arrays = [a if axis is not None else a.reshape(len(a), -1) for a in arrays]
    types = [t.dtype for t in inputs]
    along = 1 if axis is None else axis % rank + 1
    if combine.fn in _ARG:
        results = _arg(arrays, along, *_ARG[combine.fn])
    elif len(arrays) == 1 and combine.fn in _EXTREMA:
        results = [_extremum(builder, arrays[0], types[0], along, _EXTREMA[combine.fn])]
    elif any(t.is_floating() for t in types):
        unmodelled(
            f"a reduction of {', '.join(map(str, types))} by {_name(combine)}, whose order of "
            "additions the compiler chooses (tl.sum: add in a written order instead),"
        )
    elif len(arrays) == 1 and combine.fn is _standard._sum_combine.fn:
        results = [np.add.reduce(arrays[0], axis=along, dtype=arrays[0].dtype)]
    else:
        results = _fold(arrays, types, along, combine)
    if keep_dims:
        more = (1,) * rank if axis is None else None
        results = [
            r.reshape(-1, *more) if more else np.expand_dims(r, along)
            for r in map(np.asarray, results)
        ]
    return tuple(wrap(np.asarray(r), t) for r, t in zip(results, types, strict=True))


def _together(inputs: Any) -> list[Array]:
    """Return the arrays of several tensors, each for as many programs as the others."""
    arrays = [t.handle.data for t in inputs]
    programs = max(map(len, arrays))
    return [np.broadcast_to(a, (programs, *a.shape[1:])) for a in arrays]


def scan(inputs: Any, axis: Any, combine: Any, reverse: Any) -> Any:
    """``tl.associative_scan`` of integers: one tensor or a tuple of them, in order."""
    if isinstance(inputs, tl.tensor):
        return scan((inputs,), axis, combine, reverse)[0]
    axis, reverse = (getattr(v, "value", v) for v in (axis, reverse))
    types = [t.dtype for t in inputs]
    if any(t.is_floating() for t in types):
        unmodelled(f"a scan of {', '.join(map(str, types))} by {_name(combine)}")
    axis = axis % len(inputs[0].shape) + 1
    arrays = [np.flip(a, axis) if reverse else a for a in _together(inputs)]
    if combine.fn in _SCANS and len(arrays) == 1:
        results = [_SCANS[combine.fn](arrays[0], axis=axis, dtype=arrays[0].dtype)]
    else:
        steps = _steps(arrays, types, axis, combine)
        results = [np.stack(column, axis) for column in zip(*steps, strict=True)]
    if reverse:
        results = [np.flip(r, axis) for r in results]
    return tuple(wrap(r, t) for r, t in zip(results, types, strict=True))


def _extremum(builder: VirtualBuilder, data: Array, ty: Any, axis: int, name: str) -> Array:
    """Fold in halves: maximum and minimum do not depend on the order."""
    while data.shape[axis] > 1:
        half = data.shape[axis] // 2
        low, high, rest = np.split(data, [half, 2 * half], axis)
        if ty.is_floating():
            method = getattr(builder, f"create_{name}numf")
            data = method(Value(low, ty), Value(high, ty)).data
        else:
            data = (np.maximum if name == "max" else np.minimum)(low, high)
        data = np.concatenate([data, rest], axis) if rest.size else data
    return data.squeeze(axis)


def _arg(arrays: list[Array], axis: int, find: Callable[..., Any], leftmost: bool) -> list[Array]:
    """Find the extreme value and its index; the leftmost of equals, if that was asked."""
    values, indices = arrays
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise UnmodelledOperation(
            "tl.argmax or tl.argmin met a NaN, and where it ends depends on the order of "
            "comparison: replace NaN first."
        )
    at = np.expand_dims(find(values, axis=axis), axis)
    best = np.take_along_axis(values, at, axis)
    if not leftmost and ((values == best).sum(axis) > 1).any():
        raise UnmodelledOperation(
            "tl.argmax or tl.argmin with tie_break_left=False met equal values, and which one wins "
            "depends on the order of comparison: use tie_break_left=True."
        )
    return [best.squeeze(axis), np.take_along_axis(indices, at, axis).squeeze(axis)]


def _fold(arrays: list[Array], types: list[Any], axis: int, combine: Any) -> list[Array]:
    *_, last = _steps(arrays, types, axis, combine)
    return last


def _steps(arrays: list[Array], types: list[Any], axis: int, combine: Any) -> list[list[Array]]:
    """Combine slices along ``axis`` from the first to the last; return every partial result."""
    slices = [[np.take(a, n, axis) for a in arrays] for n in range(arrays[0].shape[axis])]
    partial = [slices[0]]
    for current in slices[1:]:
        operands = [
            wrap(np.asarray(x), t) for x, t in zip((*partial[-1], *current), types * 2, strict=True)
        ]
        result = combine(*operands)
        result = result if isinstance(result, tuple) else (result,)
        shape = current[0].shape
        found = (level(r.handle.data, current[0])[0] for r in result)
        partial.append([np.broadcast_to(data, shape) for data in found])
    return partial
