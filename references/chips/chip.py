"""A chip as a value: what its bits depend on, in one place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

GROUP = 32
"""Units are described per 32 of K; a shorter tail is filled with zeros, which take no part."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A dot-product unit: its name, widths, and the order in which it walks 32 of K."""

    name: str
    alignment_bits: int
    """F: terms are cut to multiples of 2^(E - F)."""
    result_bits: int
    """R: fraction bits of a step's result."""
    steps: tuple[tuple[int, ...], ...]
    """The k of each step within 32 of K, in order; the accumulator is carried between steps."""
    ptx: str
    """What its instruction looks like in PTX, a regular expression."""

    def runs(self, instruction: str) -> bool:
        """Whether a PTX instruction is this unit's."""
        return re.fullmatch(self.ptx, instruction) is not None


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A GPU whose bits are modelled."""

    name: str
    capability: tuple[int, int]
    """CUDA's compute capability."""
    units: tuple[Unit, ...]
    """Every unit that a dot product of E4M3 operands reaches."""
    tables: Mapping[str, str]
    """Special function -> the file in ``arithmetic/data`` that holds its measured table."""
    measured_on: str

    @property
    def architecture(self) -> str:
        """The name that compilers use: ``sm_90``."""
        major, minor = self.capability
        return f"sm_{major}{minor}"

    def unit_of(self, ptx: str) -> Unit | None:
        """Return the one unit that all dot products of a kernel's PTX run on, or None."""
        found = instructions_of(ptx)
        units = {unit for name in found for unit in self.units if unit.runs(name)}
        known = all(any(unit.runs(name) for unit in self.units) for name in found)
        return units.pop() if len(units) == 1 and known else None


def instructions_of(ptx: str) -> list[str]:
    """Return the tensor-core instructions of a kernel's PTX, each once, sorted."""
    return sorted(set(re.findall(r"\b(?:wgmma\.mma_async|w?mma)\.[\w.]+", ptx)))
