"""What of a case runs here: the kernel's own word, the chip, the CPU's budget."""

from __future__ import annotations

from moe_parity.harness.session import environment
from moe_parity.kernels import Kernel
from moe_parity.references.chips import why_not_modelled
from moe_parity.references.language import Case, Hazard, Skip, Why

CPU_COST = 400
"""Programs times blocks of K that a drawn case may cost on the virtual GPU, some five ms each where
programs do not run as one."""

WRITTEN_COST = 2100
"""The same of a case that stands in a suite: each is there for a reason, and most of them are of
small programs, hundreds of which run as one."""

CPU_OUTPUTS = 1 << 22
"""Elements that a case of a Triton kernel may have on a CPU."""

FAR_MEMORY = 40 << 30
"""Bytes of a GPU that must be free for a far case: inputs of 17 GiB, more than once."""


def skip_of(kernel: Kernel, case: Case, device: str, most: int = CPU_COST) -> Skip | None:
    """Return why a case does not run here, or None; the sentence names the kernel.

    ``most`` is what it may cost on a CPU.
    """
    reason = kernel.why_not(case, device) or _chip(kernel, case, device)
    if reason is None:
        reason = _budget(kernel, case, most) if device == "cpu" else _memory(case)
    return reason and Skip(reason.why, f"{kernel.name}: {reason}")


def _chip(kernel: Kernel, case: Case, device: str) -> Skip | None:
    card = environment.gpu() if device == "cuda" else None
    missing = why_not_modelled(card.capability) if card else None
    if missing is None or not kernel.on_chip(case, device):
        return None
    return Skip(Why.NEEDS_CHIP, f"{missing}.")


def _budget(kernel: Kernel, case: Case, most: int) -> Skip | None:
    """Return why the virtual GPU would take too long, and what the case would have shown."""
    if not kernel.triton:
        return None
    cost = kernel.cost(case)
    rows = case.i if "m" not in kernel.stage.sizes else case.m
    outputs = rows * (case.h if "h" in kernel.stage.sizes else case.i)
    shown = f"a GPU would show {outputs:,} elements of {kernel.stage} at {case.id}"
    if cost > most:
        over = f"{cost} programs are over the CPU's budget of {most}"
    elif outputs > CPU_OUTPUTS:
        over = f"{outputs} elements are over the CPU's budget of {CPU_OUTPUTS}"
    else:
        return None
    return Skip(Why.BUDGET, f"{over}; {shown}.")


def _memory(case: Case) -> Skip | None:
    """Return why a GPU has too little memory for inputs that a CPU maps and does not use."""
    if case.hazard is not Hazard.FAR or environment.gpu() is None:
        return None
    import torch

    free = torch.cuda.mem_get_info()[0]
    if free >= FAR_MEMORY:
        return None
    sentence = f"far inputs need {FAR_MEMORY >> 30} GiB, and {free >> 30} of the GPU's are free."
    return Skip(Why.BUDGET, sentence)
