"""What two calls on memory with other contents tell: what was left, what was read, what was hit.

Of all faults these are looked for first: an output that nobody wrote, or that depends on what
memory held before, is no matter of arithmetic, and explains every number that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.calling.poison import POISONS, ZEROS, Output
from moe_parity.harness.calling.run import Ran, other_order, run
from moe_parity.harness.checks.compare import Difference, differences, where
from moe_parity.harness.diagnosis.cause import Cause, CauseKind
from moe_parity.kernels import Fate, Kernel
from moe_parity.references.arithmetic.formats import row_major
from moe_parity.references.language import Case
from moe_parity.references.language.stage import Output as Named

KIND = CauseKind.MEMORY
UNSTABLE = {
    "not_repeatable": "gives other bits when it is called again, on memory with the same contents,",
    "poison_read": "reads memory that nobody has written: with other contents it gives other bits",
}
"""Why bits change with the memory: name of the cause, and its words."""
FAILS = "reads memory that nobody has written, and fails on what it holds"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a second call, on memory with other contents, shows besides the first; faults in words.

    Each completes the sentence that begins with the stage and the kernel; empty for none.
    """

    unwritten: str
    """An output that the call left as it was."""
    beside: str
    """Something that it wrote and should not have, or did not zero."""
    unstable: str
    """An output with other bits, and why."""
    why_unstable: str
    """The same in a word: ``poison_read`` or ``not_repeatable``."""
    compared: int
    differing: int
    """Outputs of the calls, and how many differ."""
    settled: bool
    """Whether what the kernel returned is what it wrote: no part of it is left from before."""

    @property
    def cause(self) -> Cause | None:
        """What makes outputs wrong, whatever the arithmetic."""
        return self.left or self.moved

    @property
    def left(self) -> Cause | None:
        """That an output was left as it was, as a cause."""
        return (self.unwritten and Cause(kind=KIND, name="unwritten", words=self.unwritten)) or None

    @property
    def moved(self) -> Cause | None:
        """That other memory gives other bits, as a cause."""
        if not self.unstable:
            return None
        return Cause(kind=KIND, name=self.why_unstable, words=self.unstable)

    @property
    def hit(self) -> Cause | None:
        """That something beside the outputs was written, as a cause."""
        return (self.beside and Cause(kind=KIND, name="beside", words=self.beside)) or None


def memory(kernel: Kernel, case: Case, inputs: Any, device: str, first: Ran, second: Ran) -> Memory:
    """Compare two calls under two poisons, the second in another order of programs.

    Every row does what the kernel declares; where it declares nothing, the rows of a stage's output
    that somebody owns are written.  Nothing beside the outputs changes.
    """
    beside = _asked(first, second) or _declared(first) or _declared(second)
    unwritten = "" if beside else _unwritten(kernel, case, inputs, first, second)
    if unwritten:
        # a number that memory decides may be the poison by chance
        third = _on_zeros(kernel, case, inputs)
        unwritten = _unwritten(kernel, case, inputs, first, second, third)
    every = _moved(kernel, case, inputs, first, second)
    if not unwritten and not any(d.wrong for d in every) and _tries_zeros(kernel, device, first):
        every = _moved(kernel, case, inputs, first, run(kernel, case, inputs, poison=ZEROS))
    moved = next((d for d in every if d.wrong), None)
    unstable = why = ""
    if moved is not None:
        again, why = "gives other bits in a second call", "unwritten"
        if not unwritten:
            why = _why_unstable(kernel, case, inputs, device, first)
            again = UNSTABLE[why]
        unstable = (
            f"{again} at {where(inputs, moved.output, moved.index)}: {moved.got}, before "
            f"{moved.want}; {moved.words}"
        )
    return Memory(
        unwritten=unwritten, beside=beside or _beside(kernel, first, second), unstable=unstable,
        why_unstable=why, compared=sum(d.of for d in every), differing=sum(d.wrong for d in every),
        settled=not unwritten and not unstable and _names(first) == _names(second),
    )  # fmt: skip


