"""Memory that a kernel takes by itself: what ``torch.empty`` gives it lies in poison, with guards.

What torch gives is moved, before the kernel sees it, to memory of the same geometry with poison in
it and around it: ``torch.empty``, ``empty_like``, ``new_empty``, ``empty_strided``,
``new_empty_strided``, ``empty_permuted``, ``torch.Tensor(n)``, pinned or not, on a CPU or a GPU,
also inside an operation that a kernel registered itself, and what ``resize_`` adds.  Left as torch
gives it are: what an operation of torch takes for itself, memory without a byte, storages made
without a tensor, what other threads take, what compiled code (``torch.compile``) takes, and all
that is taken while a stream is captured, since a fill would become part of the graph.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import key_extractor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_parity.harness.calling.operations import Operation, operation
from moe_parity.harness.calling.poison import GUARD, Output, own_fill
from moe_parity.kernels.written import current, mark, unwritten

HELD = 1 << 30
"""Bytes of a call that are kept; beyond them what the kernel has let go is checked, and freed."""

DTYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
}  # fmt: skip
"""How the project calls them."""
ABOVE = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)
SELECT = torch._C.DispatchKey.BackendSelect


@dataclass(frozen=True, kw_only=True)
class Own:
    """One allocation of a kernel."""

    called: str
    """What gave it: ``torch.empty``."""
    dtype: torch.dtype
    shape: Sequence[int]
    storage: Tensor
    """The whole allocation with its guards, uint8 [bytes]."""
    fill: int

    @property
    def words(self) -> str:
        """Return for instance ``fp32 [8, 4] from torch.empty``."""
        dtype = DTYPES.get(self.dtype, str(self.dtype)[6:])
        return f"{dtype} {list(self.shape)} from {self.called}"

    @property
    def size(self) -> int:
        """Bytes between the guards."""
        return self.storage.numel() - 2 * GUARD

    @property
    def guards(self) -> tuple[Tensor, Tensor]:
        """The bytes before and behind, uint8 [GUARD] each."""
        behind = self.storage.narrow(0, self.storage.numel() - GUARD, GUARD)
        return self.storage.narrow(0, 0, GUARD), behind

    def stray(self) -> str:
        """Return what was written beside it, in words that follow the kernel's name, or nothing."""
        before, behind = (guard.cpu() != self.fill for guard in self.guards)
        for hit, side in ((behind, "behind the end"), (before.flip(0), "before the start")):
            if bool(hit.any()):
                count, first = int(hit.sum()), int(hit.nonzero()[0, 0])
                apart = f", the first of them {first} away" if first else ""
                noun = "byte" if count == 1 else "bytes"
                return (
                    f"writes beside memory of its own: {count} {noun} {side} of its {self.words}"
                    f"{apart}"
                )
        return ""

    def released(self) -> bool:
        """Whether nobody but this record holds the memory."""
        return bool(torch._C._storage_Use_Count(self.storage.untyped_storage()._cdata) <= 2)


