"""The scale format of one quantization of a layer, row by row: what the documentation shows.

Written down apart from ``kernels/ours/scale_format.py``, which has to agree in every setting that a
row stands for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

import pytest

FORMATS = ("fp32", "ue8m0")
CHECKPOINTS: Mapping[str, dict[str, object] | None] = {
    "none": None,
    "silent": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "ue8m0": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
}
"""No checkpoint; a quantization config without ``scale_fmt``; one with it."""
TRITON = ("triton", "batched_triton")
DEEP_GEMM = ("deep_gemm", "batched_deep_gemm")
ANY_FORMAT = ("", *FORMATS)
ANY_BACKEND = ("none", *TRITON, *DEEP_GEMM)
WITHOUT_THE_WORD = ("none", "silent")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Settings with one answer; a field holds the words that it stands for, "" for not set."""

    own: tuple[str, ...] = ("",)
    """The format set for this quantization alone."""
    layer: tuple[str, ...] = ("",)
    """That set for both quantizations of the layer."""
    checkpoint: tuple[str, ...] = tuple(CHECKPOINTS)
    backend: tuple[str, ...] = ANY_BACKEND
    default: tuple[str, ...] = FORMATS
    """The global default."""
    found: str
    """The format."""
    because: str
    """What the reason says of it, of the quantization ``{which}``."""

    def __str__(self) -> str:
        """Return the reason in one word, for the ids of tests."""
        return self.because.format(which="this_one").replace(" ", "_")

    def settings(self) -> Iterator[tuple[str, ...]]:
        """Yield (own, layer, checkpoint, backend, default)."""
        return itertools.product(self.own, self.layer, self.checkpoint, self.backend, self.default)

    @property
    def dispatched(self) -> str:
        """What activations that were quantized before they were dispatched arrive in."""
        if self.found == "fp32":
            return "fp32; or ue8m0, which the reason says"
        return "ue8m0; fp32 is refused"


ROWS = (
    *(
        Row(own=(form,), layer=ANY_FORMAT, found=form, because=f"{{which}} is set to {form}")
        for form in FORMATS
    ),
    *(Row(layer=(form,), found=form, because=f"the layer is set to {form}") for form in FORMATS),
    Row(checkpoint=("ue8m0",), found="ue8m0", because="the checkpoint says scale_fmt ue8m0"),
    Row(
        checkpoint=WITHOUT_THE_WORD, backend=DEEP_GEMM, found="ue8m0",
        because="backend reads powers of two",
    ),
    Row(
        checkpoint=WITHOUT_THE_WORD, backend=TRITON, found="fp32",
        because="backend reads fp32 scales",
    ),
    *(
        Row(
            checkpoint=WITHOUT_THE_WORD, backend=("none",), default=(form,), found=form,
            because=f"nothing else says it, and the global default is {form}",
        )
        for form in FORMATS
    ),
)  # fmt: skip
"""The table; the first thing that is said decides, from left to right."""

EVERY = Row(own=ANY_FORMAT, layer=ANY_FORMAT, found="", because="")
"""All settings that there are."""


def cells() -> list[tuple[str, ...]]:
    """Return the rows for the documentation: a field that may hold anything is said so."""
    found = []
    for row in ROWS:
        words = []
        for field in fields(Row)[:5]:
            value = getattr(row, field.name)
            said = ", ".join(f"`{word}`" if word else "-" for word in value)
            words.append("any" if value == getattr(EVERY, field.name) else said)
        found.append((*words, f"`{row.found}`", row.dispatched))
    return found


def setting_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Yield what sets the global default; it is read anew then, and again afterwards."""
    from moe_parity.kernels.ours import scale_format

    def chosen(word: str) -> None:
        monkeypatch.setenv(scale_format.DEFAULT, word)
        scale_format.default_format.cache_clear()

    yield chosen
    monkeypatch.undo()
    scale_format.default_format.cache_clear()
