"""``launch``: run a ``@triton.jit`` kernel over its grid on CPU tensors, as an H200 would."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction, mangle_type

from moe_parity.kernels import described
from moe_parity.kernels.virtual_gpu import abreast, descriptors, language, lowering
from moe_parity.kernels.virtual_gpu.builder import VirtualBuilder
from moe_parity.kernels.virtual_gpu.errors import MemoryFault, Race, UnmodelledOperation
from moe_parity.kernels.virtual_gpu.memory import Memory
from moe_parity.kernels.virtual_gpu.order import Order, orders
from moe_parity.kernels.virtual_gpu.region import Region
from moe_parity.kernels.virtual_gpu.values import Value, numpy_type
from moe_parity.references.chips import Unit

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class LaunchReport:
    """What one launch did."""

    kernel: str
    grid: tuple[int, int, int]
    programs: int
    bytes_loaded: int
    """Unmasked lanes times element size; an atomic counts on both sides."""
    bytes_stored: int
    dot_unit: Unit | None
    """The tensor-core unit of the kernel's dots, or None if it ran none."""
    operations: tuple[str, ...]
    """Float operations used, each with the PTX it stands for, sorted."""


def launch(
    kernel: Any,
    grid: Grid,
    *args: Any,
    num_warps: int = 4,
    num_stages: int | None = None,
    order_seed: int | None = None,
    backwards: bool = False,
    **kwargs: Any,
) -> LaunchReport:
    """Interpret ``kernel`` over ``grid``; tensors are CPU tensors and are written in place.

    ``args`` and ``kwargs`` are the kernel's arguments and the compiler's options, as in
    ``kernel[grid](...)``; the result is what they give on an H200, with ``enable_fp_fusion=False``
    unless it is given (``contraction``).
    Programs run in ascending order (axis 0 fastest), or in another one drawn from ``order_seed``,
    or ``backwards``; the lanes of atomics go in that order as well.

    Raises UnmodelledOperation; OutOfBounds, Race and UnwrittenRead for what a kernel may not do to
    memory (``races``, ``kernels.written``); AssertionError for a failed device_assert; TypeError or
    ValueError for arguments a launch would refuse.
    """
    _check(kernel, args, kwargs)
    options = {name: kwargs.pop(name) for name in list(kwargs) if name not in kernel.arg_names}
    options |= {"num_warps": num_warps} | ({} if num_stages is None else {"num_stages": num_stages})
    bound = kernel.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    shape = _shape(grid, bound.arguments)
    programs, lanes = orders(order_seed, backwards)
    regions: list[Region] = []
    builder = VirtualBuilder(
        Memory(kernel.__name__, regions),
        num_warps=num_warps,
        read_unit=lambda: lowering.dot_unit(kernel, *args, **kwargs, **options),
        compiling=language.compiling,
        lanes=lanes,
        contract=bool(options.get("enable_fp_fusion")),
    )
    builder.grid = shape
    values = {p.name: _argument(p, bound.arguments[p.name], regions) for p in kernel.params}
    _run(kernel, builder, values, programs)
    return LaunchReport(
        kernel=kernel.__name__,
        grid=shape,
        programs=shape[0] * shape[1] * shape[2],
        bytes_loaded=builder.memory.bytes_loaded,
        bytes_stored=builder.memory.bytes_stored,
        dot_unit=builder.unit,
        operations=tuple(sorted(f"{name}: {text}" for name, text in builder.used.items())),
    )


def _check(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not isinstance(kernel, JITFunction):
        raise TypeError(
            f"launch takes a @triton.jit function, got {type(kernel).__name__}: dispatch takes one "
            "under an autotuner or heuristics, or pass the function under it (its .fn) with the "
            "chosen constexprs; and unset TRITON_INTERPRET, which replaces @triton.jit."
        )
    for value in (*args, *kwargs.values()):
        value = described.under(value)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise ValueError(
                f"launch of {kernel.__name__} got a tensor on {value.device}; the virtual GPU "
                "takes CPU tensors only (dispatch sends CUDA tensors to the real one)."
            )


def _shape(grid: Grid, arguments: dict[str, Any]) -> tuple[int, int, int]:
    sizes = tuple(int(n) for n in (grid(arguments) if callable(grid) else grid))
    if not 1 <= len(sizes) <= 3 or min(sizes) < 0:
        raise ValueError(f"a grid is one to three sizes of at least 0, got {sizes}.")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _argument(parameter: Any, value: Any, regions: list[Region]) -> Any:
    """Return an argument as the kernel's body sees it; tensors are added to ``regions``."""
    value = value.value if isinstance(value, tl.constexpr) else value
    if parameter.is_constexpr or value is None:
        return value
    return _runtime(parameter.name, parameter.annotation_type or "", value, regions)


def _runtime(name: str, annotated: str, value: Any, regions: list[Region]) -> Any:
    if isinstance(value, tuple):
        parts = [_runtime(f"{name}[{n}]", "", v, regions) for n, v in enumerate(value)]
        return tl.core.tuple(parts)
    if described.is_descriptor(value):
        return descriptors.from_host(value, _pointer(name, value.base, regions))
    if isinstance(value, torch.Tensor):
        pointer = _pointer(name, value, regions)
        return tl.tensor(pointer, pointer.dtype)
    if not isinstance(value, (bool, int, float)):
        raise TypeError(
            f"argument {name} is a {type(value).__name__}; the virtual GPU takes tensors, "
            "tensor descriptors, numbers, None, tuples of those, and anything as a constexpr."
        )
    ty = tl.str_to_ty(annotated or mangle_type(value), None)
    return tl.tensor(Value(np.array([value]).astype(numpy_type(ty)), ty), ty)


def _pointer(name: str, tensor: torch.Tensor, regions: list[Region]) -> Value:
    """Return a pointer to a tensor, which is added to ``regions``."""
    region = Region(name, tensor)
    regions.append(region)
    ty = tl.str_to_ty(mangle_type(tensor), None)
    return Value(np.array([tensor.data_ptr()], np.uint64), ty, region=region)


def _run(kernel: Any, builder: VirtualBuilder, values: dict[str, Any], order: Order) -> None:
    x, y, z = builder.grid
    try:
        # What the models compute with torch is not the kernel's: no mode of a caller looks at it.
        with language.active(builder), torch._C._DisableTorchDispatch():
            body = language.function(kernel)
            programs, races = order(x * y * z), builder.memory.exact
            if abreast.run(kernel, lambda: body(**values), builder, programs):
                return
            for number in programs[:, None]:
                builder.take(number)
                races.begin(builder.program)
                body(**values)
    except Race as error:  # names the lines of both
        raise error from None
    except (UnmodelledOperation, MemoryFault, AssertionError) as error:
        raise type(error)(f"{_place(kernel, builder, error)}: {error}") from None
    except Exception as error:
        error.add_note(f"{_place(kernel, builder, error)}, on the virtual GPU.")
        raise


def _place(kernel: Any, builder: VirtualBuilder, error: BaseException) -> str:
    """Name the kernel, the program and the innermost line of kernel source."""
    frames = traceback.extract_tb(error.__traceback__)
    here = next((f for f in frames if f.name == kernel.__name__), None)
    line = f" (line {here.lineno} of {here.filename.rsplit('/', 1)[-1]})" if here else ""
    return f"{kernel.__name__}{line}, program {builder.program}"
