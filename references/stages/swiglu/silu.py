"""SiLU in the forms that projects write: which they are, and the bits of each.

Notation: RN = one fp32 rounding, ``/~`` = div.full, ``/f`` = div.approx.ftz.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import bits_of, from_bits
from moe_parity.references.arithmetic.rounding import add_rn, div_rn, f32, mul_rn
from moe_parity.references.chips import special
from moe_parity.references.language.decision import Option


class Silu(Option):
    """How SiLU(g) is computed in fp32."""

    MUL_RECIP = (
        "mul_recip",
        "RN(g * RN(1 / RN(1 + expf(-g))))",
        "CUTLASS SiLu, vLLM silu_and_mul_per_block_quant",
        True,
    )
    DIV = "div", "RN(g / RN(1 + expf(-g)))", "vLLM silu_and_mul, torch", True
    TL_SIGMOID = (
        "tl_sigmoid",
        "RN(g * (1 /~ RN(1 + tl.exp(-g))))",
        "TensorRT-LLM Triton decode path",
        True,
    )
    DIV_FULL = "div_full", "g /~ RN(1 + tl.exp(-g))", "vLLM Triton kernels", True
    DIV_APPROX = (
        "div_approx",
        "RN(g * rcp.approx.ftz(RN(1 + expf(-g))))",
        "vLLM persistent_masked_m_silu_mul_quant",
        True,
    )
    FAST = "fast", "g /f (1 + __expf(-g))", "SGLang silu_and_mul under --use_fast_math", True


_MANY = 1 << 14
"""Gates from which a table is worth its 65,536 for a factor that may not come again."""


def silu_of_the_pools(gate: Tensor, how: Silu) -> Tensor:
    """Return SiLU as the frozen pools were chosen by.

    It differs in one form: the reciprocal of ``div_approx`` was no flushing one before a kernel
    refuted it.
    """
    if how is Silu.DIV_APPROX:
        denominator = add_rn(f32(1.0, gate), special.cuda_expf(-gate))
        return mul_rn(gate, special.rcp_approx(denominator, ftz=False))
    return silu(gate, how)


def silu(gate: Tensor, how: Silu, alpha: float = 1.0) -> Tensor:
    """Return fp32 g * sigmoid(alpha * g).

    Gates are BF16 numbers but for some at a limit, so most are looked up.
    """
    if alpha != 1.0 and gate.numel() < _MANY:
        return _computed(gate, how, alpha)
    bits = bits_of(gate)
    found = _of_bf16(how, alpha, gate.device)[(bits >> 16).long() & 0xFFFF]
    between = (bits & 0xFFFF) != 0
    if between.any():
        found[between] = _computed(gate[between], how, alpha)
    return found


@lru_cache(maxsize=64)
def _of_bf16(how: Silu, alpha: float, device: torch.device) -> Tensor:
    """Return SiLU of every BF16 number, fp32 [65536] by its bits."""
    bits = torch.arange(1 << 16, dtype=torch.int64, device=device) << 16
    return _computed(from_bits(bits.int()), how, alpha)


def _computed(gate: Tensor, how: Silu, alpha: float) -> Tensor:
    scaled = gate if alpha == 1.0 else mul_rn(gate, f32(alpha, gate))
    one = f32(1.0, gate)
    if how in (Silu.MUL_RECIP, Silu.DIV, Silu.DIV_APPROX):
        denominator = add_rn(one, special.cuda_expf(-scaled))
        if how is Silu.DIV:
            return div_rn(gate, denominator)
        if how is Silu.DIV_APPROX:
            # MUFU.RCP alone: the reciprocal of what is above 2^126 is flushed to 0.
            return mul_rn(gate, special.rcp_approx(denominator, ftz=True))
        return mul_rn(gate, div_rn(one, denominator))
    if how is Silu.FAST:
        # Neither .ftz of the product and the sum shows: 2^x is 1 for a subnormal x as it is for 0,
        # and 1 + 2^x is at least 1.
        fast = special.ex2_approx(mul_rn(-scaled, f32(special.LOG2_E, gate)), ftz=True)
        return special.div_approx(gate, add_rn(one, fast), ftz=True)
    denominator = add_rn(one, special.triton_exp(-scaled))
    if how is Silu.DIV_FULL:
        return special.div_full(gate, denominator)
    return mul_rn(gate, special.div_full(one, denominator))
