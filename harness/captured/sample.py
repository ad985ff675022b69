"""Which rows and experts of a call are kept, within a number of bytes.

Rows are tried in an order that a seed says, and each that still fits is taken, so that rows which
share experts come together.  Experts are numbered anew: a file of a few MB holds no other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.captured.axes import AXES, cut, expert_bytes, row_bytes, sizes_of
from moe_parity.harness.captured.file import Captured, made
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.references.stages import stage_named

LIMIT = 8 << 20
"""Bytes of a file, where nothing else is said."""
ROWS = 64
"""Rows of a file, where nothing else is said."""
CANDIDATES = 256
"""Rows that are held until it is known which experts they take."""
HEADER = 4096
"""Bytes of a file that are no tensors, besides a few for each row and expert."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What of a call is kept."""

    stage: str = "layer"
    words: Case = dataclasses.field(default_factory=Case)
    """The words of the case: scale format, limit, ranks."""
    rows: tuple[int, ...] | None = None
    """All of these, instead of a sample."""
    experts: tuple[int, ...] | None = None
    """These alone, by their number among the layer's own; None for all that the rows take."""
    count: int = ROWS
    limit: int = LIMIT
    seed: int = 0

    def candidates(self, m: int) -> list[int]:
        """Return the rows that are held of a call of ``m``, in the order of trying.

        Raises ParityError where there is none, or one is asked for that is not there.
        """
        if not m:
            raise ParityError("the call had no row: nothing to capture; capture another call.")
        if self.rows is not None:
            wrong = [row for row in self.rows if not 0 <= row < m]
            if wrong:
                raise ParityError(f"row {wrong[0]} is asked for, and the call had {m} rows.")
            return sorted(set(self.rows))
        order = random_bits.uniform(self.seed, "capture/row", m, 1).flatten().argsort(stable=True)
        return [int(row) for row in order[:CANDIDATES]]


def sampled(
    path: Path, wanted: Wanted, held: Mapping[str, Tensor], rows: Sequence[int], m: int,
    about: Mapping[str, Any],
) -> Captured:  # fmt: skip
    """Return the capture that fits into the limit.

    ``held`` are the tensors of candidate ``rows`` of a call of ``m``, and all experts, on any
    device.  Raises ParityError where not even one row fits, and for tensors that do not fit.
    """
    stage, case = wanted.stage, wanted.words
    sizes = sizes_of(stage, held)
    local, kept_experts = _taken(wanted, held, sizes.get("e"))
    chosen = _chosen(wanted, held, local)
    experts = sorted({e for n in chosen for e in local[n]} & set(kept_experts)) or kept_experts[:1]
    order = sorted(chosen, key=lambda n: rows[n])
    # experts first, and where they lie: of a model only what is kept leaves the GPU
    few = {n: _some(t, AXES[stage][n], experts).cpu() for n, t in held.items()}
    tensors = cut(stage, few, rows=order)
    whole = True
    if "e" in sizes and "ids" in tensors:
        tensors["ids"], whole = _renumbered(tensors["ids"], case, sizes["e"], experts)
    if not whole:
        tensors.pop("out", None)
    origin = {
        **about,
        "sizes": sizes | {"m": m},
        "rows": [rows[n] for n in order],
        "experts": [case.ep_rank * sizes["e"] + e for e in experts] if "e" in sizes else [],
        "whole": whole,
        "seed": wanted.seed,
    }
    return made(path, stage_named(stage), case, tensors, origin)


def _some(tensor: Tensor, words: str, experts: Sequence[int]) -> Tensor:
    if not words.startswith("e"):
        return tensor
    # one slice each: no index has to reach a GPU
    return torch.stack([tensor[e] for e in experts])


def _taken(
    wanted: Wanted, held: Mapping[str, Tensor], experts: int | None
) -> tuple[list[set[int]], list[int]]:
    """Return the local experts of each row, and those that may be kept."""
    ids = held.get("ids")
    if ids is None or experts is None:
        count = next(t.shape[0] for n, t in held.items() if AXES[wanted.stage][n][0] == "m")
        return [set() for _ in range(count)], []
    first = wanted.words.ep_rank * experts
    listed = ids.cpu().tolist()
    local = [{e - first for e in row if 0 <= e - first < experts} for row in listed]
    if wanted.experts is None:
        return local, list(range(experts))
    wrong = [e for e in wanted.experts if not 0 <= e < experts]
    if wrong:
        raise ParityError(f"expert {wrong[0]} is asked for, and the layer has {experts}.")
    kept = sorted(set(wanted.experts))
    return [row & set(kept) for row in local], kept


def _chosen(wanted: Wanted, held: Mapping[str, Tensor], local: Sequence[set[int]]) -> list[int]:
    """Return which of the candidates are kept; raises ParityError where none fits."""
    of_row, of_expert = row_bytes(wanted.stage, held), expert_bytes(wanted.stage, held)
    if wanted.rows is None and wanted.experts is not None:
        order = [n for n, experts in enumerate(local) if experts]
        if not order:
            raise ParityError("no row takes one of the experts that are asked for.")
    else:
        order = list(range(len(local)))
    chosen: list[int] = []
    experts: set[int] = set()
    for n in order:
        more = experts | local[n]
        size = HEADER + (len(chosen) + 1) * (of_row + 8) + max(len(more), 1) * (of_expert + 8)
        fits = size <= wanted.limit
        if wanted.rows is not None and not fits:
            raise ParityError(_too_large(wanted, local, order, of_row, of_expert))
        if fits:
            chosen.append(n)
            experts = more
        if len(chosen) == wanted.count and wanted.rows is None:
            break
    if not chosen:
        least = min(order, key=lambda n: len(local[n]))
        raise ParityError(_too_large(wanted, local, [least], of_row, of_expert))
    return chosen


def _too_large(
    wanted: Wanted, local: Sequence[set[int]], order: Sequence[int], of_row: int, of_expert: int
) -> str:
    count = len(set().union(*(local[n] for n in order)))
    size = HEADER + len(order) * (of_row + 8) + max(count, 1) * (of_expert + 8)
    what = "one row needs" if len(order) == 1 else f"{len(order)} rows need"
    return (
        f"{what} {size:,} bytes, {count} experts of {of_expert:,} among them, and the limit is "
        f"{wanted.limit:,}: H and I stay whole, as bits depend on them; pass limit={size}, or "
        "say which experts to keep, and the pairs of others are nobody's."
    )


def _renumbered(ids: Tensor, case: Case, experts: int, kept: Sequence[int]) -> tuple[Tensor, bool]:
    """Return ids of the experts that were kept, and whether no pair of the rank was lost.

    Pairs of other ranks stay another rank's; ids that nobody has, and lost pairs, become -1.
    """
    first, count = case.ep_rank * experts, len(kept)
    number = {first + e: case.ep_rank * count + n for n, e in enumerate(kept)}
    other = (case.ep_rank + 1) % case.ep_size * count
    made_of: list[int] = []
    whole = True
    for value in ids.flatten().tolist():
        if value in number:
            made_of.append(number[value])
        elif 0 <= value < experts * case.ep_size and not first <= value < first + experts:
            made_of.append(other)
        elif value == -1 or first <= value < first + experts:
            whole &= value == -1
            made_of.append(-1)
        else:
            raise ParityError(
                f"ids hold {value}, and the layer has {experts} experts, {case.ep_size} ranks of "
                "them: say the rank as a word of the case, such as case='fp32-ep1of4'."
            )
    return torch.tensor(made_of, dtype=ids.dtype).view(ids.shape), whole
