"""Mistakes of the gated activation: its halves, its limit, its factors, its function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import (
    bits_of,
    from_bits,
    round_bf16,
    to_f32,
)
from moe_parity.references.arithmetic.rounding import add_rn, div_rn, f32, mul_rn
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import (
    Change,
    contiguous_reading,
    round_f16,
)
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

LIMITS = (7.0, 10.0, 1.0, 6.0, 20.0, 100.0, 448.0, 2.0, 3.0, 4.0, 5.0, 8.0, 9.0, 16.0)
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
    act = _Activation(inputs=inputs, recipe=recipe)
    yield from _of_halves(act)
    yield from _of_limits(act)
    yield from _of_limited_halves(act)
    yield from _of_factors(act)
    yield from _of_functions(act)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Activation:
    """What is activated, and by which recipe."""

    inputs: GateUpRows
    recipe: SwigluRecipe

    def rows(self, rows: Tensor) -> Tensor:
        """Return the activation of other rows."""
        given = self.inputs
        return swiglu(rows, self.recipe, limit=given.limit, alpha=given.alpha, beta=given.beta)

    def limit(
        self, limit: float | None, rows: Tensor | None = None, beta: float | None = None
    ) -> Tensor:
        """Return that with another limit, or none."""
        given = self.inputs
        rows, beta = given.rows if rows is None else rows, given.beta if beta is None else beta
        return swiglu(rows, self.recipe, limit=limit, alpha=given.alpha, beta=beta)

    def alpha(self, alpha: float) -> Tensor:
        """Return that with another factor in the sigmoid."""
        given = self.inputs
        return swiglu(given.rows, self.recipe, limit=given.limit, alpha=alpha, beta=given.beta)

    def beta(self, beta: float) -> Tensor:
        """Return that with something else added to up."""
        given = self.inputs
        return swiglu(given.rows, self.recipe, limit=given.limit, alpha=given.alpha, beta=beta)

    def limited(self) -> tuple[Tensor, Tensor]:
        """Return gate and up after the limit and the shift, as the recipe has them."""
        given, recipe = self.inputs, self.recipe
        gate, up = to_f32(given.rows).chunk(2, dim=1)
        if given.limit is not None and recipe.clamp_order is ClampOrder.BEFORE:
            high = f32(given.limit, gate)
            made = _as_rounded(_most(gate, high), _between(up, high), recipe)
            gate, up = made.chunk(2, dim=1)
        if given.beta or recipe.shift is not Shift.IF_ANY:
            up = add_rn(up, f32(given.beta, up))
        return gate, round_bf16(up) if recipe.shift is Shift.ALWAYS_BF16 else up

    def product(
        self, value: Change, last: Change | None = None, other: Change | None = None
    ) -> Tensor:
        """Return a function of the gate times up, or times another function of up.

        ``last`` rounds the product, else the recipe does.
        """
        gate, up = self.limited()
        left = value(gate)
        if self.recipe.product_rounding is ProductRounding.TWICE:
            left = round_bf16(left)
        made = mul_rn(left, other(up) if other else up)
        if last is not None:
            return last(made)
        return made if self.recipe.product_rounding is ProductRounding.NONE else round_bf16(made)


# --- gate and up --------------------------------------------------------------------------------


def _of_halves(act: _Activation) -> Iterator[Wrong]:
    rows = act.inputs.rows
    n = rows.shape[1]
    half = n // 2
    column = torch.arange(n, device=rows.device)
    after = torch.where(column < half, column, (column - half + 1) % half + half)
    before = torch.where(column < half, column, (column - half - 1) % half + half)
    orders = (
        ("gate_up_swapped", "gate and up swapped", (column + half) % n),
        ("gate_up_interleaved", "gate and up read as interleaved columns",
         column % half * 2 + column // half),
        ("gate_up_interleaved", "gate and up interleaved, then read as halves,",
         column // 2 + column % 2 * half),
        ("gate_twice", "the gate taken for up too", column % half),
        ("up_twice", "up taken for the gate too", column % half + half),
        ("row_shifted", "up of the next column", after),
        ("row_shifted", "up of the previous column", before),
        ("row_shifted", "up of the previous column", column - (column >= half).long()),
    )  # fmt: skip
    for name, words, order in orders:
        yield Wrong(name=name, words=words, rows=partial(_ordered, act, order))
    for step, side in ((1, "next"), (-1, "previous")) if rows.shape[0] > 1 else ():
        moved = rows.roll(-step, 0)
        yield Wrong(
            name="row_of_neighbour", words=f"up of the {side} row", local=False,
            rows=partial(act.rows, torch.cat([rows[:, :half], moved[:, half:]], 1)),
        )  # fmt: skip
        yield Wrong(
            name="row_of_neighbour", words=f"the gate of the {side} row", local=False,
            rows=partial(act.rows, torch.cat([moved[:, :half], rows[:, half:]], 1)),
        )  # fmt: skip
    flat = contiguous_reading(rows)
    if flat is not None:
        yield Wrong(
            name="row_stride", words="rows read with 2 I as their stride", local=False,
            rows=partial(act.rows, flat),
        )  # fmt: skip


def _ordered(act: _Activation, order: Tensor) -> Tensor:
    return act.rows(act.inputs.rows[:, order])


# --- limits -------------------------------------------------------------------------------------


def _of_limits(act: _Activation) -> Iterator[Wrong]:
    limit = act.inputs.limit
    instead = f" instead of {limit:g}" if limit else ", which nobody asked for,"
    for other in LIMITS:
        if other != limit:
            yield Wrong(
                name="another_limit", words=f"a limit of {other:g}{instead}",
                rows=partial(act.limit, other),
            )  # fmt: skip


def _of_limited_halves(act: _Activation) -> Iterator[Wrong]:
    limit = act.inputs.limit
    if limit is None or act.recipe.clamp_order is ClampOrder.IGNORED:
        return
    gate, up = to_f32(act.inputs.rows).chunk(2, dim=1)
    high = f32(limit, gate)
    ways: tuple[tuple[str, str, Tensor, Tensor], ...] = (
        ("clamp_gate_only", "the limit on the gate alone", _most(gate, high), up),
        ("clamp_up_only", "the limit on up alone", gate, _between(up, high)),
        ("clamp_up_above", "up limited from above alone", _most(gate, high), _most(up, high)),
        ("clamp_gate_below", "the gate limited from below too",
         _between(gate, high), _between(up, high)),
        ("clamp_gate_below", "the gate alone limited, from below too,", _between(gate, high), up),
        ("nan_kept", "NaN kept by the limit",
         gate.clamp(max=limit), up.clamp(min=-limit, max=limit)),
    )  # fmt: skip
    for name, words, left, right in ways:
        yield Wrong(name=name, words=words, rows=partial(_already_limited, act, left, right))
    yield Wrong(
        name="clamp_of_product", words="the limit on the product alone",
        rows=lambda: _between(act.limit(None), high),
    )  # fmt: skip
    beta = act.inputs.beta
    if beta:
        early = _between(add_rn(up, f32(beta, up)), high)
        yield Wrong(
            name="beta_before_limit", words=f"{beta:g} added to up before the limit",
            rows=lambda: act.limit(None, _as_rounded(_most(gate, high), early, act.recipe), 0.0),
        )  # fmt: skip
    if limit != int(limit):
        yield Wrong(
            name="limit_rounded", words=f"the limit cut to an integer, {int(limit)},",
            rows=partial(act.limit, float(int(limit))),
        )  # fmt: skip
    rounded_limit = float(round_bf16(high))
    if rounded_limit != limit:
        yield Wrong(
            name="limit_rounded", words=f"a limit rounded to BF16, {rounded_limit:g},",
            rows=partial(act.limit, rounded_limit),
        )  # fmt: skip


def _already_limited(act: _Activation, gate: Tensor, up: Tensor) -> Tensor:
    return act.limit(None, _as_rounded(gate, up, act.recipe))


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


# --- factors and functions ----------------------------------------------------------------------


def _of_factors(act: _Activation) -> Iterator[Wrong]:
    alpha, beta = act.inputs.alpha, act.inputs.beta
    for value in (1.0, 1.702, 1.7):
        if value != alpha:
            words = f"a factor of {value:g} in the sigmoid instead of {alpha:g}"
            yield Wrong(name="alpha", words=words, rows=partial(act.alpha, value))
    for value in (0.0, 1.0, -1.0):
        if value != beta:
            words = f"{value:g} added to up instead of {beta:g}"
            yield Wrong(name="beta", words=words, rows=partial(act.beta, value))

    if alpha != 1.0 and beta:
        yield Wrong(
            name="alpha_and_beta",
            words="SwiGLU without a factor in the sigmoid or a shift of up",
            rows=partial(
                swiglu, act.inputs.rows, act.recipe, limit=act.inputs.limit, alpha=1.0, beta=0.0
            ),
        )
    if alpha != 1.0:

        def on_both(gate: Tensor) -> Tensor:
            return silu(mul_rn(f32(alpha, gate), gate), act.recipe.silu, 1.0)

        yield Wrong(
            name="alpha", words=f"the factor of the sigmoid, {alpha:g}, on the gate itself too",
            rows=partial(act.product, on_both),
        )  # fmt: skip


def _of_functions(act: _Activation) -> Iterator[Wrong]:
    alpha = act.inputs.alpha

    def plain(gate: Tensor) -> Tensor:
        return silu(gate, act.recipe.silu, alpha)

    def sigmoid(gate: Tensor) -> Tensor:
        return torch.sigmoid((alpha * gate).double()).float()

    def narrow_exponential(gate: Tensor) -> Tensor:
        one = f32(1.0, gate)
        below = round_bf16(add_rn(one, round_bf16(torch.exp(-alpha * gate))))
        return mul_rn(gate, round_bf16(div_rn(one, below)))

    def narrow_sigmoid(gate: Tensor) -> Tensor:
        return mul_rn(gate, round_bf16(sigmoid(gate)))

    def narrow_rest(gate: Tensor) -> Tensor:
        one = f32(1.0, gate)
        return mul_rn(gate, round_bf16(one - round_bf16(sigmoid(-gate))))

    gelu = torch.nn.functional.gelu
    values: tuple[tuple[str, str, Change, Change | None], ...] = (
        ("no_silu", "no SiLU: the gate times up", lambda gate: gate, None),
        ("sigmoid", "a sigmoid of the gate, not times the gate,", sigmoid, None),
        ("relu", "ReLU instead of SiLU", torch.relu, None),
        ("gelu", "GELU instead of SiLU", gelu, None),
        ("gelu", "the tanh form of GELU instead of SiLU", partial(gelu, approximate="tanh"), None),
        ("silu_of_both", "SiLU of up too", plain, plain),
        ("up_lost", "up left out", plain, torch.ones_like),
        ("narrow_silu", "the gate's exponential in BF16", narrow_exponential, None),
        ("narrow_silu", "the gate's sigmoid rounded to BF16", narrow_sigmoid, None),
        ("narrow_silu", "one less the sigmoid of the negative gate, in BF16,", narrow_rest, None),
        (
            "gate_copied",
            "the gate copied, without SiLU and up,",
            lambda gate: gate,
            torch.ones_like,
        ),
    )
    for name, words, value, other in values:
        yield Wrong(name=name, words=words, rows=partial(act.product, value, other=other))
    roundings: tuple[tuple[str, str, Change], ...] = (
        ("product_fp16", "the product rounded to FP16", round_f16),
        ("product_rounded_twice", "the product rounded to FP16 and then to BF16",
         lambda product: round_bf16(round_f16(product))),
        ("factor", "the product times 2", lambda product: round_bf16(product * 2.0)),
        ("factor", "the product times 0.5", lambda product: round_bf16(product * 0.5)),
        ("product_cut", "the product cut to BF16, not rounded,", _cut),
        ("product_magnitude", "the product without its sign",
         lambda product: round_bf16(product).abs()),
    )  # fmt: skip
    for name, words, last in roundings:
        yield Wrong(name=name, words=words, rows=partial(act.product, plain, last))


def _cut(x: Tensor) -> Tensor:
    return from_bits(bits_of(x) & -0x10000)
