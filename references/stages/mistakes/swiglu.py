"""Mistakes of the gated activation: its halves, its limit, its factors, its function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import round_bf16, to_f32
from moe_parity.references.arithmetic.rounding import add_rn, div_rn, f32, mul_rn
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import contiguous_reading, round_f16
from moe_parity.references.stages.swiglu.decisions import (
    ClampOrder,
    ClampRounding,
    ProductRounding,
    Shift,
    SwigluRecipe,
)
from moe_parity.references.stages.swiglu.reference import swiglu
from moe_parity.references.stages.swiglu.silu import silu

if TYPE_CHECKING:
    from moe_parity.references.stages.swiglu.stage import GateUpRows

LIMITS = (7.0, 10.0, 1.0, 6.0, 20.0, 100.0, 448.0)
"""What a limit may be pinned to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrong:
    """A wrong activation: its name, its words, and fp32 [P, I] before a quantization."""

    name: str
    words: str
    rows: Callable[[], Tensor]
    local: bool = True

    def mistake(self, outputs: Callable[[Tensor], dict[str, Tensor]]) -> Mistake:
        """Return it as a mistake of a stage that makes ``outputs`` of the rows."""
        return Mistake(
            name=self.name, words=self.words, outputs=lambda: outputs(self.rows()), local=self.local
        )


def wrongs(inputs: GateUpRows, recipe: SwigluRecipe) -> Iterator[Wrong]:
    """Yield what an activation may do wrong."""

    def of(rows: Tensor | None = None, **changes: float | None) -> Tensor:
        asked = {"limit": inputs.limit, "alpha": inputs.alpha, "beta": inputs.beta} | changes
        return swiglu(inputs.rows if rows is None else rows, recipe, **asked)  # type: ignore[arg-type]

    yield from _of_halves(inputs, of)
    yield from _of_limits(inputs, recipe, of)
    yield from _of_factors(inputs, of)
    yield from _of_functions(inputs, recipe)


Of = Callable[..., Tensor]


