"""Which path a call of ``run_moe`` takes, and why.

The conditions of the decode path are listed here once; the docs' table is made from this list.  A
call meets the decode path when all hold.  Both paths give a token the same bits, so the choice is
one of speed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import torch

from moe_parity.kernels.ours.arguments import word
from moe_parity.references.errors import ParityError

DECODE_TOKENS = 32
"""Most tokens per rank that take the decode path."""

OPT_OUT = "MOE_PARITY_DECODE"
"""Environment variable, read once: 0 sends every call to the large-batch path."""

log = logging.getLogger("moe_parity")


class Path(StrEnum):
    """The two ways through the layer."""

    DECODE = "decode"
    LARGE = "large"


class Down(StrEnum):
    """How the activations of the down projection lie on the large path; the bits are the same."""

    ROUTE_MAJOR = "route_major"
    """In the order of the pairs, a pointer for each row."""
    SORTED = "sorted"
    """By expert in whole blocks, loaded through a tensor descriptor."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The metadata of a call; nothing here needs a look at a tensor's values."""

    tokens: int
    dtype: torch.dtype
    activation: str = "swiglu"
    has_bias: bool = False
    has_lora: bool = False
    has_out: bool = False
    has_tensor_clamp: bool = False
    is_quantized: bool = False


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One condition of the decode path."""

    name: str
    text: str
    """What must hold, for the docs."""
    holds: Callable[[Request], bool]
    otherwise: str
    """What is said where it does not hold."""


CONDITIONS = (
    Condition(
        name="tokens",
        text=f"at most {DECODE_TOKENS} tokens per rank",
        holds=lambda r: r.tokens <= DECODE_TOKENS,
        otherwise=f"more than {DECODE_TOKENS} tokens",
    ),
    Condition(
        name="activation",
        text="plain SwiGLU, with a scalar clamp or none",
        holds=lambda r: r.activation == "swiglu",
        otherwise="alpha or beta is asked for",
    ),
    Condition(
        name="dtype",
        text="BF16 input",
        holds=lambda r: r.dtype is torch.bfloat16 or r.is_quantized,
        otherwise="the input is not BF16",
    ),
    Condition(
        name="bias",
        text="no expert bias",
        holds=lambda r: not r.has_bias,
        otherwise="the experts have a bias",
    ),
    Condition(
        name="out",
        text="no output tensor given by the caller",
        holds=lambda r: not r.has_out,
        otherwise="the caller gives the output tensor",
    ),
    Condition(
        name="tensor_clamp",
        text="no clamp given as a tensor",
        holds=lambda r: not r.has_tensor_clamp,
        otherwise="the clamp is a tensor",
    ),
    Condition(
        name="quantized",
        text="input that is not quantized yet",
        holds=lambda r: not r.is_quantized,
        otherwise="the input is already quantized",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The path of a call and the reason for it, one sentence."""

    path: Path
    reason: str


@lru_cache(maxsize=1)
def opted_out() -> bool:
    """Whether the environment turns the decode path off; read once."""
    value = os.environ.get(OPT_OUT, "1")
    if value not in ("0", "1"):
        raise ParityError(f"{OPT_OUT} must be 0 or 1, got {value!r}.")
    return value == "0"


def choose(request: Request, force: Path | str | None = None) -> Choice:
    """Return the path of a request; ``force`` asks for one.

    Raises ParityError for what neither path does, LoRA and other input types, and for a forced
    decode path that a condition other than the number of tokens forbids.
    """
    if request.has_lora:
        raise ParityError("run_moe: LoRA needs the BF16 activation, which this layer never has.")
    if not request.is_quantized and request.dtype is not torch.bfloat16:
        raise ParityError(
            f"run_moe: x must be bfloat16, or uint8 codes with x_scale, got {request.dtype}."
        )
    unmet = [c for c in CONDITIONS if not c.holds(request)]
    if force is not None:
        forced = word(Path, force, "run_moe: path")
        hard = [c for c in unmet if c.name != "tokens"]
        if forced is Path.DECODE and hard:
            raise ParityError(f"run_moe: the decode path cannot be forced: {hard[0].otherwise}.")
        return Choice(path=forced, reason=f"the {forced} path was asked for.")
    if opted_out():
        return Choice(path=Path.LARGE, reason=f"{OPT_OUT}=0 turns the decode path off.")
    if unmet:
        return Choice(path=Path.LARGE, reason=f"{unmet[0].otherwise}.")
    return Choice(path=Path.DECODE, reason="every condition of the decode path holds.")


@lru_cache(maxsize=64)
def log_once(choice: Choice) -> None:
    """Log a path and its reason the first time it is taken."""
    log.info("run_moe takes the %s path: %s", choice.path, choice.reason)


def table() -> str:
    """Return the conditions as a Markdown table, for docs/dispatch.md."""
    rows = [f"| `{c.name}` | {c.text} | {c.otherwise} |" for c in CONDITIONS]
    head = "| condition | decode path when | otherwise the reason is |"
    return "\n".join([head, "|---|---|---|", *rows])
