"""Run a kernel of any stage on a case: poisoned outputs in, canonical outputs out."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.calling.canonical import by_name, canonical, declared, finished
from moe_parity.harness.calling.own import OwnMemory
from moe_parity.harness.calling.poison import POISONS, Output, PoisonedAllocator, fills
from moe_parity.kernels import Call, Kernel
from moe_parity.kernels.written import watching
from moe_parity.references.language import Case

WHOLE = 1 << 26
"""Bytes up to which the whole storage of an input is kept, to see what a kernel did to it."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of an element's size whose bits are compared, a NaN's too."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One call: its canonical outputs, the memory it was given, and what it did to its inputs."""

    outputs: dict[str, Tensor]
    memory: list[Output]
    own: list[Output]
    """The outputs that lie in memory which the kernel took by itself."""
    taken: int
    """How much uninitialised memory it took that is no output of call.new: allocations."""
    guarded: int
    """Bytes around such memory that were looked at."""
    stray: str
    """What it wrote beside such memory, in words that follow its name; empty for nothing."""
    fates: Mapping[str, Tensor]
    input_kept: bool
    """Whether the inputs' whole storage, if it is not too large, is as it was; it is put back."""
    returned: Mapping[str, Tensor]
    """The very tensors that the kernel returned, whose memory may change with its next call."""
    again: Callable[[], dict[str, Tensor]]
    """Return the canonical outputs as that memory is by now."""


def run(kernel: Kernel, case: Case, inputs: Any, poison: int = POISONS[0]) -> Ran:
    """Call a kernel on the inputs of its stage.

    Raises BadOutput, in a sentence, where it returns something that its stage does not have;
    whatever the kernel itself raises passes through.
    """
    handed = kernel.stage.handed(inputs)
    device = handed[0].device
    kept = _Kept(handed)
    names = kernel.stage.outputs(case, inputs)
    new = PoisonedAllocator(device=str(device), poison=poison, names=names)
    call = Call(
        case=case, stage=kernel.stage, inputs=aliased(inputs), allocate=new,
        config=kernel.config(case, device.type),
    )  # fmt: skip
    call.fix_outputs()
    try:
        with settings_kept(), watched(kernel, device.type), OwnMemory(poison) as own:
            returned = finished(kernel.run(call))
        if device.type == "cuda":
            torch.cuda.synchronize()
    finally:
        input_kept = kept.put_back()
    again = partial(canonical, kernel.name, call, returned, fills(poison))
    tensors = by_name(kernel.name, call, returned)
    return Ran(
        outputs=again(), memory=new.outputs, fates=declared(kernel.name, returned),
        own=own.returned(tensors), input_kept=input_kept, returned=tensors, again=again,
        taken=own.taken + sum(output.name not in names for output in new.outputs),
        guarded=own.guarded, stray=own.stray(),
    )  # fmt: skip


def aliased(inputs: Any) -> Any:
    """Return the same memory in tensors of its own: what a kernel does to these, no judge sees."""
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    made = {
        name: aliased(value) if dataclasses.is_dataclass(value) else value.detach()
        for name, value in fields.items()
        if isinstance(value, Tensor) or dataclasses.is_dataclass(value)
    }
    return dataclasses.replace(inputs, **made)


class _Kept:
    """The storages of some tensors, gaps between rows included, as they were.

    Of a storage beyond ``WHOLE`` bytes it is the tensors alone: few of its pages may be in use.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        tensors = [tensor for tensor in tensors if tensor.numel()]
        small = [t for t in tensors if t.untyped_storage().nbytes() <= WHOLE]
        storages = {t.untyped_storage().data_ptr(): t for t in small}
        self.memory = [_bytes_of(tensor) for tensor in storages.values()]
        self.memory += [
            tensor.view(INTEGERS[tensor.element_size()])
            for tensor in tensors
            if tensor.untyped_storage().nbytes() > WHOLE
        ]
        self.before = [memory.clone() for memory in self.memory]

    def put_back(self) -> bool:
        """Restore what was changed; return whether nothing was."""
        same = [torch.equal(m, b) for m, b in zip(self.memory, self.before, strict=True)]
        for memory, before, kept in zip(self.memory, self.before, same, strict=True):
            if not kept:
                memory.copy_(before)
        return all(same)


def _bytes_of(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


@contextmanager
def settings_kept() -> Iterator[None]:
    """Take back what a kernel sets for its process: references compute under the settings before.

    Whether the CPU flushes subnormals cannot be asked; nothing of ours ever sets it.
    """
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_flush_denormal(False)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def watched(kernel: Kernel, device: str) -> AbstractContextManager[None]:
    """Return a context in which the virtual GPU raises where a launch reads what nobody wrote."""
    return watching() if kernel.runs_on(device) == "virtual_gpu" else nullcontext()


def other_order(kernel: Kernel, case: Case, device: str) -> AbstractContextManager[object]:
    """Return a context in which the virtual GPU runs programs in another order, one for each case.

    Every second case runs them backwards, the others shuffled.
    """
    if kernel.runs_on(device) != "virtual_gpu":
        return nullcontext()
    from moe_parity.kernels.virtual_gpu import reversed_order, shuffled

    backwards = zlib.crc32(case.id.encode()) % 2
    return reversed_order() if backwards else shuffled(case.seed + 1)


def on_device(kernel: Kernel, case: Case, device: str) -> dict[str, Tensor]:
    """Return the canonical outputs of a kernel on a case, for tools that need no checks."""
    return run(kernel, case, kernel.stage.inputs(case, device)).outputs


__all__ = ["Ran", "on_device", "other_order", "run"]
