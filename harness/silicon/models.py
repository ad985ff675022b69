"""The arithmetic models as subjects: each with its inputs and the instruction it stands for.

On a GPU ``silicon`` runs the instruction itself; anywhere the model runs.  The whole fp32 range of
every unary model is compared on a GPU (``suites/test_silicon.py``), samples replay on a CPU as
witnesses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.references.arithmetic import formats, random_bits, rounding
from moe_parity.references.arithmetic.formats import from_bits
from moe_parity.references.chips import special

Function = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A scalar function of one, two or three fp32 arguments."""

    name: str
    arity: int
    model: Function
    instruction: str
    """What it stands for, in the words of PTX or of its library."""
    ptx: bool = True
    """Whether the instruction is PTX that inline assembly can run."""


def _codes(x: Tensor) -> Tensor:
    return formats.e4m3_encode(x).int()


def _bf16(x: Tensor) -> Tensor:
    return formats.f32_to_bf16(x).view(torch.int16).int()


def _f16(x: Tensor) -> Tensor:
    return formats.f32_to_f16(x).view(torch.int16).int()


MODELS: dict[str, Model] = {
    m.name: m
    for m in (
        Model(
            name="e4m3",
            arity=1,
            model=_codes,
            instruction="cvt.rn.satfinite.e4m3x2.f32",
            ptx=False,
        ),
        Model(
            name="bf16",
            arity=1,
            model=_bf16,
            instruction="cvt.rn.bf16.f32",
            ptx=False,
        ),
        Model(
            name="f16",
            arity=1,
            model=_f16,
            instruction="cvt.rn.f16.f32",
            ptx=False,
        ),
        Model(
            name="ex2_approx_ftz",
            arity=1,
            model=lambda x: special.ex2_approx(x, ftz=True),
            instruction="ex2.approx.ftz.f32",
        ),
        Model(
            name="ex2_approx",
            arity=1,
            model=lambda x: special.ex2_approx(x, ftz=False),
            instruction="ex2.approx.f32",
        ),
        Model(
            name="rcp_approx_ftz",
            arity=1,
            model=lambda x: special.rcp_approx(x, ftz=True),
            instruction="rcp.approx.ftz.f32",
        ),
        Model(
            name="rcp_approx",
            arity=1,
            model=lambda x: special.rcp_approx(x, ftz=False),
            instruction="rcp.approx.f32",
        ),
        Model(
            name="triton_exp",
            arity=1,
            model=special.triton_exp,
            instruction="tl.exp",
            ptx=False,
        ),
        Model(
            name="libdevice_exp",
            arity=1,
            model=special.libdevice_exp,
            instruction="libdevice.exp",
            ptx=False,
        ),
        Model(
            name="cuda_expf",
            arity=1,
            model=special.cuda_expf,
            instruction="expf (nvcc)",
            ptx=False,
        ),
        Model(
            name="log2",
            arity=1,
            model=special.libdevice_log2,
            instruction="tl.log2",
            ptx=False,
        ),
        Model(name="div_rn", arity=2, model=rounding.div_rn, instruction="div.rn.f32"),
        Model(name="div_full", arity=2, model=special.div_full, instruction="div.full.f32"),
        Model(
            name="div_full_ftz",
            arity=2,
            model=lambda a, b: special.div_full(a, b, ftz=True),
            instruction="div.full.ftz.f32",
        ),
        Model(name="div_approx", arity=2, model=special.div_approx, instruction="div.approx.f32"),
        Model(
            name="div_approx_ftz",
            arity=2,
            model=lambda a, b: special.div_approx(a, b, ftz=True),
            instruction="div.approx.ftz.f32",
        ),
        Model(name="fma_rn", arity=3, model=rounding.fma_rn, instruction="fma.rn.f32"),
    )
}  # fmt: skip

