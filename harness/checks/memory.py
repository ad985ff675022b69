"""The check ``write_set``: what a call wrote, what it left, what it touched beside its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.calling.poison import Output
from moe_parity.harness.calling.run import Ran
from moe_parity.kernels import Fate, Kernel
from moe_parity.references.arithmetic.formats import row_major
from moe_parity.references.language import Case


def write_fault(kernel: Kernel, case: Case, inputs: Any, first: Ran, second: Ran) -> str:
    """Return what is wrong with the write set of two calls under two poisons, or nothing.

    Every row does what the kernel declares; where it declares nothing, the rows of a stage's output
    that somebody owns are written.  Nothing beside the outputs changes.
    """
    owned = kernel.stage.live(case, inputs)
    named = kernel.stage.outputs(case, inputs)
    for one, two in zip(first.memory, second.memory, strict=True):
        for output, ran in ((one, first), (two, second)):
            fault = _fate_fault(output, ran.fates.get(output.name))
            beside = output.trespass(kernel.contract.pads_zero)
            if beside is not None:
                fault = f"writes beside {output.name}, {beside} bytes from its start"
            if fault:
                return fault
        own = one.name in named and tuple(one.view.shape) == named[one.name].shape
        live = _live(one, first.fates, owned, stage_output=own)
        left = _forgotten(one, two, live)
        if left is not None:
            return f"leaves {one.name}{list(left)} unwritten, which is live"
    return ""


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
    fates, rows = fates.cpu(), output.view.shape[:-1].numel()
    if fates.numel() != rows and fates.shape != output.view.shape:
        return f"declares {fates.numel()} fates for {rows} rows of {output.name}"
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


def _forgotten(first: Output, second: Output, live: Tensor | None) -> tuple[int, ...] | None:
    """Return the index of an element that kept its poison under both fills, or None."""
    if not first.view.numel():
        return None
    # A byte that was written cannot equal both fills.
    kept = ((_bytes(first) == first.poison) & (_bytes(second) == second.poison)).any(-1)
    if live is not None:
        kept &= _each(live, first)
    return tuple(int(n) for n in kept.nonzero()[0]) if bool(kept.any()) else None
