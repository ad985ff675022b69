"""Mistakes of a grouped GEMM's epilogue: its bias and its routing weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import f32_to_bf16, round_bf16, to_f32
from moe_parity.references.arithmetic.rounding import mul_rn
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.stages.mistakes.anywhere import Make
from moe_parity.references.stages.mistakes.gemm_steps import Gemm


def of_bias(gemm: Gemm) -> Iterator[Mistake]:
    """Yield what may be wrong with the bias of a GEMM that has one."""
    bias = gemm.inputs.bias
    if bias is None:
        return
    others = (
        ("no bias", torch.zeros_like(bias)),
        ("the bias twice", 2.0 * bias),
        ("the next expert's bias", bias.roll(-1, 0)),
        ("the previous expert's bias", bias.roll(1, 0)),
        ("the first expert's bias for all", bias[0].expand(bias.shape)),
        ("the bias rounded to BF16", round_bf16(bias)),
    )
    for words, other in others:
        yield Mistake(name="bias", words=words, outputs=gemm.of(bias=other))


def of_weights(gemm: Gemm) -> Iterator[Mistake]:
    """Yield routing weights in the wrong GEMM, or other ones."""
    weights = gemm.inputs.weights
    if weights is None:
        return

    def applied(weight: Tensor) -> Make:
        return lambda: {"rows": gemm.finished(gemm.chain(), weight)}

    def applied_late(weight: Tensor) -> Make:
        return gemm.rows(lambda rows: f32_to_bf16(mul_rn(to_f32(rows), weight[:, None])))

    flat = weights.flatten()
    for words, weight in (("", flat), (" squared", mul_rn(flat, flat))):
        if gemm.weight is None or words:
            yield Mistake(
                name="weights_here", words=f"routing weights{words} applied in this GEMM",
                outputs=applied(weight),
            )  # fmt: skip
            yield Mistake(
                name="weights_here",
                words=f"routing weights{words} applied to the BF16 rows of this GEMM",
                outputs=applied_late(weight),
            )
    if gemm.weight is None:
        return
    order = torch.argsort(gemm.inputs.expert, stable=True)
    ones = torch.ones_like(flat)
    others = (
        ("weights_lost", "no routing weights in this GEMM", ones, True),
        ("weights_rounded", "routing weights rounded to BF16", round_bf16(flat), True),
        ("weight_of_neighbour", "the weight of the token's next pair",
         weights.roll(-1, 1).flatten(), True),
        ("weight_of_neighbour", "the weight of the first pair for all of a token",
         weights[:, :1].expand(weights.shape).flatten(), True),
        ("weight_of_neighbour", "the weight at a pair's place among those sorted by expert",
         torch.empty_like(flat).scatter(0, order, flat), False),
    )  # fmt: skip
    for name, words, weight, local in others:
        yield Mistake(name=name, words=words, outputs=applied(weight), local=local)

    def late() -> dict[str, Tensor]:
        rows = to_f32(gemm.finished(gemm.chain(), ones))
        return {"rows": f32_to_bf16(mul_rn(rows, flat[:, None]))}

    yield Mistake(
        name="weights_late", words="routing weights applied after the rounding to BF16",
        outputs=late,
    )  # fmt: skip