def _names(ran: Ran) -> list[str]:
    """Return which outputs lie in the kernel's own memory: in memory that it kept, rows stay."""
    return [output.name for output in ran.own]


def _moved(kernel: Kernel, case: Case, inputs: Any, first: Ran, other: Ran) -> list[Difference]:
    outputs, live = kernel.stage.outputs(case, inputs), kernel.stage.live(case, inputs)
    return differences(outputs, other.outputs, first.outputs, live)


def _tries_zeros(kernel: Kernel, device: str, first: Ran) -> bool:
    """Whether a call on zeros could tell more: a test for zero comes out alike under both poisons.

    The virtual GPU sees for itself what is read.
    """
    return first.taken > 0 and kernel.runs_on(device) != "virtual_gpu"


def _on_zeros(kernel: Kernel, case: Case, inputs: Any) -> Ran | None:
    """Call on memory of zeros; None where that fails, which two calls before did not."""
    try:
        return run(kernel, case, inputs, poison=ZEROS)
    except (Exception, SystemExit):
        return None


def fails_on(kernel: Kernel, case: Case, inputs: Any, device: str, poison: int) -> bool:
    """Whether a call that failed under ``poison`` depends on it: with other contents it does not.

    The order of programs is the one of the second call.
    """
    other = POISONS[0] if poison != POISONS[0] else ZEROS
    try:
        with other_order(kernel, case, device):
            run(kernel, case, inputs, poison=other)
    except (Exception, SystemExit):
        return False
    return True


def _why_unstable(kernel: Kernel, case: Case, inputs: Any, device: str, first: Ran) -> str:
    """Call once more on memory with the same contents: the order of programs, or what they read."""
    with other_order(kernel, case, device):
        third = run(kernel, case, inputs)
    if any(d.wrong for d in _moved(kernel, case, inputs, first, third)):
        return "not_repeatable"
    return "poison_read"


def _beside(kernel: Kernel, first: Ran, second: Ran) -> str:
    for ran in (first, second):
        for output in ran.memory:
            fault = _fate_fault(output, ran.fates.get(output.name))
            hit = output.trespass(kernel.contract.pads_zero)
            if hit is not None:
                fault = f"writes beside {output.name}, {_beside_words(output, hit)}"
            if fault:
                return fault
        if ran.stray:
            return ran.stray
    return ""


def _beside_words(output: Output, hit: int) -> str:
    """Return where a byte that was hit lies, by the rows of the output."""
    place = f"{hit} bytes from its start"
    if hit < 0:
        return f"{-hit} bytes before its first row"
    if hit >= output.owned:
        return f"{hit - output.owned} bytes behind its last row"
    row = output.view.stride(0) * output.view.element_size()
    return f"in the gap behind row {hit // row}, {place}" if row else place


def _asked(first: Ran, second: Ran) -> str:
    """Return whether a kernel asked for other memory the second time, in words."""
    asked, again = ([(o.name, o.view.shape) for o in ran.memory] for ran in (first, second))
    if asked == again:
        return ""
    return f"asks for {len(again)} tensors when it is called again, before {len(asked)}"


def _declared(ran: Ran) -> str:
    """Return what is wrong with the fates that a kernel declares, or nothing."""
    made = {output.name: output for output in ran.memory}
    for name, fates in ran.fates.items():
        if name not in made:
            return f"declares fates of {name}, which it did not ask for with call.new"
        rows = made[name].view.shape[:-1].numel()
        if fates.numel() != rows and fates.shape != made[name].view.shape:
            return f"declares {fates.numel()} fates for {rows} rows of {name}"
        strange = set(fates.flatten().tolist()) - {int(fate) for fate in Fate}
        if strange:
            return f"declares the fate {min(strange)} for a row of {name}, which is no Fate"
    return ""


