"""What stands for a CUDA graph on a CPU: every op and launch of a call, to be run again as it was.

Tensors are kept by reference and host scalars as they were; a result is copied to where it lay, as
a graph's addresses never change.  ``torch.empty`` leaves its memory as it is.  What looks at a
tensor's values on the host cannot be in a graph: it is noted with the line that did it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from moe_parity.kernels import described

READS = {"tolist", "numpy", "__array__", "__dlpack__", "cpu"}
"""Methods that look at values and that no op shows."""
HOST = {"tensor", "as_tensor", "from_numpy", "frombuffer"}
"""Functions that make a tensor of the host's numbers."""
LEFT = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
"""Ops whose memory holds whatever it held."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Something that waits for the GPU, or would if the tensors were there."""

    what: str
    """The op: ``item``, ``nonzero``, ``cpu``."""
    file: str
    line: int
    copies: bool = False
    """Whether it only copies from the host: values that a graph would keep as they were."""

    @property
    def words(self) -> str:
        """In words that follow ``its call``."""
        verb = "copies from the host" if self.copies else "waits for the GPU"
        return f"{verb} at line {self.line} of {self.file} ({self.what})"


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op that was run; its new results are where it puts them."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor | None, ...]
    """A tensor for each result that is new memory, None for one that lies in an argument."""

    @property
    def name(self) -> str:
        """Its name without the namespace."""
        return str(self.function.overloadpacket.__name__)

    def run(self) -> None:
        """Run it again."""
        made = self.function(*self.args, **self.kwargs)
        for kept, new in zip(self.results, made if _many(made) else (made,), strict=True):
            if kept is not None:
                kept.copy_(new)


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A tensor of memory that the recording does not keep alive, as a graph does not."""

    storage: StorageWeakRef
    address: int
    like: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]

    @property
    def lost(self) -> bool:
        """Whether nobody else holds the memory."""
        return bool(self.storage.expired())

    @staticmethod
    def of(tensor: Tensor) -> Gone:
        """Return the tensor without a hold on its memory."""
        offset = int(tensor.storage_offset())
        where = (tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)
        weak = StorageWeakRef(tensor.untyped_storage())
        return Gone(storage=weak, address=address_of(tensor), like=where)

    def over(self, memory: Tensor) -> Tensor:
        """Return the tensor on other memory, bytes."""
        dtype, shape, strides, offset = self.like
        return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, shape, strides)

    def back(self) -> Tensor:
        """Return the tensor; its memory must still be there."""
        made = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return self.over(torch.empty(0, dtype=torch.uint8).set_(made))


class Recording:
    """The ops and launches of one call, in order."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        """``Op`` and launches."""
        self.owned: dict[int, Tensor] = {}
        """New memory by the address of its storage."""
        self.waits: list[Wait] = []
        self.gone: dict[int, Gone] = {}

    @property
    def stops(self) -> Wait | None:
        """The first thing that cannot be in a graph."""
        return next((wait for wait in self.waits if not wait.copies), None)

    def poison(self, byte: int) -> None:
        """Fill all memory that the call took."""
        for tensor in self.owned.values():
            memory_of(tensor).fill_(byte)

    def let_go(self, kept: set[int]) -> None:
        """Hold no memory but what the call took and the storages ``kept``: its inputs, its outputs.

        Memory that a kernel keeps from call to call is then freed when the kernel lets it go.
        """
        own = kept | self.owned.keys()
        copies: dict[int, Tensor] = {}

        def loose(value: Any) -> Any:
            if not isinstance(value, Tensor) or address_of(value) in own or not value.numel():
                return value
            copies.setdefault(address_of(value), memory_of(value).clone())
            return Gone.of(value)

        def fast(value: Any) -> Any:
            if not isinstance(value, Gone):
                return value
            if not value.lost:
                self.gone[value.address] = value
                return value
            # it was the call's own, made in a way that no op shows: the host's numbers
            return value.over(copies[value.address])

        self.steps = [_mapped(loose, step) for step in self.steps]
        self.steps = [_mapped(fast, step) for step in self.steps]

    @property
    def freed(self) -> int:
        """How many pieces of memory that it needs are gone."""
        return sum(memory.lost for memory in self.gone.values())

    def replay(self) -> None:
        """Run it again on whatever the same tensors now hold."""
        for step in self.steps:
            _mapped(lambda v: v.back() if isinstance(v, Gone) else v, step).run()

    def scalars(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (step, argument, value) of everything that is not a tensor."""
        for n, step in enumerate(self.steps):
            if isinstance(step, Op):
                name, values = f"{n} {step.name}", {"args": step.args, **step.kwargs}
            else:
                name = f"{n} {step.kernel.__name__}"
                named = zip(step.kernel.arg_names, step.args, strict=False)
                values = {"grid": step.grid, **dict(named), **step.options}
            for argument, value in values.items():
                flat = [v for v in _leaves(value) if not isinstance(v, Tensor | Gone)]
                yield name, argument, flat[0] if len(flat) == 1 else flat


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of an argument; a tensor descriptor is its tensor and its numbers."""
    for leaf in tree_leaves(value):
        yield described.under(leaf)
        if described.is_descriptor(leaf):
            yield described.numbers(leaf)


def _mapped(change: Callable[[Any], Any], step: Any) -> Any:
    if isinstance(step, Op):
        args, kwargs = tree_map(change, (step.args, step.kwargs))
        return dataclasses.replace(step, args=args, kwargs=kwargs)

    def on_base(value: Any) -> Any:
        if described.is_descriptor(value):
            return described.placed(value, change(value.base))
        return change(value)

    args, options = tree_map(on_base, (step.args, step.options))
    return dataclasses.replace(step, args=args, options=options)


def _many(made: object) -> bool:
    return isinstance(made, tuple | list)


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def memory_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


@dataclass
class _Recorder:
    """What the two modes share."""

    source: Path
    recording: Recording
    tape: Any
    """Launches, where Triton is installed."""
    launching: Callable[[], bool] = lambda: False
    seen: int = 0

    def launches(self) -> None:
        """Take over what was launched since the last op."""
        if self.tape is not None:
            self.recording.steps += self.tape.launches[self.seen :]
            self.seen = len(self.tape.launches)

    def wait(self, what: str, *, copies: bool = False) -> None:
        """Note that something waits, with the kernel's own line."""
        file, line = _line(self.source)
        self.recording.waits.append(Wait(what=what, file=file, line=line, copies=copies))


