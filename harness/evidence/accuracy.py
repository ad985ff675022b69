"""How far a block-FP8 layer is from a BF16 one, per batch size: the accuracy table of seed 000.

``python -m moe_parity.harness.evidence.accuracy -o FILE`` prints the table and writes JSON lines.

Activations and weights are BF16 first, N(0, 1) / 10 and N(0, 1) / 15 as in vLLM's block-FP8 test,
the router a softmax whose top-k is not renormalized.  The layer under test quantizes the weights by
DeepGEMM's ``per_block_cast_to_fp8``, with fp32 scales whatever the activations' are, and is the
reference of a recipe, bit for bit.  It is compared with two layers that quantize no activation, one
of the BF16 weights (``bf16``: what a "bf16 reference" means) and one of the weights as quantized
(``dequantized``: what the activations' quantizations alone do).

A token's bits do not depend on its batch, and a smaller batch is the start of a larger one: one
pass over the experts gives every M.  Only experts that a token takes are made, one at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import silu

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import (
    BLOCK,
    E4M3,
    ScaleFormat,
    f32_to_bf16,
    round_bf16,
    to_f32,
)
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Recipe
from moe_parity.references.recipes.deepgemm import DEEPGEMM
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.recipes.vllm import VLLM_FUSED_SILU, VLLM_TRITON, VLLM_TRITON_SWAP
from moe_parity.references.stages.combine import CombineRecipe, combine, in_epilogue
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.gemm.reference import finish, gemm, hit
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import QuantOutput, act_quant, weight_quant
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe
from moe_parity.references.stages.swiglu.reference import swiglu

TOKENS = (1, 8, 64, 256, 1024, 4096)
SAMPLE = 512
"""So many tokens of a larger batch are computed, evenly spaced."""

SEED_FIGURES = {1: (0.069, 0.062), 64: (0.066, 0.063)}
"""Of seed 000: from which M on, powers of two and fp32; nothing is said between 1 and 64."""

_ROWS = 32
"""Rows of a weight drawn at once: what stays in a cache is drawn six times as fast."""

YARDSTICKS = ("bf16", "dequantized")
FORMATS = (ScaleFormat.UE8M0, ScaleFormat.FP32)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A layer's sizes and how its tensors are drawn."""

    h: int = 6144
    i: int = 256
    e: int = 256
    k: int = 8
    seed: int = 0
    x: float = 1 / 10
    """Standard deviation of the activations."""
    w: float = 1 / 15
    """Standard deviation of the weights."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A recipe with the scale format of both activation quantizations, at some batch sizes."""

    name: str
    recipe: Recipe
    scale: ScaleFormat
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Error:
    """The relative error of one subject at one M, averaged over batches of m tokens.

    d = out - yardstick, over all outputs of a batch.
    """

    subject: str
    recipe: str
    scale: str
    m: int
    tokens: int
    """How many of a batch's m tokens were computed."""
    against: str
    l2: float
    """sqrt(sum d^2) / sqrt(sum yardstick^2)."""
    mean: float
    """mean |d| / mean |yardstick|."""
    max: float
    """max |d| / max |yardstick|."""
    batches: tuple[float, ...]
    """The ``l2`` of every batch."""


def subjects(counts: Sequence[int], ours: Sequence[int]) -> Iterator[Subject]:
    """Yield vLLM's Triton experts in both formats, with fused SwiGLU in fp32, and our layer.

    Up to 64 tokens vLLM's kernel exchanges its operands, and with them the order of the scales.
    """
    swap = VLLM_TRITON_SWAP.of("gemm", GemmRecipe)
    fused_swap = dataclasses.replace(
        VLLM_FUSED_SILU.with_parts(gemm=swap), name="vllm_fused_silu_swap"
    )
    few, many = (tuple(c for c in counts if (c <= 64) == small) for small in (True, False))
    for name, small, large, formats in (
        ("vllm_triton", VLLM_TRITON_SWAP, VLLM_TRITON, FORMATS),
        ("vllm_fused_silu", fused_swap, VLLM_FUSED_SILU, (ScaleFormat.FP32,)),
    ):
        for scale in formats:
            for recipe, own in ((small, few), (large, many)):
                if own:
                    yield Subject(name=name, recipe=recipe, scale=scale, counts=own)
    for scale in FORMATS if ours else ():
        yield Subject(name="ours", recipe=OURS, scale=scale, counts=tuple(ours))


