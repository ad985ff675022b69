"""Inputs of the quantizers by case: keyed values, aimed groups, hazards.

The same case and seed give the same bits on a CPU and a GPU and in every library version.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import BLOCK, f32_to_bf16, f32_to_f16, from_bits
from moe_parity.references.errors import ParityError
from moe_parity.references.language.case import Case, InputDtype, Values
from moe_parity.references.stages.hazards import embed
from moe_parity.references.stages.quant import aims


def activations(case: Case, device: str = "cpu") -> Tensor:
    """Return [m, h] in the case's dtype on ``device``, with gaps or transposed if asked for."""
    return embed(cast_input(values(case, case.m, case.h, device), case.dtype), case.hazard)


def weight(case: Case, device: str = "cpu") -> Tensor:
    """Return one expert's weight [i, h] in the case's dtype."""
    if case.values is Values.AIMED:
        x = _aimed_tiles(case, case.i, case.h).to(device)
    else:
        x = values(case, case.i, case.h, device)
    return embed(cast_input(x, case.dtype), case.hazard)


def cast_input(x: Tensor, dtype: InputDtype) -> Tensor:
    """Round fp32 inputs to a kernel's input type."""
    if dtype is InputDtype.BF16:
        return f32_to_bf16(x)
    return f32_to_f16(x) if dtype is InputDtype.FP16 else x


def values(case: Case, rows: int, columns: int, device: str) -> Tensor:
    """Return fp32 [rows, columns] of the case's value pattern."""
    if case.values is Values.AIMED:
        return _aimed(case, rows, columns).to(device)
    if case.values is Values.EVERY_BF16:
        word = torch.arange(rows * columns, dtype=torch.int64, device=device) & 0xFFFF
        return from_bits((word << 16).int()).view(rows, columns)
    x = random_bits.normal(case.seed, "x", rows, columns, device=device)
    if case.values is Values.NORMAL:
        return x
    if case.values is Values.WIDE:
        return x * _block_exponents(case, rows, columns, device)
    return _special(case, x)


def _block_exponents(case: Case, rows: int, columns: int, device: str) -> Tensor:
    """Return powers of two, another one for every row and 64 columns: no two scales alike.

    A transposed, shifted or mis-strided scale then shows in every block.
    """
    exponent = random_bits.integers(case.seed, "x/exponent", rows, -(-columns // 64), below=60) - 30
    power = torch.pow(2.0, exponent.float()).to(device)
    return power.repeat_interleave(64, 1)[:, :columns]


def _special(case: Case, x: Tensor) -> Tensor:
    """Sprinkle NaN, infinities, zeros, subnormals and the largest values over ``x``."""
    words = (0x7FC00000, 0x7F800000, -0x00800000, 0, -0x80000000, 1, 0x007FFFFF, 0x7F7F0000)
    bits = torch.tensor(words, dtype=torch.int64, device=x.device).int()
    rows, columns = x.shape
    device = str(x.device)
    which = random_bits.integers(
        case.seed, "x/which", rows, columns, below=len(words), device=device
    )
    here = random_bits.integers(case.seed, "x/here", rows, columns, below=97, device=device) == 0
    quiet = random_bits.integers(case.seed, "x/row", rows, 1, below=2, device=device) == 0
    return torch.where(here & ~quiet, from_bits(bits[which].contiguous()), x)


@lru_cache(maxsize=4)
def aimed_pool(seed: int, version: int = 1) -> Tensor:
    """Return the aimed groups of every quantization decision, fp32 [groups, 128], interleaved.

    Raises ParityError for a version of the pool that does not exist.
    """
    if version not in aims.POOLS:
        known = ", ".join(map(str, aims.POOLS))
        raise ParityError(f"case: there is no pool {version} of aimed inputs, only {known}.")
    pool = torch.cat([aim(seed) for aim in aims.POOLS[version]])
    order = random_bits.words(seed, "pool", 1, pool.shape[0])[0].argsort()
    return pool[order]


def aimed_rows(columns: int, share: int = 1, seed: int = 0) -> int:
    """Return how many rows of ``columns`` hold the pool once, or one part in ``share`` of it.

    The pool is interleaved: a part of it has groups of every decision.
    """
    return -(-aimed_pool(seed).shape[0] * aims.GROUP // (columns * share))


def _aimed(case: Case, rows: int, columns: int) -> Tensor:
    """Lay the pool out row by row, from the start again when it is used up."""
    pool = aimed_pool(case.seed, case.pool)
    needed = -(-rows * columns // aims.GROUP)
    index = torch.arange(needed) % pool.shape[0]
    return pool[index].flatten()[: rows * columns].view(rows, columns)


def _aimed_tiles(case: Case, rows: int, columns: int) -> Tensor:
    """Give every 128 x 128 tile one aimed group, each of its rows rotated by one more place.

    A tile of 128 different groups would have the amax of the largest, and hide the others.
    """
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    pool = aimed_pool(case.seed, case.pool)
    groups = pool[torch.arange(down * across) % pool.shape[0]]
    turn = (torch.arange(BLOCK)[:, None] + torch.arange(BLOCK)[None]) % BLOCK
    tiles = groups[:, turn].view(down, across, BLOCK, BLOCK).transpose(1, 2)
    return tiles.reshape(down * BLOCK, across * BLOCK)[:rows, :columns].contiguous()