class OwnMemory(TorchDispatchMode):
    """While it is active, what the running kernel takes is poisoned, guarded and kept.

    ``poison`` is one of ``POISONS``, or 0 for memory of zeros.
    """

    def __init__(self, poison: int) -> None:
        """Take the poison of a call."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.poison = poison
        self.kept: dict[int, Own] = {}
        """By the address of the storage."""
        self.taken = 0
        """How many allocations there were."""
        self.held = self.guarded = 0
        """Bytes that are kept, and bytes of all guards."""
        self.fault = ""
        self.watched = current() is not None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` compile: by default it runs everything eagerly inside a mode."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation; move what it takes."""
        kwargs = kwargs or {}
        kind = operation(func)
        if kind.fresh:
            return self._moved(func(*args, **kwargs), kind.fresh, bool(kwargs.get("pin_memory")))
        if kind.grows:
            return self._resized(func, args, kwargs)
        result = self._below(func, args, kwargs) if kind.users else func(*args, **kwargs)
        if kind.writes and (self.kept or self.watched):
            self._written(kind, args, kwargs)
        return result

    def _below(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation of the kernel's own with the mode active inside."""
        tensors = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor)]
        every = torch._C._dispatch_keyset_full()
        keys = key_extractor(tensors, every) - ABOVE
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), SELECT):
            keys = keys - torch._C.DispatchKeySet(SELECT)
        if not tensors:
            keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        with self:
            return func.redispatch(keys, *args, **kwargs)

    def _moved(self, real: Any, called: str, pinned: bool) -> Any:
        """Move an allocation of torch's into poison; it stays the same tensor."""
        count = real.untyped_storage().nbytes() if _plain(real) else 0
        if not count:
            return real
        shape, strides = real.shape, real.stride()
        storage = self._take(real, count, shape, called, pinned)
        return real.set_(storage, GUARD // real.element_size(), shape, strides)

    def _take(
        self, like: Tensor, count: int, shape: Sequence[int], called: str, pinned: bool = False
    ) -> torch.UntypedStorage:
        """Return new memory for ``count`` bytes, with a guard of GUARD bytes on either side."""
        fill = own_fill(self.poison, self.taken, like.dtype)
        raw = torch.empty(
            count + 2 * GUARD, dtype=torch.uint8, device=like.device, pin_memory=pinned
        ).fill_(fill)
        unwritten(raw, fill)
        own = Own(called=called, dtype=like.dtype, shape=shape, storage=raw, fill=fill)
        self.taken += 1
        self.guarded += 2 * GUARD
        self.held += raw.numel()
        if self.held > HELD:
            self._let_go()
        storage = raw.untyped_storage()
        self.kept[storage.data_ptr()] = own
        return storage

    def _resized(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Resize a tensor; what it gains is poison, and is guarded where it had nothing before."""
        tensor = args[0]
        if not _plain(tensor):
            return func(*args, **kwargs)
        own = self.kept.get(tensor.untyped_storage().data_ptr())
        size, offset = tensor.element_size(), tensor.storage_offset()
        (wanted,) = args[1:2] or (kwargs.get("size", kwargs.get("the_template")),)
        need = math.prod(wanted.shape if isinstance(wanted, Tensor) else wanted) * size
        had = tensor.untyped_storage().nbytes() - offset * size - (GUARD if own else 0)
        if need <= had:
            return func(*args, **kwargs)
        if own is None and had > 0:
            result = func(*args, **kwargs)
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            memory.set_(tensor.untyped_storage())
            memory[offset * size + had :] = own_fill(self.poison, self.taken, tensor.dtype)
            self.taken += 1
            return result
        model = torch.empty(0, dtype=tensor.dtype, device="meta")
        func(model, *args[1:], **kwargs)
        storage = self._take(tensor, need, model.shape, "resize_")
        if own is not None:
            start, raw = offset * size, self.kept[storage.data_ptr()].storage
            mark(raw[GUARD : GUARD + had].copy_(own.storage[start : start + had]))
        return tensor.set_(storage, GUARD // size, model.shape, model.stride())

    def _written(self, kind: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what an operation of torch wrote to."""
        for position, name in kind.writes:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if not isinstance(tensor, Tensor) or not _plain(tensor):
                    continue
                mark(tensor)
                where = tensor.untyped_storage().data_ptr()
                own = self.kept.get(where)
                if own is not None and name == "out" and _extent(tensor) > GUARD + own.size:
                    del self.kept[where]  # torch has resized an output into the guard

    def _let_go(self) -> None:
        """Check and free what the kernel no longer holds."""
        for where, own in list(self.kept.items()):
            if own.released():
                self.fault = self.fault or own.stray()
                self.held -= own.storage.numel()
                del self.kept[where]

    def stray(self) -> str:
        """Return the first write beside an allocation in words, or nothing."""
        alike: dict[tuple[torch.device, int], list[Own]] = {}
        for own in self.kept.values():
            alike.setdefault((own.storage.device, own.fill), []).append(own)
        for (_, fill), several in alike.items():
            guards = torch.cat([guard for own in several for guard in own.guards])
            if not self.fault and not bool((guards == fill).all()):
                self.fault = next(filter(None, (own.stray() for own in several)))
        return self.fault

    def returned(self, named: Mapping[str, Tensor]) -> list[Output]:
        """Return those of some tensors that lie in memory of this call."""
        found = []
        for name, tensor in named.items():
            own = self.kept.get(tensor.untyped_storage().data_ptr()) if _plain(tensor) else None
            if own is not None:
                found.append(
                    Output(
                        name=name, view=tensor.detach(), storage=own.storage, poison=own.fill,
                        owned=0, tail=0,
                    )
                )  # fmt: skip
        return found


def _plain(tensor: Tensor) -> bool:
    """Whether it is ordinary memory of a CPU or a GPU that a fill may be written to now."""
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    if tensor.is_cuda:
        return not torch.cuda.is_current_stream_capturing() and not _compiled()
    return tensor.device.type == "cpu"


def _compiled() -> bool:
    """Whether the caller is code of ``torch.compile``, whose graphs own all of their memory pool.

    Memory that is kept there stops them with an error.
    """
    frame = sys._getframe() if "torch._inductor" in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch._inductor"):
            return True
        frame = frame.f_back
    return False


def _extent(tensor: Tensor) -> int:
    """Return the byte of its storage behind a tensor's last element."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in steps)
    return int(last + 1) * tensor.element_size()


__all__ = ["Own", "OwnMemory"]
