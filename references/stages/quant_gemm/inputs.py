"""Inputs on which a quantizer's decisions show in the rows of the GEMM behind it.

Codes and scales are seen by nobody there, so aimed rows and columns of the weights are made for
each other.  Rows, by turns of four: two measure (in the second half of K groups of every BF16
mantissa of amax, with elements on midpoints of E4M3; in the first half each amax as two digits,
under a scale that is a power of two), one is ordinary and repeats, one holds a single group of
tiny, infinite or NaN elements.  Columns, by turns of four: two are dense, the second half of K the
first one negated, its scales moved by a few 2^-20; one passes a single place, so that its code is
read off; one takes the digits of amax from 448 times its scale in one FMA, which leaves the error
of that scale to its last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import (
    BLOCK,
    E4M3,
    e4m3_decode,
    f32_to_bf16,
    round_bf16,
)
from moe_parity.references.language.case import Case, Values
from moe_parity.references.stages.gemm.aims import codes, nudged
from moe_parity.references.stages.hazards import embed, surround
from moe_parity.references.stages.quant import aims
from moe_parity.references.stages.quant.inputs import values

ONE = 0x38
"""The code of 1."""
MINUS_ONE = 0xB8
BINADES = 13
"""Binades below amax in which elements are looked for: E4M3 has no more."""


@dataclass(frozen=True, kw_only=True)
class QuantGemmInputs:
    """The operands of a dense GEMM whose rows are not quantized yet."""

    x: Tensor
    """bf16 [M, K]."""
    w: Tensor
    """E4M3 codes [N, K], uint8."""
    w_scale: Tensor
    """fp32 [ceil(N / 128), K / 128]."""

    @property
    def a(self) -> Tensor:
        """The rows, by the name that the decisions of a GEMM have for them."""
        return self.x

    @property
    def bias(self) -> None:
        """None: no row has one."""


def made(case: Case, device: str) -> QuantGemmInputs:
    """Return the inputs of a case: K = ``h``, N = ``i``."""
    aimed = case.values is Values.AIMED and case.h % (2 * BLOCK) == 0
    if case.values is Values.AIMED:
        x = _aimed_rows(case, device) if aimed else _measuring(case, case.m, case.h, device)
    else:
        x = values(case, case.m, case.h, device)
    w, w_scale = _weights(case, aimed, device)
    rows = embed(f32_to_bf16(x), case.hazard)
    return surround(QuantGemmInputs(x=rows, w=w, w_scale=w_scale), case.hazard)


# --- weights ------------------------------------------------------------------------------------


def _weights(case: Case, aimed: bool, device: str) -> tuple[Tensor, Tensor]:
    n, k, seed = case.i, case.h, case.seed
    half = k // 2 if aimed else k
    down, across = -(-n // BLOCK), half // BLOCK
    w = codes(seed, "quant_gemm/w", n, half, device=device)
    scale = 1.0 + random_bits.uniform(seed, "quant_gemm/w/scale", down, across, device=device)
    if case.scale.is_power_of_two:
        scale = torch.exp2((4.0 * (scale - 1.0)).floor())
    if not aimed:
        return w, scale
    moved = scale
    if not case.scale.is_power_of_two:
        moved = scale * nudged(seed, "quant_gemm/w/move", down, across, device=device)
    w = torch.cat([w, w ^ 0x80], 1)
    column = torch.arange(n, device=device)
    one, digits = column[column % 4 == 2], column[column % 4 == 3]
    w[column % 4 >= 2] = 0
    place = random_bits.integers(seed, "quant_gemm/w/place", n, 1, below=half)[:, 0].to(device)
    w[one, half + place[one]] = ONE
    start = digits // 4 % across * BLOCK
    w[digits, start + 1] = MINUS_ONE
    w[digits, start + 2] = MINUS_ONE
    w[digits, half + start] = ONE
    return w, torch.cat([scale, moved], 1)


# --- rows ---------------------------------------------------------------------------------------


def _aimed_rows(case: Case, device: str) -> Tensor:
    """Return fp32 [m, h], every number of which BF16 holds."""
    m, half = case.m, case.h // 2
    row = torch.arange(m, device=device)[:, None]
    measured = _measuring(case, m, half, device)
    rows = torch.cat([_digits(measured), measured], 1)
    ordinary = round_bf16(random_bits.normal(case.seed, "quant_gemm/x", m, half, device=device))
    rows = torch.where(row % 4 == 1, ordinary.repeat(1, 2), rows)
    return torch.where(row % 4 == 3, _alone(case, device), rows)


def _measuring(case: Case, rows: int, columns: int, device: str) -> Tensor:
    """Return groups with amax in their first place, from the start again once they are used up."""
    pool = groups(case.seed)
    index = torch.arange(rows * columns // BLOCK) % pool.shape[0]
    return pool[index].view(rows, columns).to(device)


def _digits(x: Tensor) -> Tensor:
    """Return groups [448 * 2^j, hi, lo, 0 ...] with hi + lo the amax of each group of ``x``."""
    amax = x.view(-1, BLOCK)[:, 0]
    low = torch.exp2(torch.floor(torch.log2(amax)) - 4.0)
    high = torch.floor(amax / (2.0 * low)) * (2.0 * low)
    zeros = torch.zeros((amax.numel(), BLOCK - 3), device=x.device)
    head = torch.stack([E4M3.largest * low, high, amax - high], 1)
    return torch.cat([head, zeros], 1).view(x.shape)


def _alone(case: Case, device: str) -> Tensor:
    """Return rows of zeros but for one group: tiny, infinite, NaN or past the end of E4M3."""
    pool = _odd_groups(case.seed)
    blocks = case.h // BLOCK
    rows = torch.zeros((case.m, blocks, BLOCK))
    row = torch.arange(case.m)
    rows[row, row // 4 % blocks] = pool[row // 4 % pool.shape[0]]
    return rows.view(case.m, case.h).to(device)


@lru_cache(maxsize=4)
def groups(seed: int) -> Tensor:
    """Return one group for each BF16 mantissa of amax, fp32 [128, 128], in an order of the seed.

    Behind amax stand the BF16 numbers on midpoints of E4M3, as often as there is room, where the
    mantissa has any, with either sign; otherwise numbers of all sizes.  None is next to a midpoint:
    products of 8 bits and 448 are on one or at least 2^-17 away.
    """
    amax = 1.0 + torch.arange(BLOCK) / BLOCK
    binade = torch.arange(BINADES)
    x = ((1.0 + torch.arange(BLOCK) / BLOCK)[None] * torch.exp2(-binade.float())[:, None]).flatten()
    sign = random_bits.integers(seed, "quant_gemm/sign", BLOCK, BLOCK - 1, below=2) * 2 - 1
    other = random_bits.integers(seed, "quant_gemm/other", BLOCK, BLOCK - 1, below=x.numel())
    size = x[other]
    for n in range(BLOCK):
        ties = _on_midpoints(x[x < amax[n]], float(amax[n]))
        if ties.numel():
            size[n] = ties[torch.arange(BLOCK - 1) % ties.numel()]
    size = torch.where(size > amax[:, None], size * 0.5, size)
    power = random_bits.integers(seed, "quant_gemm/power", BLOCK, 1, below=33) - 16
    made = torch.cat([amax[:, None], size * sign], 1) * torch.exp2(power.float())
    return made[random_bits.words(seed, "quant_gemm/order", 1, BLOCK)[0].argsort()]


def _on_midpoints(x: Tensor, amax: float) -> Tensor:
    """Return those of ``x`` for which 448 x / amax is a midpoint of E4M3; exact in float64."""
    code = e4m3_decode(torch.arange(E4M3.nan, dtype=torch.uint8)).double()
    midpoint = (code[1:] + code[:-1]) / 2
    return x[torch.isin(x.double() * E4M3.largest, midpoint * amax)]


@lru_cache(maxsize=4)
def _odd_groups(seed: int) -> Tensor:
    """Return tiny, infinite, NaN and zero groups by turns, fp32 [groups, 128], as BF16 has them."""
    kinds = [aims.tiny_groups(seed), aims.nan_elements(seed), aims.tiny_groups(seed + 1),
             aims.infinite_elements(seed)]  # fmt: skip
    mixed = []
    for number, kind in enumerate(kinds):
        order = random_bits.words(seed, f"quant_gemm/odd/{number}", 1, kind.shape[0])[0].argsort()
        mixed.append(kind[order[:128]])
    return round_bf16(torch.stack(mixed, 1).view(-1, BLOCK))
