"""Our alignment as the harness sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_parity.kernels.call import Call, Fate, Produced
from moe_parity.kernels.ours.stages import ours
from moe_parity.references.stages import ALIGN


def _align(call: Call, most: int) -> Callable[[], Produced]:
    """Align with one program for up to ``most`` pairs."""
    from moe_parity.kernels.ours import steps

    inputs, block = call.inputs, call.inputs.block
    bound = steps.block_bound(inputs.ids.numel(), inputs.experts, block)
    slots = call.new("slots", (bound * block,), dtype=torch.int32)
    owners = call.new("experts", (bound,), dtype=torch.int32)
    steps.align(
        inputs.ids, inputs.first, inputs.experts, block, slots=slots, block_expert=owners, most=most
    )

    def used_part() -> Produced:
        used = int((owners >= 0).sum())
        outputs = {"experts": owners[:used], "slots": slots[: used * block]}
        fates = torch.full(slots.shape, Fate.UNTOUCHED, dtype=torch.int8)
        fates[: used * block] = Fate.LIVE
        return Produced(outputs=outputs, fates={"slots": fates})

    return used_part


@ours("ours_align", ALIGN)
def ours_align(call: Call) -> Callable[[], Produced]:
    """Our alignment: one program for up to 128 pairs, three launches for more."""
    from moe_parity.kernels.ours import steps

    return _align(call, steps.SMALL_PAIRS)


@ours("ours_align_large", ALIGN)
def ours_align_large(call: Call) -> Callable[[], Produced]:
    """Our alignment, the form of three launches for any number of pairs."""
    return _align(call, 0)
