"""A small case for any kernel, for checks that call it many times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, ScaleFormat, Stage

RANKS = ({"e": 4, "k": 2, "ep_rank": 1, "ep_size": 2}, {"e": 4, "k": 2}, {"e": 1, "k": 1})
"""Half of the pairs are another rank's; all are ours; a dense GEMM."""


def small_cases(stage: Stage[Any]) -> Iterator[Case]:
    """Yield small cases of a stage, the usual first; the later ones are for narrower kernels."""
    for m, h, scale, clamp, ranks in itertools.product(
        (6, 128), (128, 512), ScaleFormat, (7.0, None), RANKS
    ):
        words: dict[str, Any] = {"m": m, "h": h, "i": 128, "scale": scale, "clamp": clamp, **ranks}
        case = Case(**{n: v for n, v in words.items() if n in stage.reads})
        if stage.refusal(case) is None:
            yield case


def small_case(kernel: Kernel, *devices: str) -> Case | None:
    """Return the first small case that a kernel takes on one of some device types, or None."""
    for case in small_cases(kernel.stage):
        if any(kernel.declines(case, device) is None for device in devices):
            return case
    return None
