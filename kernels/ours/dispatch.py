"""Which path a call of ``run_moe`` takes, and why.

The conditions of the decode path are listed here once; the docs' table is made from this list.  A
call meets the decode path when all hold.  The prefix-sum path is taken when it is asked for, and
``prefix_rules`` says of what.  All paths give a token the same bits, so the choice is one of speed.
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
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.errors import ParityError

DECODE_TOKENS = 32
"""Most tokens per rank that take the decode path."""

OPT_OUT = "MOE_PARITY_DECODE"
"""Environment variable, read once: 0 sends every call to the large-batch path."""

ALIGNMENTS = (16, 32, 64, 128, 256)
"""Rows to whose multiples the prefix-sum path may round an expert's start; DeepGEMM's on SM90."""

ALIGNMENT = 128
"""DeepGEMM's default."""

log = logging.getLogger("moe_parity")


class Path(StrEnum):
    """The ways through the layer."""

    DECODE = "decode"
    LARGE = "large"
    PREFIX_SUM = "prefix_sum"
    """By expert, live rows alone; taken where it is asked for."""


class Gemm(StrEnum):
    """Whose GEMMs the prefix-sum path runs."""

    OURS = "ours"
    DEEPGEMM = "deepgemm"
    """The installed DeepGEMM's, on a Hopper GPU."""


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
    weights: tuple[torch.dtype, torch.dtype] = (torch.uint8, torch.float32)
    """Of codes and scales."""
    hidden: int = BLOCK
    width: int = BLOCK
    """H, and I of an expert."""
    experts: int = 1
    alignment: int = ALIGNMENT
    gemm: Gemm = Gemm.OURS
    fused: bool = True


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

    Raises ParityError for what no path does, LoRA and other input types, for a forced decode path
    that a condition other than the number of tokens forbids, and for a prefix-sum path that does
    not apply.
    """
    forced = None if force is None else word(Path, force, "run_moe: path")
    if forced is Path.PREFIX_SUM:
        wrong = [rule for rule in prefix_rules(request) if not rule.holds]
        if wrong:
            raise ParityError(f"run_moe: the prefix-sum path does not apply: {wrong[0].otherwise}.")
    else:
        _check_unused(request)
    if request.has_lora:
        raise ParityError("run_moe: LoRA needs the BF16 activation, which this layer never has.")
    if not request.is_quantized and request.dtype is not torch.bfloat16:
        raise ParityError(
            f"run_moe: x must be bfloat16, or uint8 codes with x_scale, got {request.dtype}."
        )
    unmet = [c for c in CONDITIONS if not c.holds(request)]
    if forced is not None:
        hard = [c for c in unmet if c.name != "tokens"]
        if forced is Path.DECODE and hard:
            raise ParityError(f"run_moe: the decode path cannot be forced: {hard[0].otherwise}.")
        return Choice(path=forced, reason=f"the {forced} path was asked for.")
    if opted_out():
        return Choice(path=Path.LARGE, reason=f"{OPT_OUT}=0 turns the decode path off.")
    if unmet:
        return Choice(path=Path.LARGE, reason=f"{unmet[0].otherwise}.")
    return Choice(path=Path.DECODE, reason="every condition of the decode path holds.")


def _check_unused(request: Request) -> None:
    """Raise ParityError for what is asked of the prefix-sum path where another one is taken."""
    if request.gemm is not Gemm.OURS or request.alignment != ALIGNMENT:
        raise ParityError(
            f"run_moe: gemm = {str(request.gemm)!r} and an alignment of {request.alignment!r} are "
            "the prefix-sum path's: ask for path='prefix_sum'."
        )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the prefix-sum path's table, and whether a request meets it."""

    name: str
    text: str
    """What the path takes, for the docs."""
    holds: bool
    otherwise: str = ""
    """What is said where it does not hold; empty where nothing can break it."""


def prefix_rules(request: Request) -> tuple[Rule, ...]:
    """Return what decides whether the prefix-sum path applies to a request; all must hold.

    Whether DeepGEMM is installed, and the GPU a Hopper one, is asked when it is called.
    """
    r, deepgemm = request, request.gemm is Gemm.DEEPGEMM
    known = ", ".join(map(str, ALIGNMENTS))
    return (
        Rule(
            name="weights",
            text="block-FP8: E4M3 codes as uint8, fp32 scales of 128 x 128 tiles",
            holds=r.weights == (torch.uint8, torch.float32),
            otherwise="the weights are not block-FP8, uint8 codes with float32 scales",
        ),
        Rule(
            name="activation",
            text="SwiGLU, with alpha and beta or without, a clamp before or after SiLU, one number "
            "or one for each expert",
            holds=r.activation in ("swiglu", "swiglu_alpha_beta"),
            otherwise="the activation is not a SwiGLU",
        ),
        Rule(
            name="dtype",
            text="BF16 input, or uint8 codes with `x_scale`",
            holds=r.is_quantized or r.dtype is torch.bfloat16,
            otherwise="the input is not BF16",
        ),
        Rule(
            name="lora",
            text="no LoRA",
            holds=not r.has_lora,
            otherwise="LoRA needs the BF16 activation, which is never stored",
        ),
        Rule(
            name="fused",
            text="SwiGLU and its quantization in one launch",
            holds=r.fused,
            otherwise="SwiGLU and its quantization are asked for apart, with fused=False",
        ),
        Rule(
            name="bias",
            text='expert biases with `gemm="ours"`, none with `gemm="deepgemm"`',
            holds=not (deepgemm and r.has_bias),
            otherwise="the experts have a bias, which DeepGEMM's GEMM does not add",
        ),
        Rule(
            name="out",
            text="a new output or the caller's; BF16, FP16 or FP32",
            holds=True,
        ),
        Rule(
            name="tokens",
            text="any number of tokens, 0 too, and any ids: those of other ranks, -1 and ids past "
            "the end are dropped",
            holds=r.tokens >= 0,
        ),
        Rule(
            name="sizes",
            text="H and I positive multiples of 128",
            holds=all(size > 0 and size % BLOCK == 0 for size in (r.hidden, r.width)),
            otherwise="H and I must be positive multiples of 128",
        ),
        Rule(
            name="experts",
            text="any number of experts, at least one",
            holds=r.experts > 0,
            otherwise="the rank has no expert",
        ),
        Rule(
            name="alignment",
            text=f"an `alignment` of {known} rows, {ALIGNMENT} where nothing is said",
            holds=type(r.alignment) is int and r.alignment in ALIGNMENTS,
            otherwise=f"the alignment is none of {known}",
        ),
    )


@lru_cache(maxsize=64)
def log_once(choice: Choice) -> None:
    """Log a path and its reason the first time it is taken."""
    log.info("run_moe takes the %s path: %s", choice.path, choice.reason)


def table() -> str:
    """Return the conditions as a Markdown table, for docs/dispatch.md."""
    rows = [f"| `{c.name}` | {c.text} | {c.otherwise} |" for c in CONDITIONS]
    head = "| condition | decode path when | otherwise the reason is |"
    return "\n".join([head, "|---|---|---|", *rows])


def prefix_table() -> str:
    """Return what the prefix-sum path takes as a Markdown table, for docs/dispatch.md."""
    rules = prefix_rules(Request(tokens=1, dtype=torch.bfloat16))
    rows = [f"| `{r.name}` | {r.text} | {r.otherwise or 'none: it always holds'} |" for r in rules]
    head = "| what | the prefix-sum path takes | otherwise the refusal is |"
    return "\n".join([head, "|---|---|---|", *rows])
