"""``silu_mul_quant``: the gated activation and its quantization, fused where the kernel can.

What the fused launch cannot do runs unfused, says why once, and follows the same recipe.  The
fallbacks are listed here once; the docs' table is made from this list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Literal, overload

import torch
from torch import Tensor

from moe_parity.kernels.ours import activation as fused
from moe_parity.kernels.ours.arguments import number, word
from moe_parity.kernels.ours.quant import GROUPS
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout
from moe_parity.references.errors import ParityError

log = logging.getLogger("moe_parity")


class Gated(StrEnum):
    """What acts on the gate."""

    SILU = "silu"
    GELU = "gelu"
    RELU2 = "relu2"
    """The square of max(g, 0)."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The metadata of a call."""

    width: int
    group: int
    activation: Gated
    with_activation: bool


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """One reason to run unfused."""

    name: str
    text: str
    """What is asked, for the docs."""
    holds: Callable[[Asked], bool]
    reason: str
    """What is said, once."""


FALLBACKS = (
    Fallback(
        name="activation",
        text="an activation other than SiLU",
        holds=lambda asked: asked.activation is not Gated.SILU,
        reason="the fused kernel has SiLU alone",
    ),
    Fallback(
        name="with_activation",
        text="the BF16 activation besides, which LoRA needs",
        holds=lambda asked: asked.with_activation,
        reason="the caller needs the BF16 activation, which the fused kernel never stores",
    ),
    Fallback(
        name="group",
        text="a group other than 64 and 128",
        holds=lambda asked: asked.group not in GROUPS,
        reason="the fused kernel has groups of 64 and 128",
    ),
    Fallback(
        name="ragged",
        text="I that is no multiple of the group: the last group is ragged",
        holds=lambda asked: asked.width % asked.group != 0,
        reason="I is no multiple of the group, and vectors are loaded by whole groups",
    ),
)


def fallback(asked: Asked) -> Fallback | None:
    """Return the first reason to run a call unfused, None where it is fused."""
    return next((one for one in FALLBACKS if one.holds(asked)), None)


@overload
def silu_mul_quant(
    x: Tensor, *, group: int = ..., scale: ScaleFormat | str = ...,
    layout: ScaleLayout | str = ..., limit: float | None = ..., clamp: str = ...,
    alpha: float = ..., beta: float = ..., activation: str = ..., form: str = ...,
    with_activation: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def silu_mul_quant(
    x: Tensor, *, group: int = ..., scale: ScaleFormat | str = ...,
    layout: ScaleLayout | str = ..., limit: float | None = ..., clamp: str = ...,
    alpha: float = ..., beta: float = ..., activation: str = ..., form: str = ...,
    with_activation: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


def silu_mul_quant(
    x: Tensor,
    *,
    group: int = 128,
    scale: ScaleFormat | str = ScaleFormat.FP32,
    layout: ScaleLayout | str = ScaleLayout.ROW,
    limit: float | None = None,
    clamp: str = "before",
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str = "silu",
    form: str = "ours",
    with_activation: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8 [P, I] and scales of act(gate) * (up + beta), ``x`` bf16 [P, 2 * I].

    ``act`` is ``silu`` (g * sigmoid(alpha * g)), ``gelu`` or ``relu2``; ``limit`` clamps ``before``
    or ``after`` it.  The product is rounded to BF16 once; ``form`` "torch" rounds SiLU too, with
    the bits of torch's own ``silu(gate) * up`` on a GPU, and takes no limit, alpha or beta.
    ``with_activation`` returns the product as well.  Groups have any size, the last one may be
    ragged; formats, layouts and their padding are those of
    :func:`moe_parity.kernels.ours.activation.swiglu_quant`, the recipe is ``ours``, or
    ``torch_silu_and_mul``.  Where :data:`FALLBACKS` has a reason the call runs unfused, with the
    same bits.  Raises ParityError, in a sentence, for anything else.
    """
    gated = word(Gated, activation, "silu_mul_quant: activation")
    scale = word(ScaleFormat, scale, "silu_mul_quant: scale")
    layout = word(ScaleLayout, layout, "silu_mul_quant: layout")
    how = _how(limit, clamp, alpha, beta, form)
    if x.dim() != 2 or x.dtype is not torch.bfloat16 or x.shape[1] % 2:
        raise ParityError(
            f"silu_mul_quant: x must be bfloat16 [P, 2 I], got {x.dtype} {list(x.shape)}."
        )
    if type(group) is not int or group < 1:
        raise ParityError(f"silu_mul_quant: group must be a positive number, got {group}.")
    asked = Asked(
        width=x.shape[1] // 2, group=group, activation=gated, with_activation=with_activation
    )
    why = fallback(asked)
    if why is None:
        return fused.swiglu_quant(x, None, 0, 1, how, group=group, scale=scale, layout=layout)
    log_once(why.reason)
    rows = fused.swiglu(x, None, 0, 1, how) if gated is Gated.SILU else _other(x, gated, how)
    codes, scales = fused.quant_rows(rows, None, 0, 1, group=group, scale=scale, layout=layout)
    return (codes, scales, rows) if with_activation else (codes, scales)


def _how(
    limit: float | None, clamp: str, alpha: float, beta: float, form: str
) -> fused.Activation:  # fmt: skip
    if clamp not in ("before", "after"):
        raise ParityError(f"silu_mul_quant: clamp must be 'before' or 'after', got {clamp!r}.")
    bound = 0.0 if limit is None else number(limit, "silu_mul_quant: limit")
    if limit is not None and not bound > 0:
        raise ParityError(f"silu_mul_quant: limit must be positive, got {limit}.")
    return fused.Activation(
        clamp="none" if limit is None else clamp, limit=bound,
        alpha=number(alpha, "silu_mul_quant: alpha"), beta=number(beta, "silu_mul_quant: beta"),
        form=form,
    )  # fmt: skip


def _other(x: Tensor, gated: Gated, how: fused.Activation) -> Tensor:
    """Return another activation than SiLU, bf16 [P, I], by torch: fp32, rounded to BF16 once."""
    if how.alpha != 1.0:
        raise ParityError(f"silu_mul_quant: alpha is SiLU's own, {gated} has none.")
    if how.form != "ours":
        raise ParityError(f"silu_mul_quant: the form {how.form!r} is SiLU's own, {gated} has none.")
    gate, up = x.float().chunk(2, dim=1)
    if how.clamp != "none":
        up = up.clamp(-how.limit, how.limit)
    if how.clamp == "before":
        gate = gate.clamp(max=how.limit)
    value = torch.nn.functional.gelu(gate) if gated is Gated.GELU else gate.relu().square()
    if how.clamp == "after":
        value = value.clamp(max=how.limit)
    return (value * (up + how.beta)).to(torch.bfloat16)


@lru_cache(maxsize=64)
def log_once(reason: str) -> None:
    """Log a reason the first time it is met."""
    log.info("silu_mul_quant runs unfused: %s.", reason)


def table() -> str:
    """Return the fallbacks as a Markdown table, for docs/dispatch.md."""
    rows = [f"| `{one.name}` | {one.text} | {one.reason} |" for one in FALLBACKS]
    return "\n".join(
        ["| fallback | when a call asks for | the reason is |", "|---|---|---|", *rows]
    )
