"""Where outputs lie, in the words of the field: expert, k, token, tile, block of columns.

A way to label outputs tells whether something holds in one place only, and says which.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.harness.checks.judged import Judged
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.language.stage import Output

LISTED = 6
"""Numbers that a sentence lists; of more it gives the first and the last."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """One way: a number for each row or each column of every output that has it."""

    one: str
    """For one label: ``for expert {}``."""
    many: str
    """For several: ``for experts {}``."""
    along: Mapping[str, tuple[int, Tensor]]
    """Output -> dimension, and the label of each index along it, int64."""
    names: tuple[str, ...] = ()
    """What each label is called, where it is more than its number."""

    def of(self, masks: Mapping[str, Tensor]) -> set[int] | None:
        """Return the labels of what is marked; None where an output that is marked has none."""
        found: set[int] = set()
        for name, mask in masks.items():
            if not bool(mask.any()):
                continue
            if name not in self.along:
                return None
            dim, labels = self.along[name]
            there = mask.any(1 - dim) if mask.dim() > 1 else mask
            if there.numel() > labels.numel():  # a list that is too short: what it lacks has none
                return None
            found |= set(labels[there.to(labels.device)].tolist())
        return found

    def words(self, chosen: set[int]) -> str:
        """Return where they are, in words."""
        if self.names:
            return " and ".join(self.names[label] for label in sorted(chosen))
        return (self.one if len(chosen) == 1 else self.many).format(numbers(chosen))


def numbers(chosen: set[int]) -> str:
    """Return numbers in words: ``3``, ``1 and 4``, ``19 to 23``, ``every 2nd from 0 to 62``."""
    found = sorted(chosen)
    if len(found) <= 2:
        return " and ".join(map(str, found))
    step = found[1] - found[0]
    if all(b - a == step for a, b in itertools.pairwise(found)):
        span = f"{found[0]} to {found[-1]}"
        return span if step == 1 else f"{span} in steps of {step}"
    if len(found) <= LISTED:
        return f"{', '.join(map(str, found[:-1]))} and {found[-1]}"
    return f"{found[0]} to {found[-1]} ({len(found)} of them)"


Along = dict[str, tuple[int, Tensor]]


def labels_of(judged: Judged) -> list[Labels]:
    """Return the ways to label a stage's outputs, those that say most first."""
    return [*_rows(judged), *_columns(judged)]


def _rows(judged: Judged) -> Iterator[Labels]:
    row: Along = {}
    token: Along = {}
    slot: Along = {}
    expert: Along = {}
    rank: Along = {}
    for name, output in judged.outputs.items():
        if name not in judged.got:
            continue
        index = torch.arange(judged.got[name].shape[0])
        row[name] = 0, index
        pairs = _expert_of(judged, output)
        if output.axes[0] == "token":
            token[name] = 0, index
        if pairs is not None:
            expert[name] = 0, pairs
            rank[name] = 0, _rank(pairs)
        if pairs is not None and output.axes[0] == "pair":
            k = _top_k(judged.inputs)
            token[name], slot[name] = (0, index // k), (0, index % k)
    noun = next((o.axes[0] for n, o in judged.outputs.items() if n in judged.got), "row")
    yield Labels(one="for expert {}", many="for experts {}", along=expert)
    yield Labels(one="for k {}", many="for k {}", along=slot)
    yield Labels(one="for token {}", many="for tokens {}", along=token)
    yield Labels(one="in row {} of each expert", many="in rows {} of each expert", along=rank)
    yield from _halves(rank, "rows {} of every {} of an expert")
    yield from _halves(row, "rows {} of every {}")
    yield Labels(one=f"in {noun} {{}}", many=f"in {noun}s {{}}", along=row)


def _halves(along: Along, words: str) -> Iterator[Labels]:
    """Yield which half of every tile of 2, 4, 8 ... 128."""
    for size in (2, 4, 8, 16, 32, 64, 128):
        half = size // 2
        halves = {n: (d, index % size // half) for n, (d, index) in along.items()}
        spans = (
            f"{first} to {first + half - 1}" if half > 1 else f"{first}" for first in (0, half)
        )
        names = tuple(f"in {words.format(span, size)}" for span in spans)
        yield Labels(one="", many="", along=halves, names=names)


def _columns(judged: Judged) -> Iterator[Labels]:
    column: Along = {}
    block: Along = {}
    scale: Along = {}
    gate: Along = {}
    for name, output in judged.outputs.items():
        if name not in judged.got or len(output.axes) < 2:
            continue
        index = torch.arange(judged.got[name].shape[1])
        if output.axes[1] == "scale":
            scale[name] = 1, index
            continue
        column[name] = 1, index
        block[name] = 1, index // BLOCK
        if judged.stage.name == "fc1" or name == "fc1":
            gate[name] = 1, index // max(index.numel() // 2, 1)
    groups = next((judged.got[name].shape[1] for name in scale), 0)
    if groups:
        wide = {
            n: (1, index // max(index.numel() // groups, 1)) for n, (_, index) in column.items()
        }
        yield Labels(one="for scale {}", many="for scales {}", along=scale | wide)
    yield Labels(one="in half {} of gate and up", many="", along=gate)
    yield Labels(one="in block {} of 128 columns", many="in blocks {} of 128 columns", along=block)
    yield from _halves(column, "columns {} of every {}")
    yield Labels(one="in column {}", many="in columns {}", along=column)


def _expert_of(judged: Judged, output: Output) -> Tensor | None:
    """Return the expert of each row of an output, where its rows belong to experts."""
    expert = getattr(judged.inputs, "expert", None)
    if not isinstance(expert, Tensor) or output.axes[0] not in ("pair", "row"):
        return None
    return expert.cpu() if expert.numel() == output.shape[0] else None


def _top_k(inputs: object) -> int:
    holder = inputs if hasattr(inputs, "ids") else getattr(inputs, "batch", None)
    ids = getattr(holder, "ids", None)
    return int(ids.shape[1]) if isinstance(ids, Tensor) else 1


def _rank(expert: Tensor) -> Tensor:
    """Return how many rows of the same expert lie before each row."""
    order = torch.argsort(expert, stable=True)
    own = expert[order]
    starts = torch.searchsorted(own, own)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel()) - starts
    return rank
