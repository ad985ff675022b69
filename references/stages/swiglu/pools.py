"""The aimed and special inputs of SwiGLU's stages, by version; a version is frozen.

Version 1 has pairs on which forms of SiLU differ side by side, where a quantization hides them, and
special values in every group.  In version 2 each part is made so that its decision reaches the
codes or the scale: ``telling``, more groups at a limit, one special pair in a group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import BLOCK, from_bits
from moe_parity.references.errors import ParityError
from moe_parity.references.language.case import Case, Gate, Values
from moe_parity.references.stages.quant.aims import POOLS as QUANTIZERS
from moe_parity.references.stages.quant.aims import tiny_groups
from moe_parity.references.stages.quant.inputs import aimed_pool
from moe_parity.references.stages.swiglu import aims, telling
from moe_parity.references.stages.swiglu.telling import BIG_GATE

Parts = dict[str, Tensor]
"""Name -> groups fp32 [G, 256], gate then up."""

LIMITED = 1024
"""Groups at each kind of limit, in the second version."""
SMALL_GATE = 2.0**-40
"""SiLU of it is half of it exactly, in every form."""


def pool(case: Case) -> Tensor:
    """Return the groups of a case, fp32 [G, 256], gate then up, interleaved.

    Special ones hold zeros, infinities and NaN of both; among aimed ones a limit meets no NaN,
    since what a clamp makes of it depends on the compiler.  Raises ParityError for a version of the
    pool that does not exist.
    """
    made = torch.cat(list(parts(case).values()))
    if case.values is Values.SPECIAL and case.pool == 1:
        return made
    return made[random_bits.words(case.seed, "pool", 1, made.shape[0])[0].argsort()]


def parts(case: Case) -> Parts:
    """Return the parts that a pool is made of, by name."""
    if case.pool not in VERSIONS:
        known = ", ".join(map(str, VERSIONS))
        raise ParityError(
            f"case: there is no pool {case.pool} of aimed inputs; there are: {known}."
        )
    return VERSIONS[case.pool](case)


def first(case: Case) -> Parts:
    """Return version 1."""
    if case.values is Values.SPECIAL:
        return {"special": _special_gates()}
    finite = torch.nan_to_num(_special_gates(), nan=1.0, posinf=64.0, neginf=-64.0)
    found = {"gates": aims.every_gate_of_pool_1(case.seed), "ends": finite}
    if case.clamp is not None:
        found["limit"] = aims.gates_at_the_limit(case.seed)
        found["odd_limit"] = torch.nan_to_num(aims.gates_past_an_odd_limit(case.seed), nan=9.0)
    if case.clamp is None and case.gate is Gate.SILU:
        found["quantizer"] = through_a_big_gate(aimed_pool(case.seed, 1))
    return found


def second(case: Case) -> Parts:
    """Return version 2."""
    if case.values is Values.SPECIAL:
        return {"special": _one_special_pair(), "nan_ups": _nan_ups(case.seed)}
    finite = torch.nan_to_num(_special_gates(), nan=1.0, posinf=64.0, neginf=-64.0)
    found = {"gates": aims.every_gate_of_pool_1(case.seed), "ends": finite}
    found["shift"] = aims.shifted_ups(case.seed, LIMITED)
    if case.clamp is not None:
        found["limit"] = aims.gates_at_the_limit(case.seed, LIMITED)
        odd = aims.gates_past_an_odd_limit(case.seed, LIMITED)
        found["odd_limit"] = torch.nan_to_num(odd, nan=9.0)
        found["own_limit"] = aims.gates_past(case.clamp, case.seed, LIMITED)
    if case.clamp is None and case.gate is Gate.SILU:
        found |= {"codes": telling.code_groups(), "scales": telling.scale_groups()}
        found["least"] = through_a_small_gate(telling.least_products())
        found["powers"] = telling.power_groups()
        found["flushed"] = telling.flushed_groups()
        found["quotients"] = through_a_big_gate(telling.quotient_groups())
        for aim in QUANTIZERS[2]:
            through = through_a_small_gate if aim is tiny_groups else through_a_big_gate
            found[aim.__name__] = through(aim(case.seed))
    return found


VERSIONS: dict[int, Callable[[Case], Parts]] = {1: first, 2: second}
"""Version of the pool, which ``Case.pool`` names -> its parts; a new aim goes into a new one."""


def through_a_big_gate(groups: Tensor) -> Tensor:
    """Return gates and ups whose products are ``groups`` [G, 128] in every form of SiLU."""
    return torch.cat([torch.full_like(groups, BIG_GATE), groups / BIG_GATE], 1)


def through_a_small_gate(groups: Tensor) -> Tensor:
    """Return likewise groups of tiny products, for which up is no subnormal."""
    return torch.cat([torch.full_like(groups, SMALL_GATE), groups * (2.0 / SMALL_GATE)], 1)


_SPECIAL_WORDS = (
    0, -0x80000000, 0x40E00000, -0x3F200000, 0x7149F2CA, 0x7F800000, -0x00800000, 0x7FC00000,
)  # fmt: skip


def _special_pairs() -> tuple[Tensor, Tensor]:
    """Return every pair of eight special values, gates [64] and ups [64]."""
    value = from_bits(torch.tensor(_SPECIAL_WORDS, dtype=torch.int64).int())
    return value.repeat_interleave(8), value.repeat(8)


def _special_gates() -> Tensor:
    gate, up = _special_pairs()
    return torch.cat([gate.repeat(2), up.repeat(2)])[None]


def _ordinary(groups: int) -> Tensor:
    """Return groups of the products 1/4, 1/2, ... 32, where no form of SiLU differs."""
    up = (torch.arange(BLOCK) + 1.0) / BLOCK
    return through_a_big_gate(BIG_GATE * up.expand(groups, BLOCK))


def _one_special_pair() -> Tensor:
    """Return 18 groups of each special pair, another place in each."""
    gate, up = (part.repeat(18) for part in _special_pairs())
    made = _ordinary(gate.numel())
    row = torch.arange(gate.numel())
    place = row * 5 % BLOCK
    made[row, place], made[row, BLOCK + place] = gate, up
    return made


def _nan_ups(seed: int) -> Tensor:
    """Return groups with a NaN in half of the ups: a limit makes it a number of either sign."""
    made = _ordinary(32)
    nan = random_bits.integers(seed, "special/nan", 32, BLOCK, below=2) == 0
    made[:, BLOCK:].masked_fill_(nan, float("nan"))
    return made
