"""A call captured once: a CUDA graph on a GPU, on a CPU the recording that stands for one."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.calling.canonical import canonical, finished
from moe_parity.harness.calling.poison import Output, PoisonedAllocator
from moe_parity.harness.calling.recording import Recording, Wait, address_of, recording
from moe_parity.harness.calling.run import aliased, run, settings_kept
from moe_parity.kernels import Call, Kernel
from moe_parity.references.language import Case
from moe_parity.references.language.stage import tensors_of


@dataclass(frozen=True, kw_only=True)
class _Static(Call):
    """A call whose outputs lie where those of an earlier one did, asked for in the same order."""

    order: Iterator[Output]

    def new(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the memory; other memory where another is asked for."""
        kept = next(self.order, None)
        if kept is not None and kept.name == name and shape in (None, tuple(kept.view.shape)):
            return kept.view
        return super().new(name, shape, strides, dtype)


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A call that can be run again on whatever its inputs then hold."""

    kernel: Kernel
    call: _Static
    returned: Any
    memory: list[Output]
    first: dict[str, Tensor]
    """The canonical outputs of the call that warmed it up."""
    recording: Recording | None
    graph: Any
    """``torch.cuda.CUDAGraph`` on a GPU."""

    def poison(self, byte: int) -> None:
        """Fill the outputs, and on a CPU all memory that the call took, anew.

        In a CUDA graph ``torch.empty`` fills its own memory: it is captured so.
        """
        for output in self.memory:
            output.storage.fill_(byte)
        if self.recording is not None:
            self.recording.poison(byte)

    def replay(self) -> None:
        """Run it again."""
        if self.recording is not None:
            with torch.no_grad():
                self.recording.replay()
        else:
            self.graph.replay()
            torch.cuda.synchronize()

    def outputs(self) -> dict[str, Tensor]:
        """Return the canonical outputs as they are now."""
        return canonical(self.kernel.name, self.call, finished(self.returned))

    def again(self) -> Recording | None:
        """Return what a call on the inputs as they are now does, None on a GPU."""
        if self.recording is None:
            return None
        own = dataclasses.replace(self.call, order=iter(self.memory))
        return record(self.kernel, own)[0]

    @property
    def freed(self) -> int:
        """How many pieces of memory that it needs the kernel has freed; unknown on a GPU."""
        return 0 if self.recording is None else self.recording.freed


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Why a call cannot be captured."""

    words: str
    """They follow ``its call``."""


def capture(kernel: Kernel, case: Case, inputs: Any) -> Captured | Stopped:
    """Call a kernel to warm it up, then capture a call on the same inputs, which stay in place.

    Whatever the kernel raises in the first call passes through.
    """
    warm = run(kernel, case, inputs)
    device = kernel.stage.handed(inputs)[0].device
    allocate = PoisonedAllocator(device=str(device), poison=0xFF, names=warm.outputs)
    call = _Static(
        case=case, stage=kernel.stage, inputs=aliased(inputs), allocate=allocate,
        config=kernel.config(case, device.type), order=iter(warm.memory),
    )  # fmt: skip
    made = _graph(kernel, call) if device.type == "cuda" else _recorded(kernel, call)
    if isinstance(made, Stopped):
        return made
    return dataclasses.replace(made, memory=warm.memory + allocate.outputs, first=warm.outputs)


def record(kernel: Kernel, call: Call) -> tuple[Recording, Any]:
    """Return what a call on a CPU does, and what it returns."""
    call.fix_outputs()
    with settings_kept(), torch.no_grad(), recording(kernel.source) as found:
        returned = kernel.run(call)
    return found, returned


def waits_of(kernel: Kernel, call: Call) -> list[Wait]:
    """Return for what a call on a CPU would wait for the GPU, up to the first such thing.

    A Triton kernel's launches are not run: until the first wait nothing depends on what they give.
    """
    if not kernel.triton:
        return record(kernel, call)[0].waits
    from moe_parity.kernels.virtual_gpu import dry

    call.fix_outputs()
    surroundings = (dry(), settings_kept(), torch.no_grad())
    with ExitStack() as stack:
        for each in surroundings:
            stack.enter_context(each)
        found = stack.enter_context(recording(kernel.source))
        try:
            kernel.run(call)
        except Exception:
            if found.stops is None:
                raise
    return found.waits


def _recorded(kernel: Kernel, call: _Static) -> Captured | Stopped:
    memory = list(call.order)
    for wait in waits_of(kernel, dataclasses.replace(call, order=iter(memory))):
        if not wait.copies:
            return Stopped(words=wait.words)
    found, returned = record(kernel, dataclasses.replace(call, order=iter(memory)))
    inputs = {address_of(tensor) for tensor in tensors_of(call.inputs)}
    found.let_go(inputs)
    return Captured(
        kernel=kernel, call=call, returned=returned, memory=[], first={}, recording=found,
        graph=None,
    )  # fmt: skip


def _graph(kernel: Kernel, call: _Static) -> Captured | Stopped:
    """Capture on a GPU, after a call that tells whether it waits: that one does no harm."""
    memory = list(call.order)
    waits = waiting(kernel, lambda: dataclasses.replace(call, order=iter(memory)))
    if waits is not None:
        return waits
    graph = torch.cuda.CUDAGraph()
    try:
        with settings_kept():
            own = dataclasses.replace(call, order=iter(memory))
            own.fix_outputs()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                returned = kernel.run(own)
        torch.cuda.synchronize()
    except Exception as error:
        torch.cuda.synchronize()
        return _stopped(kernel, error, "cannot be captured")
    return Captured(
        kernel=kernel, call=call, returned=returned, memory=[], first={}, recording=None,
        graph=graph,
    )  # fmt: skip


def waiting(kernel: Kernel, fresh: Callable[[], Call]) -> Stopped | None:
    """Return where a call on a GPU waits for it, or None; torch refuses to."""
    call = fresh()
    call.fix_outputs()
    torch.cuda.synchronize()
    try:
        with refusing_to_wait(), settings_kept():
            kernel.run(call)
    except Exception as error:
        if "synchroniz" not in str(error):
            return _stopped(kernel, error, "raises")
        return _stopped(kernel, error, "waits for the GPU")
    finally:
        torch.cuda.synchronize()
    return None


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Make what waits for the GPU raise."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _stopped(kernel: Kernel, error: BaseException, what: str) -> Stopped:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == str(kernel.source)]
    outside = [f for f in frames if "/torch/" not in f.filename and f.filename != __file__]
    at = (own or outside)[-1:]
    place = "".join(f" at line {f.lineno} of {f.filename.rsplit('/', 1)[-1]}" for f in at)
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return Stopped(words=f"{what}{place} ({type(error).__name__}: {text[:120]})")