def sampled(m: int, sample: int) -> range:
    """Return the tokens of a batch of m that are computed: all, or ``sample`` evenly spaced."""
    return range(0, m, -(-m // sample))


def errors(
    setting: Setting, asked: Sequence[Subject], sample: int = SAMPLE, *, progress: bool = False
) -> Iterator[Error]:
    """Yield the errors of every subject at each of its M, against both yardsticks.

    Raises ParityError where nothing is asked, or a size is no multiple of 128.
    """
    if not asked or setting.h % BLOCK or setting.i % BLOCK or setting.k > setting.e:
        raise ParityError(
            f"The accuracy of {len(asked)} subjects at H={setting.h} I={setting.i} E={setting.e} "
            f"k={setting.k}: it takes one subject or more, H and I in 128s, and k up to E."
        )
    counts = sorted({c for s in asked for c in s.counts})
    tokens = sorted({t for c in counts for t in sampled(c, sample)})
    batch = _Batch.drawn(setting, tokens, counts[-1])
    plain = {name: torch.zeros(batch.x.shape) for name in YARDSTICKS}
    runs = [_Run(subject, batch, _places(tokens, subject.counts, sample)) for subject in asked]
    experts = hit(batch.ids)
    for n, expert in enumerate(experts):
        if progress:
            print(f"\rexpert {n + 1} of {len(experts)}", end="", file=sys.stderr, flush=True)
        own = _Expert(setting, expert)
        for name, pair in (("bf16", own.bf16()), ("dequantized", own.dequantized())):
            _add_plain(plain[name], batch, expert, *pair)
        kept: dict[object, Tensor] = {}
        for one in runs:
            one.add(expert, own, kept)
    for one in runs:
        out = to_f32(one.out()).double()
        for m in one.subject.counts:
            parts = list(_batches(one.tokens(tokens), m, sample))
            for name, yardstick in plain.items():
                want = to_f32(f32_to_bf16(yardstick[one.positions])).double()
                pairs = [(out[part], want[part]) for part in parts]
                yield _error(one.subject, m, name, pairs)


def _places(tokens: list[int], counts: Sequence[int], sample: int) -> Tensor:
    """Return where the tokens of some batches stand among those computed, ascending."""
    wanted = sorted({t for c in counts for t in sampled(c, sample)})
    return torch.searchsorted(torch.tensor(tokens), torch.tensor(wanted))


def _batches(tokens: Tensor, m: int, sample: int) -> Iterator[Tensor]:
    """Yield where each batch of m tokens stands among ``tokens``: one where it is sampled."""
    start = 0
    while start == 0 or m <= sample:
        wanted = torch.tensor([start + t for t in sampled(m, sample)])
        if not torch.isin(wanted, tokens).all():
            return
        yield torch.searchsorted(tokens, wanted)
        start += m


def _error(subject: Subject, m: int, against: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> Error:
    l2, mean, largest = [], [], []
    for got, want in pairs:
        apart = got - want
        l2.append(float(apart.norm() / want.norm()))
        mean.append(float(apart.abs().mean() / want.abs().mean()))
        largest.append(float(apart.abs().max() / want.abs().max()))
    return Error(
        subject=subject.name, recipe=subject.recipe.name, scale=subject.scale.value, m=m,
        tokens=len(pairs[0][0]), against=against, l2=fmean(l2), mean=fmean(mean),
        max=fmean(largest), batches=tuple(l2),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Batch:
    x: Tensor
    """BF16 numbers in fp32, [T, H]."""
    ids: Tensor
    weights: Tensor

    @staticmethod
    def drawn(setting: Setting, tokens: list[int], m: int) -> _Batch:
        x = random_bits.normal(setting.seed, "accuracy/x", m, setting.h)[tokens]
        score = random_bits.normal(setting.seed, "accuracy/router", m, setting.e)[tokens]
        weights, ids = torch.softmax(score, dim=1).topk(setting.k, dim=1)
        return _Batch(x=round_bf16(x * setting.x), ids=ids, weights=weights)


class _Expert:
    """One expert's two weights, BF16 and quantized."""

    def __init__(self, setting: Setting, expert: int) -> None:
        recipe = DEEPGEMM.of("weight_quant", QuantRecipe)
        self.weights: list[Tensor] = []
        self.quantized: list[QuantOutput] = []
        sizes = {"w13": (2 * setting.i, setting.h), "w2": (setting.h, setting.i)}
        for name, (rows, columns) in sizes.items():
            name = f"accuracy/{name}/{expert}"
            made = torch.empty(rows, columns)
            for n in range(0, rows, _ROWS):
                drawn = random_bits.normal(setting.seed, name, _ROWS, columns, first=n)
                made[n : n + _ROWS] = round_bf16(drawn * setting.w)
            self.weights.append(made)
            self.quantized.append(weight_quant(self.weights[-1], recipe))

    def bf16(self) -> list[Tensor]:
        return self.weights

    def dequantized(self) -> list[Tensor]:
        return [
            E4M3.dequantized(one.codes, one.scales, BLOCK, BLOCK).float() for one in self.quantized
        ]


def _add_plain(out: Tensor, batch: _Batch, expert: int, w13: Tensor, w2: Tensor) -> None:
    """Add an expert's rows of a layer with BF16 activations: FC1, SwiGLU and FC2 are rounded."""
    token, slot = (batch.ids == expert).nonzero(as_tuple=True)
    gate, up = round_bf16(batch.x[token] @ w13.t()).chunk(2, dim=1)
    rows = round_bf16(round_bf16(silu(gate) * up) @ w2.t())
    out.index_add_(0, token, rows * batch.weights[token, slot, None])


class _Run:
    """A subject's layer, expert by expert."""

    def __init__(self, subject: Subject, batch: _Batch, positions: Tensor) -> None:
        self.subject, self.positions, recipe = subject, positions, subject.recipe
        self.ids, self.weights = batch.ids[self.positions], batch.weights[self.positions]
        self.start = recipe.of("act_quant", QuantRecipe)
        self.last = recipe.of("swiglu_quant", QuantRecipe)
        self.gemm, self.swiglu = recipe.of("gemm", GemmRecipe), recipe.of("swiglu", SwigluRecipe)
        self.combine = recipe.of("combine", CombineRecipe)
        self.act = act_quant(batch.x[self.positions], self.start, scale=subject.scale)
        shape = (*self.ids.shape, batch.x.shape[1])
        self.rows = torch.zeros(shape, dtype=torch.bfloat16)

    def add(self, expert: int, own: _Expert, kept: dict[object, Tensor]) -> None:
        """Compute the rows of one expert; ``kept`` has its FC1 of subjects that share it."""
        token, slot = (self.ids == expert).nonzero(as_tuple=True)
        if not len(token):
            return
        w13, w2 = own.quantized
        scale = self.subject.scale
        key = (self.start, scale, self.gemm, tuple(self.positions[token].tolist()))
        if key not in kept:
            codes, scales = self.act.codes[token], self.act.scales[token]
            rows = gemm(codes, scales, w13.codes, w13.scales, self.gemm)
            kept[key] = finish(rows, None, self.gemm)
        mid = act_quant(swiglu(kept[key], self.swiglu), self.last, scale=scale)
        total = gemm(mid.codes, mid.scales, w2.codes, w2.scales, self.gemm)
        weight = in_epilogue(self.weights[token, slot], self.combine)
        self.rows[token, slot] = finish(total, None, self.gemm, weight)

    def tokens(self, numbers: list[int]) -> Tensor:
        """Return the numbers of this subject's tokens, of those of all subjects."""
        return torch.tensor(numbers)[self.positions]

    def out(self) -> Tensor:
        """Return BF16 [T, H] after the top-k sum."""
        owned = torch.ones(self.ids.shape, dtype=torch.bool)
        return combine(self.rows, self.weights, owned, self.combine)


# --- the command --------------------------------------------------------------------------------


def lines(setting: Setting, found: Sequence[Error]) -> Iterator[str]:
    """Yield JSON lines: the setting, then every error."""
    yield json.dumps({"schema": "accuracy/1", **dataclasses.asdict(setting)})
    for error in found:
        yield json.dumps({k: _short(v) for k, v in dataclasses.asdict(error).items()})


def _short(value: object) -> object:
    if isinstance(value, tuple):
        return [_short(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def read(path: Path) -> list[Error]:
    """Return the errors of a file of JSON lines."""
    records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return [Error(**{**one, "batches": tuple(one["batches"])}) for one in records]


COLUMNS = (
    ("vllm_triton", "ue8m0"),
    ("vllm_triton", "fp32"),
    ("vllm_fused_silu", "fp32"),
    ("ours", "ue8m0"),
    ("ours", "fp32"),
)


def cells(found: Sequence[Error], against: str = "bf16", norm: str = "l2") -> list[tuple[str, ...]]:
    """Return the table: M, tokens computed, one column for each subject, the seed's figures."""
    by = {(e.subject, e.scale, e.m): e for e in found if e.against == against}
    rows = []
    for m in sorted({e.m for e in found}):
        own = [by.get((*column, m)) for column in COLUMNS]
        seen = max(e.tokens for e in own if e)
        values = [f"{getattr(e, norm):.4f}" if e else "" for e in own]
        said = [
            figures for start, figures in SEED_FIGURES.items() if start == m or 64 <= start <= m
        ]
        seed = f"{said[-1][0]} -> {said[-1][1]}" if said and against == "bf16" else ""
        rows.append((str(m), str(seen), *values, seed))
    return rows


HEAD = ("M", "tokens", *(f"{name} {scale}" for name, scale in COLUMNS), "seed 000")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(args: Sequence[str] | None = None) -> int:
    """Print the tables of both yardsticks; write JSON lines where ``-o`` says."""
    parser = argparse.ArgumentParser(prog="python -m moe_parity.harness.evidence.accuracy")
    add = parser.add_argument
    add("--tokens", type=_numbers, default=list(TOKENS), metavar="M,M", help="batch sizes")
    add("--ours", type=_numbers, default=[1, 8, 64], metavar="M,M", help="those of our recipe")
    add("--sample", type=int, default=SAMPLE, metavar="N", help="tokens computed of a larger batch")
    for name, value in dataclasses.asdict(Setting()).items():
        add(f"--{name}", type=type(value), default=value, help="default: %(default)s")
    add("-o", dest="out", type=Path, metavar="FILE", help="write JSON lines here")
    asked = vars(parser.parse_args(args))
    counts, ours, sample, out = (asked.pop(name) for name in ("tokens", "ours", "sample", "out"))
    setting = Setting(**asked)
    found = list(errors(setting, list(subjects(counts, ours)), sample, progress=True))
    print(file=sys.stderr)
    if out:
        out.write_text("".join(f"{line}\n" for line in lines(setting, found)))
    for against in YARDSTICKS:
        for norm in ("l2", "mean", "max"):
            print(f"{norm} against {against}")
            for row in (HEAD, *cells(found, against, norm)):
                print("  ".join(cell.rjust(20) for cell in row))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ParityError as error:
        sys.exit(f"accuracy: {error}")