def _of_halves(inputs: GateUpRows, of: Of) -> Iterator[Wrong]:
    rows = inputs.rows
    n = rows.shape[1]
    column = torch.arange(n, device=rows.device)
    orders = (
        ("gate_up_swapped", "gate and up swapped", (column + n // 2) % n),
        ("gate_up_interleaved", "gate and up read as interleaved columns", column % (n // 2) * 2 + column // (n // 2)),
        ("gate_up_interleaved", "gate and up taken for halves that were interleaved", column // 2 + column % 2 * (n // 2)),
        ("gate_twice", "the gate taken for up too", column % (n // 2)),
        ("up_twice", "up taken for the gate too", column % (n // 2) + n // 2),
        ("row_shifted", "up of the next column", torch.where(column < n // 2, column, (column - n // 2 + 1) % (n // 2) + n // 2)),
    )  # fmt: skip
    for name, words, order in orders:
        yield Wrong(name=name, words=words, rows=lambda order=order: of(rows[:, order]))  # type: ignore[misc]
    for step, side in ((1, "next"), (-1, "previous")) if rows.shape[0] > 1 else ():
        up = torch.cat([rows[:, : n // 2], rows.roll(-step, 0)[:, n // 2 :]], 1)
        yield Wrong(
            name="row_of_neighbour", words=f"up of the {side} row", local=False,
            rows=lambda up=up: of(up),  # type: ignore[misc]
        )  # fmt: skip
    flat = contiguous_reading(rows)
    if flat is not None:
        yield Wrong(
            name="row_stride", words="rows read with 2 I as their stride", local=False,
            rows=lambda: of(flat),
        )  # fmt: skip


def _of_limits(inputs: GateUpRows, recipe: SwigluRecipe, of: Of) -> Iterator[Wrong]:
    limit = inputs.limit
    for other in LIMITS:
        if other != limit:
            words = f"a limit of {other:g}" + (
                f" instead of {limit:g}" if limit else ", which nobody asked for,"
            )
            yield Wrong(name="another_limit", words=words, rows=lambda o=other: of(limit=o))  # type: ignore[misc]
    if limit is None or recipe.clamp_order is ClampOrder.IGNORED:
        return
    gate, up = to_f32(inputs.rows).chunk(2, dim=1)
    high = f32(limit, gate)
    ways: tuple[tuple[str, str, Tensor, Tensor], ...] = (
        ("clamp_gate_only", "the limit on the gate alone", _most(gate, high), up),
        ("clamp_up_only", "the limit on up alone", gate, _between(up, high)),
        ("clamp_up_above", "up limited from above alone", _most(gate, high), _most(up, high)),
        ("clamp_gate_below", "the gate limited from below too", _between(gate, high), _between(up, high)),
        ("clamp_gate_below", "the gate alone limited, from below too,", _between(gate, high), up),
    )  # fmt: skip
    for name, words, left, right in ways:
        yield Wrong(
            name=name, words=words,
            rows=lambda g=left, u=right: of(_as_rounded(g, u, recipe), limit=None),  # type: ignore[misc]
        )  # fmt: skip
    yield Wrong(
        name="clamp_of_product", words="the limit on the product alone",
        rows=lambda: _between(of(limit=None), high),
    )  # fmt: skip
    rounded_limit = float(round_bf16(high))
    if rounded_limit != limit:
        yield Wrong(
            name="limit_rounded", words=f"a limit rounded to BF16, {rounded_limit:g},",
            rows=lambda: of(limit=rounded_limit),
        )  # fmt: skip


def _as_rounded(gate: Tensor, up: Tensor, recipe: SwigluRecipe) -> Tensor:
    """Return rows whose halves are limited, rounded as the recipe rounds what is limited."""
    if recipe.clamp_rounding is not ClampRounding.NONE:
        gate = round_bf16(gate)
    if recipe.clamp_rounding is ClampRounding.BOTH:
        up = round_bf16(up)
    return torch.cat([gate, up], 1)


def _most(x: Tensor, high: Tensor) -> Tensor:
    return torch.where(x <= high, x, high)


def _between(x: Tensor, high: Tensor) -> Tensor:
    above = _most(x, high)
    return torch.where(above >= -high, above, -high)


def _of_factors(inputs: GateUpRows, of: Of) -> Iterator[Wrong]:
    for value in (1.0, 1.702):
        if value != inputs.alpha:
            words = f"a factor of {value:g} in the sigmoid instead of {inputs.alpha:g}"
            yield Wrong(name="alpha", words=words, rows=lambda v=value: of(alpha=v))  # type: ignore[misc]
    for value in (0.0, 1.0, -1.0):
        if value != inputs.beta:
            words = f"{value:g} added to up instead of {inputs.beta:g}"
            yield Wrong(name="beta", words=words, rows=lambda v=value: of(beta=v))  # type: ignore[misc]


def _of_functions(inputs: GateUpRows, recipe: SwigluRecipe) -> Iterator[Wrong]:
    one = f32(1.0, inputs.rows)

    def plain(gate: Tensor) -> Tensor:
        return silu(gate, recipe.silu, inputs.alpha)

    def sigmoid(gate: Tensor) -> Tensor:
        return torch.sigmoid((inputs.alpha * gate).double()).float()

    def product(
        value: Callable[[Tensor], Tensor],
        last: Callable[[Tensor], Tensor] | None = None,
        other: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        gate, up = _limited(inputs, recipe)
        left = value(gate)
        if recipe.product_rounding is ProductRounding.TWICE:
            left = round_bf16(left)
        right = other(up) if other else up
        made = mul_rn(left, right)
        if last is not None:
            return last(made)
        return made if recipe.product_rounding is ProductRounding.NONE else round_bf16(made)

    functions: tuple[tuple[str, str, Callable[[], Tensor]], ...] = (
        ("no_silu", "no SiLU: the gate times up", lambda: product(lambda g: g)),
        ("sigmoid", "a sigmoid of the gate, not times the gate,", lambda: product(sigmoid)),
        ("relu", "ReLU instead of SiLU", lambda: product(lambda g: g.clamp(min=0))),
        ("gelu", "GELU instead of SiLU", lambda: product(lambda g: torch.nn.functional.gelu(g))),
        ("gelu", "the tanh form of GELU instead of SiLU", lambda: product(lambda g: torch.nn.functional.gelu(g, approximate="tanh"))),
        ("silu_of_both", "SiLU of up too", lambda: product(plain, other=plain)),
        ("up_lost", "up left out", lambda: product(plain, other=torch.ones_like)),
        ("narrow_silu", "the gate's exponential in BF16", lambda: product(lambda g: mul_rn(g, round_bf16(div_rn(one, round_bf16(add_rn(one, round_bf16(torch.exp(-inputs.alpha * g))))))))),
        ("narrow_silu", "the gate's sigmoid rounded to BF16", lambda: product(lambda g: mul_rn(g, round_bf16(sigmoid(g))))),
        ("product_fp16", "the product rounded to FP16", lambda: product(plain, round_f16)),
        ("product_rounded_twice", "the product rounded to FP16 and then to BF16", lambda: product(plain, lambda p: round_bf16(round_f16(p)))),
        ("product_cut", "the product cut to BF16, not rounded,", lambda: product(plain, _cut)),
        ("product_magnitude", "the product without its sign", lambda: product(plain, lambda p: round_bf16(p).abs())),
    )  # fmt: skip
    for name, words, rows in functions:
        yield Wrong(name=name, words=words, rows=rows)


def _cut(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32)


def _limited(inputs: GateUpRows, recipe: SwigluRecipe) -> tuple[Tensor, Tensor]:
    """Return gate and up after the limit and the shift, as the recipe has them."""
    gate, up = to_f32(inputs.rows).chunk(2, dim=1)
    if inputs.limit is not None and recipe.clamp_order is ClampOrder.BEFORE:
        high = f32(inputs.limit, gate)
        made = _as_rounded(_most(gate, high), _between(up, high), recipe)
        gate, up = made.chunk(2, dim=1)
    if inputs.beta or recipe.shift is not Shift.IF_ANY:
        up = add_rn(up, f32(inputs.beta, up))
    return gate, round_bf16(up) if recipe.shift is Shift.ALWAYS_BF16 else up
