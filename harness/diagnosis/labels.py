"""Where outputs lie, in the words of the field: expert, k, token, tile, block of columns.

A way to label outputs tells whether something holds in one place only, and says which.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_parity.harness.checks.judged import Judged
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.language.stage import Output

LISTED = 6
"""Numbers that a sentence lists; of more it gives the first and the last."""
Along = dict[str, tuple[int, Tensor]]
"""Output -> dimension, and the label of each index along it, int64."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """One way: a number for each row or each column of every output that has it."""

    one: str
    """For one label: ``for expert {}``."""
    many: str
    """For several: ``for experts {}``."""
    along: Along
    texts: Mapping[int, str] = field(default_factory=dict)
    """The words of a label that is no number."""

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
            found |= set(labels[there.cpu()].tolist())
        return found

    def where(self, name: str, chosen: set[int], like: Tensor) -> Tensor:
        """Return a mask of an output where it has one of some labels."""
        dim, labels = self.along[name]
        there = torch.isin(labels, torch.tensor(sorted(chosen))).to(like.device)
        shape = [1] * like.dim()
        shape[dim] = -1
        return there.view(shape).expand(like.shape)

    def words(self, chosen: set[int]) -> str:
        """Return where they are, in words."""
        if self.texts:
            return " and ".join(self.texts[n] for n in sorted(chosen))
        return (self.one if len(chosen) == 1 else self.many).format(numbers(chosen))

    def plain(self, chosen: set[int]) -> bool:
        """Whether a few words say them: a few numbers, or all from one to another."""
        found = sorted(chosen)
        steps = {b - a for a, b in itertools.pairwise(found)}
        return len(found) <= LISTED or len(steps) == 1


def numbers(chosen: set[int]) -> str:
    """Return numbers in words: ``3``, ``1 and 4``, ``19 to 23``, ``0 to 62 in steps of 2``."""
    found = sorted(chosen)
    if len(found) <= 2:
        return " and ".join(map(str, found))
    steps = {b - a for a, b in itertools.pairwise(found)}
    if len(steps) == 1:
        span = f"{found[0]} to {found[-1]}"
        return span if steps == {1} else f"{span} in steps of {steps.pop()}"
    if len(found) <= LISTED:
        return f"{', '.join(map(str, found[:-1]))} and {found[-1]}"
    return f"{found[0]} to {found[-1]} ({len(found)} of them)"


def labels_of(judged: Judged, shapes: Mapping[str, Sequence[int]]) -> list[Labels]:
    """Return the ways to label a stage's outputs of some shapes, those that say most first."""
    return [*_rows(judged, shapes), *_columns(judged, shapes)]


def _rows(judged: Judged, shapes: Mapping[str, Sequence[int]]) -> Iterator[Labels]:
    token: Along = {}
    slot: Along = {}
    expert: Along = {}
    rank: Along = {}
    rows: dict[str, Along] = {}
    for name, shape in shapes.items():
        output = judged.outputs[name]
        index, noun = torch.arange(shape[0]), output.axes[0]
        rows.setdefault(noun, {})[name] = 0, index
        pairs = _expert_of(judged, output)
        if noun == "token":
            token[name] = 0, index
        if noun == "expert":
            expert[name] = 0, index
        if pairs is not None:
            expert[name] = 0, pairs
            rank[name] = 0, _rank(pairs)
        if pairs is not None and noun == "pair":
            k = _top_k(judged.inputs)
            token[name], slot[name] = (0, index // k), (0, index % k)
    yield Labels(one="for expert {}", many="for experts {}", along=expert)
    yield Labels(one="for k {}", many="for k {}", along=slot)
    yield Labels(one="for token {}", many="for tokens {}", along=token)
    yield Labels(one="in row {} of each expert", many="in rows {} of each expert", along=rank)
    yield from _halves(rank, "rows", " of an expert")
    for noun, along in rows.items():
        tall = max(len(labels) for _, labels in along.values())
        low = min(len(labels) for _, labels in along.values())
        if low < tall:  # the scales of tiles beside their codes
            tiles = {n: (d, i if len(i) == low else i // BLOCK) for n, (d, i) in along.items()}
            yield Labels(one="in row {} of tiles", many="in rows {} of tiles", along=tiles)
            along = {n: v for n, v in along.items() if len(v[1]) == tall}
        if noun not in ("token", "expert"):
            yield from _halves(along, f"{noun}s")
            yield Labels(one=f"in {noun} {{}}", many=f"in {noun}s {{}}", along=along)
        else:
            yield from _halves(along, f"{noun}s")


def _halves(along: Along, noun: str, tail: str = "") -> Iterator[Labels]:
    """Yield which half of every tile of 2, 4, 8 ... 128."""
    for size in (2, 4, 8, 16, 32, 64, 128):
        half = size // 2
        if not along or max(len(index) for _, index in along.values()) < size:
            continue
        spans = [f"{n * half} to {n * half + half - 1}" if half > 1 else f"{n}" for n in (0, 1)]
        texts = {n: f"in {noun} {span} of every {size}{tail}" for n, span in enumerate(spans)}
        if size == 2:
            texts = {0: f"in even {noun}{tail}", 1: f"in odd {noun}{tail}"}
        own = {n: (d, index % size // half) for n, (d, index) in along.items()}
        yield Labels(one="", many="", along=own, texts=texts)


def _columns(judged: Judged, shapes: Mapping[str, Sequence[int]]) -> Iterator[Labels]:
    column: Along = {}
    block: Along = {}
    scale: Along = {}
    gate: Along = {}
    for name, shape in shapes.items():
        output = judged.outputs[name]
        if len(shape) < 2:
            continue
        index = torch.arange(shape[1])
        if output.axes[1] == "scale":
            scale[name] = 1, index
            continue
        column[name] = 1, index
        block[name] = 1, index // BLOCK
        if judged.stage.name == "fc1" or name == "fc1":
            gate[name] = 1, index // max(index.numel() // 2, 1)
    groups = next((shapes[name][1] for name in scale), 0)
    if groups:
        wide = {
            n: (1, index // max(-(-index.numel() // groups), 1)) for n, (_, index) in column.items()
        }
        yield Labels(one="for scale {}", many="for scales {}", along=scale | wide)
    yield Labels(one="", many="", along=gate, texts={0: "in the gate", 1: "in up"})
    yield Labels(one="in block {} of 128 columns", many="in blocks {} of 128 columns", along=block)
    yield from _halves(column, "columns")
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
