"""``dispatch``: the way our kernels are launched, on a GPU or here; and the tape of launches.

A tape is what a CUDA graph is on the GPU: the launches with their host scalars as they were, to be
run again on whatever the same tensors then hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch

from moe_parity.kernels import described
from moe_parity.kernels.choice import chosen
from moe_parity.kernels.virtual_gpu.launcher import Grid, LaunchReport, launch
from moe_parity.kernels.virtual_gpu.tuned import is_tuned, resolved


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One recorded launch; tensors by reference, everything else as it was."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> LaunchReport | None:
        """Launch; return the report of a virtual launch, None after a real one."""
        if _on_gpu(self.args) or _on_gpu(tuple(self.options.values())):
            self.kernel[self.grid](*self.args, **{"enable_fp_fusion": False, **self.options})
            return None
        return launch(self.kernel, self.grid, *self.args, **_ordered(), **self.options)


@dataclass
class Tape:
    """The launches made inside ``record()``, in order, with their reports."""

    launches: list[Launch] = field(default_factory=list)
    reports: list[LaunchReport | None] = field(default_factory=list)

    def replay(self) -> list[LaunchReport | None]:
        """Run the launches again: the same host scalars and grids, the same tensors."""
        return [item.run() for item in self.launches]


_tapes: ContextVar[tuple[Tape, ...]] = ContextVar("tapes", default=())
_order: ContextVar[Iterator[dict[str, Any]] | None] = ContextVar("order", default=None)
"""How each launch orders its programs, as options of ``launch``."""
_inside: ContextVar[bool] = ContextVar("inside", default=False)
_dry: ContextVar[bool] = ContextVar("dry", default=False)


def dispatch(kernel: Any, grid: Grid, *args: Any, **options: Any) -> LaunchReport | None:
    """Launch ``kernel``: CUDA tensors on their GPU, CPU tensors on the virtual one.

    ``options`` are keyword arguments of the kernel and of the compiler; contraction into FMAs is
    off on both sides.  The launch is recorded on every open tape.

    Under ``@triton.heuristics`` and ``@triton.autotune`` the heuristics are evaluated and the
    first configuration is taken, another one inside ``configured``; on a GPU Triton tunes, unless
    a configuration is chosen or the launch is recorded.
    """
    if is_tuned(kernel):
        choice = chosen()
        on_gpu = _on_gpu(args) or _on_gpu(tuple(options.values()))
        if on_gpu and (choice is None or choice.tuned is None) and not _tapes.get():
            kernel[grid](*args, **{"enable_fp_fusion": False, **options})  # Triton itself tunes
            return None
        kernel, options = resolved(kernel, args, options)
    if callable(grid):
        bound = kernel.signature.bind_partial(
            *args, **{name: v for name, v in options.items() if name in kernel.arg_names}
        )
        bound.apply_defaults()
        grid = grid(bound.arguments)
    item = Launch(kernel=kernel, grid=tuple(grid), args=args, options=dict(options))
    report = None if _dry.get() else _run(item)
    for tape in _tapes.get():
        tape.launches.append(item)
        tape.reports.append(report)
    return report


def _run(item: Launch) -> LaunchReport | None:
    token = _inside.set(True)
    try:
        return item.run()
    finally:
        _inside.reset(token)


def launching() -> bool:
    """Whether a launch is running: what torch is asked for then is the machine's own business."""
    return _inside.get()


@contextmanager
def dry() -> Iterator[None]:
    """Record launches without running them, for what can be told of their arguments alone."""
    token = _dry.set(True)
    try:
        yield
    finally:
        _dry.reset(token)


@contextmanager
def record() -> Iterator[Tape]:
    """Record the launches made through ``dispatch``; tapes may be nested."""
    tape = Tape()
    token = _tapes.set((*_tapes.get(), tape))
    try:
        yield tape
    finally:
        _tapes.reset(token)


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Run the programs of every launch on the virtual GPU in an order drawn from ``seed``.

    Where a launch has more than one program, it is never the ascending order.
    """
    with _orders({"order_seed": n} for n in range(seed << 16, (seed + 1) << 16)):
        yield


@contextmanager
def reversed_order() -> Iterator[None]:
    """Run the programs of every launch on the virtual GPU from the last to the first."""
    with _orders(repeat({"backwards": True})):
        yield


@contextmanager
def _orders(each: Iterator[dict[str, Any]]) -> Iterator[None]:
    token = _order.set(each)
    try:
        yield
    finally:
        _order.reset(token)


def _ordered() -> dict[str, Any]:
    each = _order.get()
    return {} if each is None else next(each)


def _on_gpu(values: tuple[Any, ...]) -> bool:
    under = map(described.under, values)
    return any(isinstance(v, torch.Tensor) and v.is_cuda for v in under)
