"""The near-tolerance shape of seed 000: N = 4608, K = 7168 in vLLM's block-FP8 test.

``python -m moe_parity.harness.evidence.near_tolerance -o FILE`` prints, for both scale formats and
both SwiGLUs, how close a kernel comes to the test's atol = rtol = 0.035, and which roundings take
it there: the test's own reference with one of them at a time as the kernel has it.

The kernel is the reference of its recipe, bit for bit.  The test's reference is that of
``tests/kernels/moe/test_block_fp8.py``: fp32 products of dequantized tiles, SiLU in BF16 or, for a
fused kernel, in fp32, routing weights and their products in BF16, a sum rounded once.  Inputs have
the test's distributions; ``--own --device cuda`` draws them from a GPU's generator in the test's
order, which gives its own numbers where torch draws as it did there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import BLOCK, E4M3, ScaleFormat, round_bf16, to_f32
from moe_parity.references.language import Recipe
from moe_parity.references.recipes.deepgemm import DEEPGEMM
from moe_parity.references.recipes.vllm import VLLM_FUSED_SILU, VLLM_TRITON
from moe_parity.references.stages.combine import CombineRecipe, combine
from moe_parity.references.stages.gemm.decisions import Accumulate, DotUnit, GemmRecipe
from moe_parity.references.stages.gemm.reference import finish, grouped, hit
from moe_parity.references.stages.quant.decisions import Apply, Floor, QuantRecipe
from moe_parity.references.stages.quant.reference import QuantOutput, act_quant, weight_quant
from moe_parity.references.stages.swiglu.decisions import ProductRounding, SwigluRecipe
from moe_parity.references.stages.swiglu.reference import swiglu
from moe_parity.references.stages.swiglu.silu import Silu

TOLERANCE = 0.035
TOLERANCE_OF_MANY, MANY = 0.039, 8192
"""What the test takes from so many tokens on."""
_ROWS = 32
"""Rows of a weight drawn at once: what stays in a cache is drawn six times as fast."""

NEAREST = 100
"""Of so many outputs, those nearest to the tolerance or beyond, it is told how small they are."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One parametrization of the test; its N is I here, its K is H."""

    m: int = 83
    e: int = 2
    k: int = 1
    i: int = 4608
    h: int = 7168
    seed: int = 0
    largest: int = 0
    """Only so many of the m tokens, those with the largest inputs of FC2; 0 for all."""

    @property
    def tolerance(self) -> float:
        """Return atol and rtol."""
        return TOLERANCE if self.m < MANY else TOLERANCE_OF_MANY


@dataclass(frozen=True, kw_only=True)
class How:
    """Where a layer rounds, with its two GEMMs told apart."""

    act: QuantRecipe
    fc1: GemmRecipe
    swiglu: SwigluRecipe
    mid: QuantRecipe
    fc2: GemmRecipe
    weights: CombineRecipe | None
    """None is the test's: weights, products with BF16 rows, and their sum, each in BF16."""

    @staticmethod
    def of(recipe: Recipe) -> How:
        """Return what a recipe says."""
        gemm = recipe.of("gemm", GemmRecipe)
        return How(
            act=recipe.of("act_quant", QuantRecipe), fc1=gemm, fc2=gemm,
            swiglu=recipe.of("swiglu", SwigluRecipe), mid=recipe.of("swiglu_quant", QuantRecipe),
            weights=recipe.of("combine", CombineRecipe),
        )  # fmt: skip


_NATIVE = QuantRecipe(floor=Floor.AMAX_1E_10, apply=Apply.DIVIDE)
_FP32 = GemmRecipe(unit=DotUnit.EXACT, accumulate=Accumulate.MUL_ADD)
_SILU_BF16 = SwigluRecipe(silu=Silu.DIV, product_rounding=ProductRounding.TWICE)
_SILU_FP32 = SwigluRecipe(silu=Silu.DIV, product_rounding=ProductRounding.NONE)
BF16_SILU = How(act=_NATIVE, fc1=_FP32, swiglu=_SILU_BF16, mid=_NATIVE, fc2=_FP32, weights=None)
"""``torch_w8a8_block_fp8_moe``."""
_OP = VLLM_FUSED_SILU.of("act_quant", QuantRecipe)
"""vLLM's own quantizer, with which the test's reference quantizes since PR 48847."""
FP32_SILU = replace(BF16_SILU, swiglu=_SILU_FP32)
"""The same with SiLU and its product in fp32, as seed 000 applies it on CUDA too."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A kernel, the scale format of both sides, the test's reference."""

    name: str
    kernel: Recipe
    scale: ScaleFormat
    reference: How


