"""What each dimension of a captured tensor counts: which can be cut, and what has to fit together.

Rows, choices and experts can be left out without changing the bits of a row that stays; blocks of H
and I cannot, where a sum or a scale runs over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.errors import ParityError

AXES: Mapping[str, Mapping[str, str]] = {
    "layer": {
        "x": "m h", "x_scale": "m h/", "ids": "m k", "weights": "m k",
        "w2": "e h i", "w2_scale": "e h/ i/", "w13": "e 2i h", "w13_scale": "e 2i/ h/",
        "act_codes": "m h", "act_scales": "m h/", "fc1": "p 2i", "mid_codes": "p i",
        "mid_scales": "p i/", "fc2": "p h", "out": "m h",
    },
    "act_quant": {"x": "m h", "codes": "m h", "scales": "m h/"},
    "fc1": {
        "ids": "m k", "weights": "m k", "a": "m h", "a_scale": "m h/", "w": "e 2i h",
        "w_scale": "e 2i/ h/", "bias": "e 2i", "rows": "p 2i",
    },
    "fc2": {
        "ids": "m k", "weights": "m k", "a": "p i", "a_scale": "p i/", "w": "e h i",
        "w_scale": "e h/ i/", "bias": "e h", "rows": "p h",
    },
    "swiglu_quant": {"rows": "m 2i", "expert": "m", "codes": "m i", "scales": "m i/"},
    "combine": {"rows": "m k h", "weights": "m k", "ids": "m k", "out": "m h"},
}  # fmt: skip
"""Stage -> tensor -> its dimensions: m rows, k choices, p = m * k pairs, e experts, h, i columns.

``2i`` is gate and up one after the other, a slash is one number for each block of 128.
"""

OUTPUTS = frozenset(
    {"act_codes", "act_scales", "fc1", "mid_codes", "mid_scales", "fc2", "out", "codes", "scales"}
)
"""Names that no stage takes; ``rows`` is an output of the GEMMs and an input of others."""


def is_output(stage: str, name: str) -> bool:
    """Whether a captured tensor is what a stage gave, not what it took."""
    return name in OUTPUTS or (name == "rows" and stage in ("fc1", "fc2"))


def sizes_of(stage: str, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return m, k, e, h and i of a stage's tensors, as far as they say them.

    Raises ParityError, in a sentence, for a tensor that does not fit the others.
    """
    sizes: dict[str, int] = {}
    axes = AXES[stage]
    for name in [name for name in axes if name in tensors]:
        words, shape = axes[name].split(), tuple(tensors[name].shape)
        fits = len(words) == len(shape)
        for word, size in zip(words, shape, strict=False):
            if word in ("m", "k", "e", "h", "i"):
                sizes.setdefault(word, size)
            elif word == "2i" and size % 2 == 0:
                sizes.setdefault("i", size // 2)
            fits = fits and _size(word, sizes) in (None, size)
        if not fits:
            known = ", ".join(f"{word.upper()} = {size}" for word, size in sizes.items())
            raise ParityError(
                f"{stage}: {name} is {list(shape)}, expected [{', '.join(map(_said, words))}]; "
                f"the tensors before it say {known}."
            )
    return sizes


def _size(word: str, sizes: Mapping[str, int]) -> int | None:
    """Return what a dimension must be, None where nothing says it yet."""
    if word == "p":
        return sizes["m"] * sizes["k"] if {"m", "k"} <= sizes.keys() else None
    base = sizes.get(word.strip("2/"))
    if base is None:
        return None
    base *= 2 if word.startswith("2") else 1
    return -(-base // BLOCK) if word.endswith("/") else base


def _said(word: str) -> str:
    own = {"m": "M", "k": "k", "p": "M * k", "e": "E", "h": "H", "i": "I", "2i": "2 * I"}
    text = own[word.rstrip("/")]
    return f"ceil({text} / {BLOCK})" if word.endswith("/") else text


def cut(
    stage: str,
    tensors: Mapping[str, Tensor],
    *,
    rows: Sequence[int] | None = None,
    choices: Sequence[int] | None = None,
    experts: Sequence[int] | None = None,
    h: Sequence[int] | None = None,
    i: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Return some rows, choices, experts, and blocks of 128 of H and I; None leaves all.

    Ids are left as they are; outputs that a block of H or I belongs to are left out.
    """
    sizes = sizes_of(stage, tensors)
    count, k = sizes.get("m", 0), sizes.get("k", 1)
    pairs = None
    if rows is not None or choices is not None:
        of_rows = range(count) if rows is None else rows
        of_k = range(k) if choices is None else choices
        pairs = [row * k + choice for row in of_rows for choice in of_k]
    index: dict[str, Sequence[int] | None] = {"m": rows, "k": choices, "p": pairs, "e": experts}
    for word, blocks in (("h", h), ("i", i)):
        if blocks is not None:
            size = sizes[word]
            index[word] = _elements(blocks, size)
            index[f"{word}/"] = blocks
            index[f"2{word}"] = [half + n for half in (0, size) for n in _elements(blocks, size)]
            across = -(-size // BLOCK)
            index[f"2{word}/"] = [half + n for half in (0, across) for n in blocks]
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (h is not None or i is not None) and is_output(stage, name):
            continue
        for dim, word in enumerate(AXES[stage][name].split()):
            chosen = index.get(word)
            if chosen is not None:
                tensor = tensor.index_select(dim, torch.tensor(chosen, dtype=torch.int64))
        made[name] = tensor.contiguous()
    return made


def _elements(blocks: Iterable[int], size: int) -> list[int]:
    return [n for block in blocks for n in range(block * BLOCK, min(size, (block + 1) * BLOCK))]


def row_bytes(stage: str, tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of a row, its pairs included."""
    return sum(
        tensor.nbytes // max(tensor.shape[0], 1) * (1 if words.startswith("m") else _k(tensors))
        for name, tensor in tensors.items()
        if (words := AXES[stage][name])[0] in "mp"
    )


def _k(tensors: Mapping[str, Tensor]) -> int:
    return tensors["ids"].shape[1] if "ids" in tensors else 1


def expert_bytes(stage: str, tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of an expert."""
    return sum(
        math.prod(tensor.shape[1:]) * tensor.element_size()
        for name, tensor in tensors.items()
        if AXES[stage][name].startswith("e")
    )
