"""The yardsticks behind ``rel_err_bf16`` and ``rel_err_f64``, where nothing of them rounds.

Whole numbers and powers of two: what a yardstick must give is then an exact fraction.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import E4M3, f32_to_bf16
from moe_parity.references.language import Case, Values
from moe_parity.references.stages import ACT_QUANT, LAYER, WEIGHT_QUANT
from moe_parity.references.stages.layer.operands import Asked, Experts, LayerInputs, Routed
from moe_parity.references.stages.quant.stage import QuantInputs
from moe_parity.suites import by_definition as exact


@pytest.mark.parametrize(
    ("stage", "block"), [(ACT_QUANT, 1), (WEIGHT_QUANT, 128)], ids=["act", "w"]
)
def test_the_error_of_a_quantization(stage, block: int):
    """The norm of decode(q) * s - x over the norm of x, here of whole numbers."""
    case = Case(m=2, h=256) if block == 1 else Case(i=200, h=256)
    rows = 2 if block == 1 else 200
    x = torch.arange(rows * 256).view(rows, 256) % 13 + 1.0
    codes = E4M3.encode(x)
    scales = torch.full((-(-rows // block), 2), 2.0)
    scales[-1, 1] = 4.0
    got = {"codes": codes, "scales": scales}
    squares = [0, 0]
    for r, c in itertools.product(range(rows), range(256)):
        value = exact.e4m3(int(codes[r, c]))
        assert value is not None
        factor = 4 if r // block == (rows - 1) // block and c >= 128 else 2
        squares[0] += int((value * factor - int(x[r, c])) ** 2)
        squares[1] += int(x[r, c]) ** 2
    want = math.sqrt(squares[0]) / math.sqrt(squares[1])
    assert stage.errors(case, QuantInputs(x=x), got) == (None, want)
    for values in (Values.AIMED, Values.SPECIAL):
        odd = dataclasses.replace(case, values=values)
        assert stage.errors(odd, QuantInputs(x=x), got) == (None, None)


SIZE = 128
VALUES = torch.tensor([int(exact.e4m3(code) or 0) for code in range(256)])
"""Code -> value, of those that are whole numbers."""


def whole_layer(weights: Tensor | None, asked: Asked) -> LayerInputs:
    """Return a layer of small whole numbers: gates from 1 on, one pair that nobody here owns.

    Squares of its outputs add up exactly in float64, in whatever order.
    """
    spread = random_bits.integers(7, "spread", 2 * 2 * SIZE, SIZE, below=7).view(2, 2 * SIZE, SIZE)
    w13 = torch.where(torch.arange(2 * SIZE)[:, None] < SIZE, spread + 1, spread - 3)
    w2 = random_bits.integers(7, "w2", 2 * SIZE, SIZE, below=9).view(2, SIZE, SIZE)
    w2 = (w2 == 0).int() - (w2 == 1).int()
    experts = Experts(
        w13=E4M3.encode(w13.float()), w13_scale=torch.tensor([[[1.0], [3.0]], [[3.0], [0.5]]]),
        w2=E4M3.encode(w2.float()), w2_scale=torch.tensor([[[0.25]], [[0.5]]]), first=3,
    )  # fmt: skip
    x = torch.zeros(2, SIZE)
    x[0, ::51], x[1, ::60] = 11.0, 13.0
    ids = torch.tensor([[4, 3], [4, 2]], dtype=torch.int32)
    return LayerInputs(
        batch=Routed(x=f32_to_bf16(x), ids=ids, weights=weights), experts=experts, asked=asked
    )


def by_hand(made: LayerInputs, sigmoid: Fraction, through_bf16: bool) -> list[Fraction]:
    """Return the unquantized layer's output in whole arithmetic; the sigmoid is a constant."""
    batch, experts, asked = made.batch, made.experts, made.asked

    def step(row: list[Fraction]) -> list[Fraction]:
        return [exact.bf16(v) for v in row] if through_bf16 else row

    def times(w: Tensor, scales: list[float], row: list[Fraction]) -> list[Fraction]:
        # Rows are multiples of 1 / 8 here, codes whole numbers: sums of integers.
        whole = VALUES[w.long()] @ torch.tensor([int(8 * v) for v in row])
        return [
            Fraction(n, 8) * Fraction(scales[at // SIZE]) for at, n in enumerate(whole.tolist())
        ]

    out: list[Fraction] = []
    for token, ids in enumerate(batch.ids.tolist()):
        total = [Fraction(0)] * SIZE
        for slot, index in enumerate(ids):
            if not 0 <= index - experts.first < 2:
                continue
            e = index - experts.first
            x = [Fraction(v) for v in batch.x[token].tolist()]
            both = step(times(experts.w13[e], experts.w13_scale[e, :, 0].tolist(), x))
            gate, up = both[:SIZE], both[SIZE:]
            assert min(gate) >= 1
            if asked.limit is not None:
                top = Fraction(asked.limit)
                gate, up = [min(g, top) for g in gate], [max(min(u, top), -top) for u in up]
            beta = Fraction(asked.beta)
            y = step([g * sigmoid * (u + beta) for g, u in zip(gate, up, strict=True)])
            rows = step(times(experts.w2[e], experts.w2_scale[e, :, 0].tolist(), y))
            weight = Fraction(1 if batch.weights is None else float(batch.weights[token, slot]))
            total = [t + weight * r for t, r in zip(total, rows, strict=True)]
        out += total
    return out


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("alpha", "sigmoid"), [(64.0, Fraction(1)), (0.0, Fraction(1, 2))])
@pytest.mark.parametrize(("limit", "beta"), [(None, 0.0), (None, 1.0), (17.0, 0.0), (17.0, 3.0)])
def test_the_layers_behind_relative_errors(
    alpha: float, sigmoid: Fraction, limit: float | None, beta: float, weighted: bool
):
    """Distances to the layer in float64 and through BF16: whole numbers, so that nothing rounds.

    A sigmoid of 64 and more is 1 in float64, that of 0 a half.
    """
    weights = torch.tensor([[0.5, 0.75], [1.5, 0.25]]) if weighted else None
    made = whole_layer(weights, Asked(alpha=alpha, beta=beta, limit=limit))
    wide, narrow = by_hand(made, sigmoid, False), by_hand(made, sigmoid, True)
    assert wide != narrow or limit is not None, "nothing of this is rounded by BF16"
    out = torch.tensor([float(v) for v in wide], dtype=torch.float64).view(2, SIZE)
    out[0, 5] += 3.0
    found = LAYER.errors(Case(m=2, e=6, k=2, h=SIZE, i=SIZE), made, {"out": out})
    moved = [*wide]
    moved[5] += 3
    for got, yardstick in zip(found, (narrow, wide), strict=True):
        apart = sum((a - b) ** 2 for a, b in zip(moved, yardstick, strict=True))
        size = sum(v**2 for v in yardstick)
        assert got == math.sqrt(apart) / math.sqrt(size)


def test_where_a_relative_error_means_nothing():
    """Aimed values, layers of nothing but zeros, and those too large to compute once more."""
    made = whole_layer(None, Asked())
    zero = dataclasses.replace(
        made, batch=dataclasses.replace(made.batch, ids=torch.zeros(2, 2).int())
    )
    out = {"out": torch.ones(2, SIZE, dtype=torch.bfloat16)}
    case = Case(m=2, e=6, k=2, h=SIZE, i=SIZE)
    assert None not in LAYER.errors(case, made, out)
    assert LAYER.errors(case, zero, out) == (None, None)
    aimed = dataclasses.replace(case, values=Values.AIMED)
    large = dataclasses.replace(case, m=1 << 10, h=1 << 7, i=(1 << 7) + 1)
    assert LAYER.errors(aimed, made, out) == LAYER.errors(large, made, out) == (None, None)