SCENARIOS = (
    Scenario(
        name="E8M0 on, BF16 SiLU", kernel=VLLM_TRITON, scale=ScaleFormat.UE8M0,
        reference=BF16_SILU,
    ),
    Scenario(
        name="E8M0 off, fused against BF16 SiLU", kernel=VLLM_FUSED_SILU, scale=ScaleFormat.FP32,
        reference=BF16_SILU,
    ),
    Scenario(
        name="E8M0 off, fused against fp32 SiLU", kernel=VLLM_FUSED_SILU, scale=ScaleFormat.FP32,
        reference=FP32_SILU,
    ),
    Scenario(
        name="E8M0 off, fused against BF16 SiLU and the op's quantizer", kernel=VLLM_FUSED_SILU,
        scale=ScaleFormat.FP32, reference=replace(BF16_SILU, act=_OP, mid=_OP),
    ),
    Scenario(
        name="E8M0 off, fused against fp32 SiLU and the op's quantizer", kernel=VLLM_FUSED_SILU,
        scale=ScaleFormat.FP32, reference=replace(FP32_SILU, act=_OP, mid=_OP),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Near:
    """How close one layer comes to the tolerance around the test's reference."""

    scenario: str
    changed: str
    outputs: int
    over: int
    """Outputs with |a - b| > atol + rtol * |b|."""
    worst: float
    """The largest |a - b| / (atol + rtol * |b|)."""
    rms: float
    """The root mean square of a - b."""
    size: float
    """That of b."""
    codes: float
    """The share of FC2's input codes that differ."""
    small: int
    """Of the ``NEAREST`` outputs, those with |b| below its root mean square."""
    flip: float
    """The most that a single differing code does to the worst output, as a share of its a - b."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Activations, routing, and two weights [E, N, K] with their scales."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: QuantOutput
    w2: QuantOutput


def inputs_of(sizes: Sizes, device: str = "cpu") -> Inputs:
    """Return inputs with the test's distributions: N(0, 1) / 10 and / 15, a softmax's top-k."""
    seed = sizes.seed
    x = random_bits.normal(seed, "near/x", sizes.m, sizes.h, device=device)
    score = random_bits.normal(seed, "near/score", sizes.m, sizes.e, device=device)
    weights, ids = torch.softmax(round_bf16(score), dim=1).topk(sizes.k, dim=1)
    made = Inputs(
        x=round_bf16(round_bf16(x) / 10), ids=ids, weights=weights,
        w13=_weight(sizes, "w13", 2 * sizes.i, sizes.h, device),
        w2=_weight(sizes, "w2", sizes.h, sizes.i, device),
    )  # fmt: skip
    return _largest(made, sizes.largest) if sizes.largest else made


def own_inputs(sizes: Sizes, device: str) -> Inputs:
    """Return inputs drawn as the test draws them: x, the router's scores, both weights, whole."""
    generator = torch.Generator(device).manual_seed(sizes.seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    def weight(rows: int, columns: int) -> QuantOutput:
        recipe = DEEPGEMM.of("weight_quant", QuantRecipe)
        whole = drawn(sizes.e, rows, columns) / 15
        made = [weight_quant(one.float(), recipe) for one in whole]
        return QuantOutput(
            codes=torch.stack([one.codes for one in made]),
            scales=torch.stack([one.scales for one in made]),
        )

    x, score = drawn(sizes.m, sizes.h) / 10, drawn(sizes.m, sizes.e)
    weights, ids = torch.softmax(score.float(), dim=1).topk(sizes.k, dim=1)
    w13, w2 = weight(2 * sizes.i, sizes.h), weight(sizes.h, sizes.i)
    made = Inputs(x=x.float(), ids=ids, weights=weights, w13=w13, w2=w2)
    return _largest(made, sizes.largest) if sizes.largest else made


def _largest(inputs: Inputs, count: int) -> Inputs:
    """Return the batch of the tokens in which one weighted input of FC2 is largest, in order."""
    size = torch.zeros(inputs.ids.shape, device=inputs.x.device)
    for e in hit(inputs.ids):
        token, slot = (inputs.ids == e).nonzero(as_tuple=True)
        w13 = _dequantized(inputs.w13, e)
        gate, up = (inputs.x[token] @ w13.t()).chunk(2, dim=1)
        top = (torch.nn.functional.silu(gate) * up).abs().amax(1)
        size[token, slot] = top * inputs.weights[token, slot]
    tokens = size.amax(1).topk(count).indices.sort().values
    return replace(
        inputs, x=inputs.x[tokens], ids=inputs.ids[tokens], weights=inputs.weights[tokens]
    )


def _dequantized(w: QuantOutput, e: int) -> Tensor:
    return E4M3.dequantized(w.codes[e], w.scales[e], BLOCK, BLOCK).float()


def _weight(sizes: Sizes, name: str, rows: int, columns: int, device: str) -> QuantOutput:
    recipe = DEEPGEMM.of("weight_quant", QuantRecipe)
    codes = torch.empty((sizes.e, rows, columns), dtype=torch.uint8, device=device)
    scales = torch.empty((sizes.e, -(-rows // BLOCK), columns // BLOCK), device=device)
    for e in range(sizes.e):
        for n in range(scales.shape[1]):
            tile, first = torch.empty(BLOCK, columns, device=device), n * BLOCK
            for r in range(0, BLOCK, _ROWS):
                drawn = random_bits.normal(
                    sizes.seed, f"near/{name}/{e}", _ROWS, columns, first=first + r, device=device
                )
                tile[r : r + _ROWS] = round_bf16(round_bf16(drawn) / 15)
            made = weight_quant(tile, recipe)
            codes[e, first : first + BLOCK], scales[e, n] = made.codes, made.scales[0]
    return QuantOutput(codes=codes, scales=scales)


class Layers:
    """Layers of one batch in one scale format; an FC1 that two of them share is computed once."""

    def __init__(self, inputs: Inputs, scale: ScaleFormat) -> None:
        self.inputs, self.scale = inputs, scale
        self._rows: dict[tuple[QuantRecipe, GemmRecipe], Tensor] = {}

    def fc1(self, act: QuantRecipe, gemm: GemmRecipe) -> Tensor:
        """Return BF16 rows [P, 2 * I]."""
        if (act, gemm) not in self._rows:
            made, k = act_quant(self.inputs.x, act, scale=self.scale), self.inputs.ids.shape[1]
            rows = self._gemm(
                made.codes.repeat_interleave(k, 0), made.scales.repeat_interleave(k, 0),
                self.inputs.w13, gemm,
            )  # fmt: skip
            self._rows[act, gemm] = finish(rows, None, gemm)
        return self._rows[act, gemm]

    def _gemm(self, codes: Tensor, scales: Tensor, w: QuantOutput, gemm: GemmRecipe) -> Tensor:
        return grouped(codes, scales, w.codes, w.scales, self.inputs.ids.flatten(), gemm)

    def outputs(self, how: How) -> tuple[Tensor, QuantOutput]:
        """Return the output as fp32 [M, H], and what FC2 read: codes and scales of [P, I]."""
        weights = self.inputs.weights
        y = swiglu(self.fc1(how.act, how.fc1), how.swiglu)
        mid = act_quant(y, how.mid, scale=self.scale)
        total = self._gemm(mid.codes, mid.scales, self.inputs.w2, how.fc2)
        if how.weights is None:
            rows = to_f32(finish(total, None, how.fc2)).view(*weights.shape, -1)
            weighted = round_bf16(rows * round_bf16(weights)[..., None])
            return round_bf16(weighted.sum(dim=1)), mid
        rows = finish(total, None, how.fc2, weights.flatten()).view(*weights.shape, -1)
        owned = torch.ones(weights.shape, dtype=torch.bool, device=weights.device)
        return to_f32(combine(rows, weights, owned, how.weights)), mid

    def largest_flip(self, got: QuantOutput, want: QuantOutput, token: int, column: int) -> float:
        """Return the most that one differing code does to an output, in magnitude."""
        largest = 0.0
        for slot, e in enumerate(self.inputs.ids[token].tolist()):
            pair = slice(token * self.inputs.ids.shape[1] + slot, None)
            left, right = (
                E4M3.dequantized(one.codes[pair][:1], one.scales[pair][:1], 1, BLOCK)[0]
                for one in (got, want)
            )
            tiles = self.inputs.w2.scales[e, column // BLOCK].repeat_interleave(BLOCK)
            w2 = E4M3.decode(self.inputs.w2.codes[e, column]) * tiles
            apart = (left - right).abs() * w2.abs() * self.inputs.weights[token, slot]
            largest = max(largest, float(apart.max()))
        return largest


def single_changes(test: How, kernel: How) -> Iterator[tuple[str, How]]:
    """Yield the test's reference with one thing as the kernel has it, then the kernel itself."""

    def ordered(gemm: GemmRecipe) -> GemmRecipe:
        return replace(gemm, scale_order=gemm1.scale_order, accumulate=gemm1.accumulate)

    gemm1 = kernel.fc1
    yield "quant.apply", replace(test, act=kernel.act, mid=kernel.mid)
    yield "gemm.unit in fc1", replace(test, fc1=replace(test.fc1, unit=gemm1.unit))
    yield "gemm.unit in fc2", replace(test, fc2=replace(test.fc2, unit=gemm1.unit))
    steps = replace(test, fc1=ordered(test.fc1), fc2=ordered(test.fc2))
    yield "gemm.scale_order, gemm.accumulate", steps
    if test.swiglu.product_rounding is not kernel.swiglu.product_rounding:
        yield "swiglu.product_rounding", replace(test, swiglu=kernel.swiglu)
    yield "combine.weights_at", replace(test, weights=kernel.weights)
    yield "all of them", kernel


def measure(
    scenario: str, changed: str, got: Tensor, want: Tensor, *, codes: float = 0.0,
    flip: float = 0.0, tolerance: float = TOLERANCE,
) -> Near:  # fmt: skip
    """Measure fp32 outputs against the reference's; ``flip`` in magnitude."""
    apart, size = (got - want).double().abs(), want.double().abs()
    ratio = apart / (tolerance + tolerance * size)
    rms = float(size.square().mean().sqrt())
    nearest = ratio.flatten().topk(min(NEAREST, ratio.numel())).indices
    return Near(
        scenario=scenario, changed=changed, outputs=ratio.numel(), over=int((ratio > 1).sum()),
        worst=float(ratio.max()), rms=float(apart.square().mean().sqrt()), size=rms, codes=codes,
        small=int((size.flatten()[nearest] < rms).sum()),
        flip=flip / max(float(apart.flatten()[nearest[0]]), 1e-30),
    )  # fmt: skip


def near(
    sizes: Sizes,
    scenarios: Sequence[Scenario] = SCENARIOS,
    *,
    split: bool = True,
    device: str = "cpu",
    own: bool = False,
) -> Iterator[Near]:
    """Yield each scenario's distances: of every change alone where ``split``, and of all."""
    inputs = (own_inputs if own else inputs_of)(sizes, device)
    made: dict[ScaleFormat, Layers] = {}
    for scenario in scenarios:
        layers = made.setdefault(scenario.scale, Layers(inputs, scenario.scale))
        want, read = layers.outputs(scenario.reference)
        for changed, how in single_changes(scenario.reference, How.of(scenario.kernel)):
            if split or changed == "all of them":
                got, seen = layers.outputs(how)
                codes = float((seen.codes != read.codes).float().mean())
                worst = int(((got - want).abs() / (1 + want.abs())).argmax())
                flip = layers.largest_flip(seen, read, *divmod(worst, want.shape[1]))
                yield measure(
                    scenario.name, changed, got, want, codes=codes, flip=flip,
                    tolerance=sizes.tolerance,
                )  # fmt: skip


def main(args: Sequence[str] | None = None) -> int:
    """Print a line for each distance; append JSON lines where ``-o`` says."""
    parser = argparse.ArgumentParser(prog="python -m moe_parity.harness.evidence.near_tolerance")
    for name, value in dataclasses.asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--all", action="store_true", help="only the kernel, no single changes")
    parser.add_argument("--scenario", default="", metavar="WORDS", help="those whose name has it")
    parser.add_argument("--own", action="store_true", help="inputs from torch's generator")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("-o", dest="out", type=Path, metavar="FILE", help="append JSON lines here")
    asked = vars(parser.parse_args(args))
    out, split, device = asked.pop("out"), not asked.pop("all"), asked.pop("device")
    own, words = asked.pop("own"), asked.pop("scenario")
    chosen = [scenario for scenario in SCENARIOS if words in scenario.name]
    for found in near(Sizes(**asked), chosen, split=split, device=device, own=own):
        values = {
            k: float(f"{v:.4g}") if isinstance(v, float) else v
            for k, v in dataclasses.asdict(found).items()
        }
        line = json.dumps({**asked, **values, **({"own": device} if own else {})})
        print(line, flush=True)
        if out:
            with out.open("a") as file:
                file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