def _line(source: Path) -> tuple[str, int]:
    """Return file and line of the innermost frame of a file, else of the innermost one outside."""
    frame: FrameType | None = sys._getframe(1)
    first: tuple[str, int] | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name == str(source):
            return source.name, frame.f_lineno
        inside = name == __file__ or "/torch/" in name or name.startswith("<")
        if first is None and not inside:
            first = Path(name).name, frame.f_lineno
        frame = frame.f_back
    return first or (source.name, 0)


class _Functions(TorchFunctionMode):
    """Sees what reads values, or makes tensors of the host's, without an op."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self.recorder.launching():
            return func(*args, **kwargs)
        if name in READS or (name == "to" and "cpu" in (*args[1:2], kwargs.get("device"))):
            self.recorder.wait(name)
        elif name in HOST and kwargs.get("device") is not None and not isinstance(args[0], Tensor):
            self.recorder.wait(f"torch.{name}", copies=True)
        return func(*args, **kwargs)


class _Ops(TorchDispatchMode):
    """Records ops."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, recorder = kwargs or {}, self.recorder
        if recorder.launching():
            return func(*args, **kwargs)
        recorder.launches()
        if func.namespace not in ("aten", "prim", "prims"):
            return self._inside(func, args, kwargs)
        what = _reads(func, args, kwargs)
        if what:
            recorder.wait(what)
        made = func(*args, **kwargs)
        self._note(func, args, kwargs, made)
        return made

    def _inside(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op of somebody's own and record what it does, or it alone if that is unseen."""
        recording = self.recorder.recording
        before = len(recording.steps) + len(recording.waits)
        with self:
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
            made = func.redispatch(keys, *args, **kwargs)
        self.recorder.launches()
        if before == len(recording.steps) + len(recording.waits):
            self._note(func, args, kwargs, made)
        return made

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        recording, name = self.recorder.recording, func.overloadpacket.__name__
        given = {address_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        results = tuple(
            value if isinstance(value, Tensor) and address_of(value) not in given else None
            for value in (made if _many(made) else (made,))
        )
        fresh = [value for value in results if value is not None]
        if name == "lift_fresh":  # the host's numbers, made without an op
            recording.owned.pop(address_of(args[0]), None)
            return
        recording.owned.update({address_of(value): value for value in fresh})
        if name in LEFT or not (fresh or func._schema.is_mutable):
            return
        recording.steps.append(Op(function=func, args=args, kwargs=kwargs, results=results))


METADATA = {"is_pinned", "is_same_size", "sym_size", "sym_stride", "sym_numel", "result_type"}


def _reads(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """Return how an op makes the host look at values, or nothing."""
    name = str(func.overloadpacket.__name__)
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return ""
    if name in ("index", "index_put_", "index_put", "_index_put_impl_"):
        masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
        filled = name != "index" and len(args[1]) == 1 and args[2].numel() == 1
        return "a mask as an index" if masks and not filled else ""
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        return "item" if name == "_local_scalar_dense" else name
    if name == "bincount":
        return name
    plain = [r for r in func._schema.returns if str(r.type) in ("bool", "int", "float", "number")]
    return name if plain and name not in METADATA else ""


@contextmanager
def recording(source: Path) -> Iterator[Recording]:
    """Record what is run; ``source`` is the file whose lines are named."""
    found = Recording()
    try:
        from moe_parity.kernels.virtual_gpu import launching, record
    except ImportError:
        recorder = _Recorder(source=source, recording=found, tape=None)
        with _Functions(recorder), _Ops(recorder):
            yield found
        return
    with record() as tape:
        recorder = _Recorder(source=source, recording=found, tape=tape, launching=launching)
        with _Functions(recorder), _Ops(recorder):
            yield found
        recorder.launches()
