"""Scales that were stored at another stride than theirs, which leaves some of them unwritten.

Columns of scales may lie apart (TMA: a multiple of 16 bytes).  A kernel that stores them at a
smaller stride stays inside the memory, and what the check of memory sees is that the end is as it
was: here the strides are looked for that put every scale where it was found.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.judged import Judged
from moe_parity.harness.diagnosis.cause import Cause, CauseKind
from moe_parity.references.language.stage import Kind, Output, Outputs

NEAR = 4
"""How many elements a stride may be too small by."""
FEW = 3
"""Scales that have to lie elsewhere than they should before another stride is believed."""


def stored_at(judged: Judged, want: Outputs) -> Cause | None:
    """Return the stride at which scales were stored; None where no other puts them there."""
    for name, output in judged.outputs.items():
        strides = output.strides
        if output.kind is not Kind.SCALES or strides is None or name not in judged.got:
            continue
        got, right = (comparable(t[name], output.codes) for t in (judged.got, want))
        for stride in _smaller(output):
            outer = strides.index(max(strides))
            changed = tuple(stride if n == outer else s for n, s in enumerate(strides))
            if _explains(got, right, output, strides, changed):
                noun = "row" if outer == 0 else "column"
                return Cause(
                    kind=CauseKind.MISTAKE, name="scale_stride",
                    words=f"{name} stored at a {noun} stride of {stride} instead of "
                    f"{strides[outer]}",
                )  # fmt: skip
    return None


def _smaller(output: Output) -> Iterator[int]:
    """Yield strides that are smaller than the outer one: half of it, the rows, a little less."""
    strides = output.strides or ()
    outer = max(strides)
    tried = (min(output.shape), max(output.shape), outer // 2)
    near = (outer - n for n in range(1, NEAR + 1))
    yield from dict.fromkeys(s for s in (*tried, *near) if 0 < s < outer)


def _explains(
    got: Tensor, right: Tensor, output: Output, strides: tuple[int, ...], changed: tuple[int, ...]
) -> bool:
    """Whether every scale that some program stored alone lies where other strides put it."""
    rows, words = output.shape
    row = torch.arange(rows, device=got.device)[:, None]
    word = torch.arange(words, device=got.device)[None]
    place, other = (row * s[0] + word * s[1] for s in (strides, changed))
    size = int(torch.maximum(place, other).max()) + 1
    writers = torch.zeros(size, dtype=torch.int64, device=got.device)
    writers.index_add_(0, other.flatten(), torch.ones_like(other.flatten()))
    source = torch.zeros(size, dtype=torch.int64, device=got.device)
    source[other.flatten()] = torch.arange(rows * words, device=got.device)
    each = -(-right.shape[1] // words)
    padded = torch.nn.functional.pad(right, (0, words * each - right.shape[1]))
    seen = torch.nn.functional.pad(got, (0, words * each - got.shape[1]))
    found = padded.reshape(rows * words, each)[source[place.flatten()]].view(rows, words, each)
    seen, padded = seen.view(rows, words, each), padded.view(rows, words, each)
    alone = (writers[place] == 1)[:, :, None]
    moved = alone & (found != padded)
    return int(moved.sum()) >= FEW and bool((seen == found)[alone.expand_as(found)].all())