_SPECIAL_WORDS = (
    0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x00000001,
    0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000,
    0xBF800000, 0x7E800000, 0x7E800001, 0x7F000000, 0x7F000001, 0xC2FC0000, 0xC2FC0001, 0x42FFFFFF,
    0x43000000, 0xC3160000, 0x43E00000, 0x43E80000, 0x43E80001, 0x3C800000, 0x3A800000, 0x3A800001,
)  # fmt: skip
"""Zeros, infinities, NaN, subnormals, and the edges of the ranges of the functions above."""


def arguments(model: Model, count: int, seed: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """Return ``count`` aimed arguments (fp32 [count] each) of a model.

    A third are any bits, a third moderate values, a third of the products and quotients near
    each other (the second argument a perturbed copy, which cancels in an FMA and makes quotients
    near 1); every pair of special values comes first.
    """
    specials = torch.tensor(_SPECIAL_WORDS, dtype=torch.int64, device=device).int()
    made: list[Tensor] = []
    for place in range(model.arity):
        word = random_bits.words(seed, f"{model.arity}/{place}", 1, count, device=device)[0]
        bits = word.int()
        moderate = (bits & -0x7F800001) | (((word >> 32) % 48 + 104).int() << 23)
        third = torch.arange(count, device=device) % 3
        bits = torch.where(third == 0, bits, moderate)
        if place:
            near = made[0] + ((word >> 40) & 63).int() - 32
            sign = -0x80000000 if place == 2 else 0
            bits = torch.where(third == 2, near ^ sign, bits)
        grid = specials.repeat_interleave(len(specials) ** (model.arity - 1 - place))
        grid = grid.repeat(len(specials) ** place)[:count]
        bits[: grid.numel()] = grid
        made.append(bits)
    return tuple(from_bits(bits.contiguous()) for bits in made)


def result_bits(value: Tensor) -> Tensor:
    """Return a model's result as int32 words, NaN already canonical."""
    return value if value.dtype is torch.int32 else formats.bits_of(value)


@dataclass(frozen=True, kw_only=True)
class DotCase:
    """Operands of a tensor-core model: codes [m, k] and [k, n], accumulator [m, n]."""

    unit: str
    m: int = 64
    n: int = 32
    k: int = 128
    spread: int = 4
    """How many exponents the codes span, 1 to 16; a wide range truncates most."""
    accumulator: str = "none"
    """none, normal, wide (any finite exponent) or special (NaN, Inf, subnormals too)."""
    nan: bool = False
    """Whether a few codes are NaN."""

    @property
    def name(self) -> str:
        """A name for records and files."""
        tail = "-nan" if self.nan else ""
        return f"{self.unit}-m{self.m}-n{self.n}-k{self.k}-s{self.spread}-{self.accumulator}{tail}"


def operands(case: DotCase, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a [m, k], b [k, n] (uint8 codes) and c [m, n] (fp32) or None."""
    a = _operand(case, seed, "a", case.m, case.k, device)
    b = _operand(case, seed, "b", case.k, case.n, device)
    if case.accumulator == "none":
        return a, b, None
    word = random_bits.words(seed, "c", case.m, case.n, device=device)
    if case.accumulator == "normal":
        c = from_bits((word.int() & -0x7F800001) | (((word >> 40) % 8 + 122).int() << 23))
    else:
        c = from_bits(word.int().contiguous())
        if case.accumulator == "wide":
            c = torch.where(torch.isfinite(c), c, torch.ones_like(c))
    return a, b, c


def _operand(case: DotCase, seed: int, name: str, rows: int, columns: int, device: str) -> Tensor:
    word = random_bits.words(seed, name, rows, columns, device=device)
    exponent = 8 + ((word >> 8) & 0xFF) % case.spread - case.spread // 2
    code = (word & 0x87) | (exponent.clamp(0, 15) << 3)
    code = torch.where((word >> 16) & 15 == 0, word & 0x80, code)  # zeros of both signs
    finite = torch.where((code & 0x7F) == 0x7F, code - 1, code)
    if case.nan:
        finite = torch.where((word >> 24) % 997 == 0, torch.full_like(code, 0x7F), finite)
    return finite.to(torch.uint8)
