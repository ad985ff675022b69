"""A case: what a caller asks for.  How things are rounded is the recipe's business."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum

from moe_parity.references.arithmetic.formats import (
    BLOCK,
    E4M3,
    CodeFormat,
    ScaleFormat,
    ScaleLayout,
)
from moe_parity.references.errors import ParityError


class _Word(StrEnum):
    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class InputDtype(_Word):
    """The type of the tensor that is quantized, or of a top-k sum's result."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "f32"


class Values(_Word):
    """What the elements look like."""

    NORMAL = "normal"
    WIDE = "wide"
    """Another power of two for every row and 64 columns."""
    AIMED = "aimed"
    """The aimed inputs of every decision."""
    SPECIAL = "special"
    """NaN, infinities, subnormals and zeros of both signs among normal values."""
    EVERY_BF16 = "everybf16"
    """All 2^16 BF16 values in order: a group is one sign and exponent, all mantissas."""
    SCALES = "scales"
    """Scales of every exponent, another one in each block; zeros, subnormals and NaN among them."""


class Arrival(_Word):
    """In which form a layer's activations arrive."""

    PLAIN = "plain"
    """BF16, which the layer quantizes."""
    QUANTIZED = "quantized"
    """Codes and scales, quantized before they were dispatched, in the format of ``scale``."""


class Gate(_Word):
    """Which gated activation."""

    SILU = "silu"
    SWIGLUOAI = "swigluoai"
    """alpha 1.702 in the sigmoid, up + 1."""

    @property
    def alpha_beta(self) -> tuple[float, float]:
        """The factor inside the sigmoid and what is added to up."""
        return (1.0, 0.0) if self is Gate.SILU else (1.702, 1.0)


class Routing(_Word):
    """Which experts the tokens choose."""

    UNIFORM = "uniform"
    """Different experts for a token, all equally likely."""
    ONE = "one"
    """Every pair takes one expert."""
    REPEATED = "repeated"
    """A token may choose an expert twice."""
    HOLES = "holes"
    """Some ids are -1, foreign, or past the last expert."""
    LAST = "last"
    """Every pair takes the rank's last expert."""
    NOBODY = "nobody"
    """No pair is this rank's: experts of the next rank, or -1 where there is no other."""


