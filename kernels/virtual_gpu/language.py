"""Triton's language for the time of one launch: its builtins drive a ``VirtualBuilder``.

Outside a compiler a builtin such as ``tl.load`` refuses to run, since nobody hands it a
``_semantic``, and a ``@triton.jit`` function refuses to be called.  While ``active`` is entered,
builtins get the semantic of the launch, and device functions run as rewritten Python.  Everything
is put back on leaving, also after an exception, and for the time the compiler itself runs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import cuda, libdevice
from triton.runtime.jit import JITFunction

from moe_parity.kernels.virtual_gpu.builder import VirtualBuilder
from moe_parity.kernels.virtual_gpu.meaning import BUILTINS, LANGUAGE, SEMANTIC, TENSOR, Helpers
from moe_parity.kernels.virtual_gpu.rewrite import HELPERS, rewritten

Replacement = tuple[Any, str, Any]

_LOCK = threading.Lock()
_ABSENT = object()
_undo: list[Replacement] = []
_functions: dict[Any, Callable[..., Any]] = {}
"""Device functions instantiated during the present launch."""


@contextmanager
def active(builder: VirtualBuilder) -> Iterator[None]:
    """Let Triton's language drive ``builder``; one launch at a time in a process."""
    with _LOCK:
        SEMANTIC.builder = builder
        _undo[:] = _swap(_replacements())
        try:
            with np.errstate(all="ignore"):
                yield
        finally:
            _swap(_undo)
            _undo.clear()
            _functions.clear()
            SEMANTIC.builder = None


@contextmanager
def compiling() -> Iterator[None]:
    """Put Triton back as it was, so that its compiler can run in the middle of a launch."""
    redo = _swap(list(_undo))
    try:
        yield
    finally:
        _swap(redo)


def function(kernel: Any) -> Callable[..., Any]:
    """Return a JITFunction as a Python function; its globals are a copy of its module's."""
    # A JITFunction hashes its source and whatever that refers to; the plain function does not.
    if kernel.fn not in _functions:
        names = {name: _inside(value) for name, value in kernel.get_capture_scope().items()}
        for name, value in BUILTINS.items():
            names.setdefault(name, value)
        names[HELPERS] = Helpers
        body = FunctionType(rewritten(kernel), names, kernel.__name__, kernel.fn.__defaults__)
        body.__kwdefaults__ = kernel.fn.__kwdefaults__
        _functions[kernel.fn] = body
    return _functions[kernel.fn]


def _inside(value: Any) -> Any:
    """Return what a global of a kernel's module means inside the kernel."""
    if tl.core.is_builtin(value):
        return _bound(value)
    if isinstance(value, FunctionType) and value.__module__ == libdevice.__name__:
        return _bound(getattr(cuda.libdevice, value.__name__))
    return value


def _swap(replacements: list[Replacement]) -> list[Replacement]:
    """Set attributes; return the replacements that undo it."""
    undo = []
    for target, name, value in replacements:
        undo.append((target, name, vars(target).get(name, _ABSENT)))
        if value is _ABSENT:
            delattr(target, name)
        else:
            setattr(target, name, value)
    return undo[::-1]


@cache
def _bound(member: Any) -> Callable[..., Any]:
    """Return a builtin with the launch's semantic filled in."""
    inner = getattr(member, "__wrapped__", member)

    def builtin(*arguments: Any, **keywords: Any) -> Any:
        keywords["_semantic"] = SEMANTIC
        return inner(*arguments, **keywords)

    return builtin


def _takes_semantic(member: Any) -> bool:
    return inspect.isfunction(member) and "_semantic" in inspect.signature(member).parameters


def _method(kernel: Any) -> Callable[..., Any]:
    return lambda *arguments, **keywords: kernel(*arguments, **keywords)


def _call(kernel: Any, *arguments: Any, **keywords: Any) -> Any:
    """Stand in for ``JITFunction.__call__``: a call of a device function."""
    return function(kernel)(*arguments, **keywords)


_made: dict[tuple[int, ...], dict[str, Any]] = {}
"""Shape -> the attributes of a tensor that follow from it."""
_make = tl.tensor.__init__
_with = tl.block_type.with_element_ty


def _initialized(tensor: Any, handle: Any, ty: Any) -> None:
    """Stand in for ``tl.tensor.__init__``: what follows from a shape is made once."""
    shape = tuple(ty.shape.values) if ty.is_block() else ()
    known = _made.get(shape)
    if known is None:
        _make(tensor, handle, ty)
        own = ("handle", "type", "dtype")
        _made[shape] = {name: value for name, value in vars(tensor).items() if name not in own}
        return
    attributes = tensor.__dict__
    attributes.update(known)
    attributes["handle"], attributes["type"], attributes["dtype"] = handle, ty, ty.scalar


def _with_element_ty(ty: Any, scalar: Any) -> Any:
    """Stand in for ``tl.block_type.with_element_ty``: each type of a block is made once."""
    known = ty.__dict__.setdefault("_with_element_ty", {})
    # the type made holds the scalar type, whose id stays its own
    if id(scalar) not in known:
        known[id(scalar)] = _with(ty, scalar)
        known[id(scalar)].shape = ty.shape  # what is broadcast is told by it
    return known[id(scalar)]


@lru_cache(maxsize=1)
def _replacements() -> list[Replacement]:
    """List what ``active`` sets; read once, while nothing is replaced."""
    found: list[Replacement] = []
    for target in (tl, tl.core, tl.math, cuda, cuda.libdevice):
        members = vars(target).items()
        found += [
            (target, n, _bound(member)) for n, member in members if tl.core.is_builtin(member)
        ]
    for name, member in vars(cuda.libdevice).items():
        if tl.core.is_builtin(member) and hasattr(libdevice, name):
            found.append((libdevice, name, _bound(member)))
    for name, member in vars(tl.core.tensor_descriptor_base).items():
        if tl.core.is_builtin(member):
            found.append((tl.core.tensor_descriptor_base, name, _bound(member)))
    for name, member in vars(tl.tensor).items():
        if tl.core.is_builtin(member) or _takes_semantic(member):
            found.append((tl.tensor, name, _bound(member)))
        elif isinstance(member, JITFunction):
            found.append((tl.tensor, name, _method(member)))
    found += [(tl.tensor, name, value) for name, value in TENSOR.items()]
    found += [(target, n, value) for target in (tl, tl.core) for n, value in LANGUAGE.items()]
    types = (tl.dtype, tl.block_type, tl.pointer_type)
    found += [(ty, "to_ir", lambda self, _: self) for ty in types]
    found.append((tl.tensor, "__init__", _initialized))
    found.append((tl.block_type, "with_element_ty", _with_element_ty))
    return [*found, (JITFunction, "__call__", _call)]
