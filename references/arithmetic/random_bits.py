"""Random bits as a pure function of (seed, tensor, row, column): a counter-based hash.

The same on a CPU and a GPU and in every library version, and a smaller case keeps the bits of its
rows, so that a failure shrinks by slicing.  The mixer is the finalizer of SplitMix64 (Steele, Lea
and Flood, OOPSLA 2014), applied to a key of the seed and the tensor's name, then to the position.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_LOW_BYTES = 0x00FF00FF00FF00FF
_SUM_OF_LANES = 0x0001000100010001


def _shift_right(x: Tensor, places: int) -> Tensor:
    return (x >> places) & ((1 << (64 - places)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def words(
    seed: int, name: str, rows: int, columns: int, *, first: int = 0, device: str = "cpu"
) -> Tensor:
    """Return int64 [rows, columns] of 64 random bits for the tensor ``name`` under ``seed``.

    They are its rows from ``first`` on.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = int.from_bytes(digest[:8], "little", signed=True)
    row = torch.arange(first, first + rows, dtype=torch.int64, device=device)[:, None]
    column = torch.arange(columns, dtype=torch.int64, device=device)[None]
    return _mix(_mix(row * _GOLDEN + key) + column * _GOLDEN)


def integers(
    seed: int, name: str, rows: int, columns: int, *, below: int, device: str = "cpu"
) -> Tensor:
    """Return int64 [rows, columns] in [0, below), ``below`` at most 2^31."""
    high = _shift_right(words(seed, name, rows, columns, device=device), 32)
    return _shift_right(high * below, 32)


def uniform(seed: int, name: str, rows: int, columns: int, *, device: str = "cpu") -> Tensor:
    """Return fp32 [rows, columns] in [0, 1), multiples of 2^-24."""
    return _shift_right(words(seed, name, rows, columns, device=device), 40).float() * 2.0**-24


def normal(
    seed: int, name: str, rows: int, columns: int, *, first: int = 0, device: str = "cpu"
) -> Tensor:
    """Return fp32 [rows, columns], roughly N(0, 1): eight uniform bytes summed, an exact integer.

    A sum of bytes needs no logarithm or cosine, whose bits differ between libraries.
    """
    word = words(seed, name, rows, columns, first=first, device=device)
    # Two bytes a lane of 16 bits, then all four lanes in the top one: at most 2040 each.
    lanes = (word & _LOW_BYTES) + (_shift_right(word, 8) & _LOW_BYTES)
    total = _shift_right(lanes * _SUM_OF_LANES, 48)
    # Eight uniform bytes: mean 1020, standard deviation 209.01.
    return (total - 1020).float() * (1.0 / 209.0)