class Hazard(_Word):
    """What surrounds a call."""

    NONE = "none"
    STRIDED = "strided"
    """The first input is a view with gaps; the gaps hold the largest number."""
    TRANSPOSED = "transposed"
    """The first input's rows are not contiguous."""
    GAPS = "gaps"
    """The rows of every input have gaps between them, which hold the largest number."""
    FAR = "far"
    """Rows of the first input, and weights of experts, whose offsets are past 2^31 elements."""
    OFFSET2 = "offset2"
    """Every input starts 2 bytes past a multiple of 64, or its element's size if that is more."""
    OFFSET4 = "offset4"
    OFFSET8 = "offset8"
    OFFSET16 = "offset16"

    @property
    def offset(self) -> int:
        """How many bytes past a multiple of 64 every input starts; 0 where nothing is said."""
        return int(self.value[6:]) if self.value.startswith("offset") else 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request.  ``m`` tokens, ``e`` experts, top-``k``, hidden ``h``, intermediate ``i``.

    A stage reads some of these words and refuses the others (``Stage.refusal``).  Raises
    ParityError, in a sentence, for sizes that nobody can ask for.
    """

    m: int = 1
    e: int = 1
    k: int = 1
    h: int = BLOCK
    i: int = BLOCK
    group: int = BLOCK
    scale: ScaleFormat = ScaleFormat.FP32
    mid_scale: ScaleFormat | None = None
    """The format of a layer's second quantization; None means the first one's."""
    layout: ScaleLayout = ScaleLayout.ROW
    """Of the scales that a quantizer writes, or that a permutation or a GEMM reads."""
    dtype: InputDtype = InputDtype.BF16
    arrives: Arrival = Arrival.PLAIN
    clamp: float | None = None
    gate: Gate = Gate.SILU
    ep_rank: int = 0
    ep_size: int = 1
    routing: Routing = Routing.UNIFORM
    values: Values = Values.NORMAL
    hazard: Hazard = Hazard.NONE
    pool: int = 1
    """The version of the aimed inputs; what was recorded without one means 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject impossible sizes."""
        for name in ("e", "k", "h", "i", "group", "ep_size", "pool"):
            if getattr(self, name) < 1:
                raise ParityError(f"case: {name} must be at least 1, got {getattr(self, name)}.")
        if self.m < 0:
            raise ParityError(f"case: m must not be negative, got {self.m}.")
        if not 0 <= self.ep_rank < self.ep_size:
            raise ParityError(f"case: rank {self.ep_rank} is not one of {self.ep_size}.")
        if self.mid_scale is self.scale:
            object.__setattr__(self, "mid_scale", None)

    @property
    def mid(self) -> ScaleFormat:
        """The format of the second quantization."""
        return self.scale if self.mid_scale is None else self.mid_scale

    @property
    def codes(self) -> CodeFormat:
        """The format of quantized elements; there is one so far."""
        return E4M3

    @property
    def local_experts(self) -> int:
        """Experts of one rank; raises ParityError where E is not a multiple of the ranks."""
        if self.e % self.ep_size:
            raise ParityError(f"case: {self.e} experts are not a multiple of {self.ep_size} ranks.")
        return self.e // self.ep_size

    @property
    def has_odd_ids(self) -> bool:
        """Whether ids occur that no rank has: -1, and those past the last expert."""
        nobody = self.routing is Routing.NOBODY and self.ep_size == 1
        return nobody or self.routing is Routing.HOLES

    @property
    def first_expert(self) -> int:
        """The global id of the rank's expert 0."""
        return self.ep_rank * self.local_experts

    @property
    def id(self) -> str:
        """The case in a test id: fixed order, lower case, defaults left out."""
        words = [self.scale.value]
        if self.mid_scale is not None:
            words.append(f"mid{self.mid_scale.value}")
        if self.clamp is not None:
            words.append("c" + f"{self.clamp:.10f}".rstrip("0").rstrip(".").replace(".", "p"))
        if self.ep_size > 1:
            words.append(f"ep{self.ep_rank}of{self.ep_size}")
        for name in ("gate", "layout", "dtype", "arrives", "routing", "values", "hazard"):
            if getattr(self, name) != _DEFAULTS[name]:
                words.append(getattr(self, name).value)
        if self.group != _DEFAULTS["group"]:
            words.append(f"g{self.group}")
        if self.pool != _DEFAULTS["pool"]:
            words.append(f"pool{self.pool}")
        sizes = {name: getattr(self, name) for name in ("m", "e", "k", "h", "i")}
        # A weight's case says i and h; one token is said where i is not.
        always = "h" if self.i != _DEFAULTS["i"] else "mh"
        shown = {n: v for n, v in sizes.items() if n in always or v != _DEFAULTS[n]}
        return "-".join(words + [f"{name}{value}" for name, value in shown.items()])

    def words(self, names: Container[str]) -> list[str]:
        """Return the words of some fields as an id would say them, those of defaults too."""
        kinds = [getattr(self, name).value for name, _ in _ENUMS if name in names]
        numbers = [f"g{self.group}"] if "group" in names else []
        return kinds + numbers + ([f"pool{self.pool}"] if "pool" in names else [])


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Case)}
_ENUMS: tuple[tuple[str, type[StrEnum]], ...] = (
    ("scale", ScaleFormat), ("gate", Gate), ("layout", ScaleLayout), ("dtype", InputDtype),
    ("arrives", Arrival), ("routing", Routing), ("values", Values), ("hazard", Hazard),
)  # fmt: skip


def parse_id(text: str, seed: int = 0) -> tuple[str, Case]:
    """Return (kernel name, case) of ``<kernel>-<case id>``; ``@<seed>`` behind it says the seed.

    Raises ParityError with a sentence naming the word that is not understood.
    """
    text, at, own = text.partition("@")
    if at:
        if not own.isdecimal():
            raise ParityError(f"id {text!r}: {own!r} after the @ is no seed, a whole number.")
        seed = int(own)
    words = text.split("-")
    start = next((n for n, w in enumerate(words) if w in set(ScaleFormat)), None)
    if not start:
        formats = ", ".join(ScaleFormat)
        raise ParityError(f"id {text!r} names no kernel and scale format; formats are {formats}.")
    found: dict[str, object] = {"seed": seed}
    for word in words[start:]:
        found.update(_parse_word(word, text))
    return "-".join(words[:start]), Case(**found)  # type: ignore[arg-type]


def _parse_word(word: str, text: str) -> dict[str, object]:
    for name, kind in _ENUMS:
        if word in set(kind):
            return {name: kind(word)}
    if word.startswith("mid") and word[3:] in set(ScaleFormat):
        return {"mid_scale": ScaleFormat(word[3:])}
    if match := re.fullmatch(r"([mekhi])(\d+)", word):
        return {match[1]: int(match[2])}
    if match := re.fullmatch(r"g(\d+)", word):
        return {"group": int(match[1])}
    if match := re.fullmatch(r"pool(\d+)", word):
        return {"pool": int(match[1])}
    if match := re.fullmatch(r"ep(\d+)of(\d+)", word):
        return {"ep_rank": int(match[1]), "ep_size": int(match[2])}
    if match := re.fullmatch(r"c(\d+(?:p\d+)?)", word):
        return {"clamp": float(match[1].replace("p", "."))}
    raise ParityError(f"id {text!r}: {word!r} is not a word of the id grammar (docs/ids.md).")