def _unwritten(
    kernel: Kernel, case: Case, inputs: Any, first: Ran, second: Ran, third: Ran | None = None
) -> str:
    """Return which live elements kept the poison of every call, in words, or nothing."""
    owned, stage = kernel.stage.live(case, inputs), kernel.stage.outputs(case, inputs)
    for *outputs, fates in _watched(first, second, third):
        one = outputs[0]
        own = one.name in stage and tuple(one.view.shape) == stage[one.name].shape
        live = _live(one, fates, owned, stage_output=own)
        if fates is RETURNED:
            own, live = True, live if own else None
        kept = _forgotten(outputs, live)
        if kept is not None:
            return _left(one, kept, inputs, stage[one.name] if own else None)
    return ""


RETURNED: Mapping[str, Tensor] = {}
"""The fates of what lies in a kernel's own memory: it declares none."""


def _watched(first: Ran, second: Ran, third: Ran | None) -> Iterator[tuple[Any, ...]]:
    """Yield the same output of every call, and its fates: from call.new, then of its own memory."""
    every = (first, second) if third is None else (first, second, third)
    for outputs in zip(*(ran.memory for ran in every), strict=False):
        yield *outputs, first.fates
    others = [{output.name: output for output in ran.own} for ran in every]
    for one in first.own:
        same = [other[one.name] for other in others if one.name in other]
        if len(same) == len(every) and len({output.view.shape for output in same}) == 1:
            yield *same, RETURNED


def _left(output: Output, kept: Tensor, inputs: Any, known: Named | None) -> str:
    """Return in words which elements of an output were left, and how many."""
    index = tuple(int(n) for n in kept.nonzero()[0])
    place = f"{output.name}{list(index)}"
    if known is not None and len(known.axes) == kept.dim():
        place = f"{where(inputs, known, index)} of {output.name}"
    return (
        f"leaves {place} unwritten, which is live; {int(kept.sum())} of {kept.numel()} "
        "elements keep what memory held before the call"
    )


def _live(
    output: Output, fates: Mapping[str, Tensor], owned: Mapping[str, Tensor], *, stage_output: bool
) -> Tensor | None:
    """Return a mask of the rows, or elements, that must be written; None for all of them."""
    if output.name in fates:
        return fates[output.name].cpu() == Fate.LIVE
    if not stage_output:
        return torch.zeros(output.view.shape[:-1], dtype=torch.bool)
    return owned[output.name].cpu() if output.name in owned else None


def _bytes(output: Output) -> Tensor:
    """Return the bytes of every element, uint8 [*shape, size]."""
    flat = row_major(output.view).reshape(-1).view(torch.uint8).cpu()
    return flat.view(*output.view.shape, output.view.element_size())


def _each(mask: Tensor, output: Output) -> Tensor:
    """Return a mask of rows, or of elements, as one of elements."""
    shape = output.view.shape
    if mask.numel() == output.view.numel() and mask.shape == shape:
        return mask
    return mask.reshape(*shape[:-1], 1).expand(shape)


def _fate_fault(output: Output, fates: Tensor | None) -> str:
    if fates is None or not output.view.numel():
        return ""
    fates = fates.cpu()
    found = _bytes(output)
    for fate, byte, words in (
        (Fate.UNTOUCHED, output.poison, "writes"),
        (Fate.ZERO, 0, "does not zero"),
    ):
        wrong = _each(fates == fate, output) & (found != byte).any(-1)
        if bool(wrong.any()):
            place = [int(n) for n in wrong.nonzero()[0]]
            return f"{words} {output.name}{place}, declared {fate.name.lower()}"
    return ""


def _forgotten(outputs: Sequence[Output], live: Tensor | None) -> Tensor | None:
    """Return a mask of the elements that kept their poison under every fill, None for no such."""
    first = outputs[0]
    if not first.view.numel():
        return None
    kept = torch.stack([_bytes(output) == output.poison for output in outputs]).all(0)
    # A number is stored whole; of a packed word a single byte may be forgotten.
    left = kept.all(-1) if first.view.dtype.is_floating_point else kept.any(-1)
    if live is not None:
        left &= _each(live, first)
    return left if bool(left.any()) else None
