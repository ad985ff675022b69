"""What a sequence of PTX instructions computes, bit for bit: behind every float operation.

A key is a sequence as ``lowering.instructions`` returns it, a value a function of numpy arrays in
storage form (fp32 and FP16 as themselves, BF16 as uint16, E4M3 as uint8).  A sequence that is not
here has no model.  The arithmetic is that of ``references``; what this module adds is the rules
for NaN (``0x7fffffff``, ``0x7fff``) and for the order of zeros (``max(-0, +0)`` is ``+0``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from moe_parity.kernels.virtual_gpu.errors import UnmodelledOperation
from moe_parity.references.arithmetic import formats, rounding
from moe_parity.references.chips import special

Array = np.ndarray[Any, Any]
Model = Callable[..., Array]

F32_NAN = np.uint32(formats.F32_NAN_BITS)


def tensor(x: Array) -> torch.Tensor:
    """Return ``x`` as a torch tensor, without a copy where possible."""
    x = np.ascontiguousarray(x)
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def canonical(x: Array) -> Array:
    """Return fp32 ``x``, just computed, with its NaNs made ``0x7fffffff``, in place."""
    nan = np.isnan(x)
    if nan.any():
        x.view(np.uint32)[nan] = F32_NAN
    return x


# --- conversions -------------------------------------------------------------------------------


def bf16_to_f32(x: Array) -> Array:
    """Widen BF16 (uint16); exact."""
    return canonical((x.astype(np.uint32) << 16).view(np.float32))


def f16_to_f32(x: Array) -> Array:
    """Widen FP16; exact."""
    return canonical(x.astype(np.float32))


def e4m3_to_f32(x: Array) -> Array:
    """Decode E4M3 (uint8); exact."""
    return formats.e4m3_decode(tensor(x)).numpy()


def widen(x: Array, name: str) -> Array:
    """Return fp32, BF16 or FP16 in storage form as fp32; ``name`` is Triton's."""
    return {"bf16": bf16_to_f32, "fp16": f16_to_f32}.get(name, _identity)(x)


def f32_to_bf16(x: Array) -> Array:
    """Round fp32 to BF16 (uint16): ``cvt.rn.bf16.f32``."""
    return formats.f32_to_bf16(tensor(x)).view(torch.int16).numpy().view(np.uint16)


def f32_to_f16(x: Array) -> Array:
    """Round fp32 to FP16: ``cvt.rn.f16.f32``."""
    return formats.f32_to_f16(tensor(x)).numpy()


def f32_to_e4m3(x: Array) -> Array:
    """Round fp32 to E4M3 (uint8): ``cvt.rn.satfinite.e4m3x2.f32``."""
    return formats.e4m3_encode(tensor(x)).numpy()


def f32_to_integer(kind: type[np.integer[Any]], x: Array) -> Array:
    """Truncate fp32 to an integer: ``cvt.rzi``.

    The instruction saturates 32-bit results and turns NaN into 0; for the other widths a value
    out of range raises, since PTX goes through a register of another width.
    """
    info, whole = np.iinfo(kind), np.trunc(x.astype(np.float64))
    inside = (whole >= float(info.min)) & (whole < float(info.max) + 1.0)
    if kind not in (np.int32, np.uint32) and not inside.all():
        raise UnmodelledOperation(
            f"A cast of fp32 to {info.dtype} met {x[~inside].flat[0]!r}, which is out of range; "
            "that is modelled for 32-bit integers only: clamp first."
        )
    if inside.all():
        return whole.astype(kind)
    whole = np.where(np.isnan(whole), 0.0, np.clip(whole, float(info.min), float(info.max)))
    return whole.astype(kind)


# --- arithmetic on fp32 ------------------------------------------------------------------------


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """RN(a * b + c), one rounding: ``fma.rn.f32``."""
    a, b, c = np.broadcast_arrays(a, b, c)
    return rounding.fma_rn(tensor(a), tensor(b), tensor(c)).numpy()


def _special(function: Callable[..., torch.Tensor], *arguments: Array) -> Array:
    return function(*(tensor(x) for x in np.broadcast_arrays(*arguments))).numpy()


def div_by_constant(a: Array, b: Array) -> Array:
    """Return a * (1 / b) with ``div.approx``: Triton 3.9's division by a constant."""
    reciprocal = _special(special.div_approx, np.ones_like(b), b)
    return canonical(reciprocal * a)


def round_whole(function: Callable[[Array], Array], x: Array) -> Array:
    """Round to a whole number, subnormals flushed first: ``cvt.rmi.ftz`` and ``cvt.rpi.ftz``."""
    return canonical(function(special.flush(tensor(x)).numpy()))


def extremum(largest: bool, propagate: bool, a: Array, b: Array) -> Array:
    """``max.f32`` or ``min.f32``, and with ``propagate`` their ``.NaN`` forms."""
    a, b = np.broadcast_arrays(a, b)
    result = np.asarray((np.fmax if largest else np.fmin)(a, b))
    equal = a == b
    if equal.any():  # zeros of either sign: the maximum is +0, the minimum -0
        join = np.bitwise_and if largest else np.bitwise_or
        words = join(a.view(np.uint32), b.view(np.uint32))
        result = np.where(equal, words, result.view(np.uint32)).view(np.float32)
    if propagate:
        result = np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), result)
    return canonical(result)


def clamp(propagate: bool, x: Array, low: Array, high: Array) -> Array:
    """``max`` with ``low``, then ``min`` with ``high``."""
    return extremum(False, propagate, extremum(True, propagate, x, low), high)


def min_xorsign_abs(propagate: bool, x: Array, _low: Array, high: Array) -> Array:
    """Return min(|x|, |high|) under both signs combined: a clamp to a symmetric range."""
    x, high = np.broadcast_arrays(x, high)
    sign = (x.view(np.uint32) ^ high.view(np.uint32)) & np.uint32(0x80000000)
    size = extremum(False, propagate, np.abs(x), np.abs(high))
    return canonical((size.view(np.uint32) | sign).view(np.float32))


# --- BF16 and FP16 -----------------------------------------------------------------------------


def _rounded_to_odd(x: Array) -> Array:
    """Return float64 ``x`` as fp32 so that a later rounding to BF16 is the only one that counts."""
    near = x.astype(np.float32)
    words = near.view(np.int32).copy()
    inexact = (near != x) & np.isfinite(near)
    words -= inexact & (np.abs(near) > np.abs(x))
    odd: Array = words | inexact
    return odd.view(np.float32)


def mul_bf16(a: Array, b: Array) -> Array:
    """RN(a * b) to BF16; the product is exact in float64, not always in fp32."""
    product = bf16_to_f32(a).astype(np.float64) * bf16_to_f32(b).astype(np.float64)
    return f32_to_bf16(_rounded_to_odd(product))


def _through_f32(function: Model, widen: Model, narrow: Model, *arguments: Array) -> Array:
    return narrow(function(*(widen(x) for x in arguments)))


_COMPARE: dict[str, Any] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "neu": np.not_equal,
}  # fmt: skip


def _identity(x: Array) -> Array:
    return x


def _sign_word(name: str, mask: int, x: Array) -> Array:
    word = np.uint32 if x.dtype == np.float32 else np.uint16
    function = np.bitwise_and if name == "and" else np.bitwise_xor
    return np.asarray(function(x.view(word), word(mask))).view(x.dtype)


def _arithmetic() -> dict[str, Model]:
    """List the operations that exist for fp32, BF16 and FP16."""
    table: dict[str, Model] = {
        "add.rn.f32 v0, a, b": lambda a, b: canonical(np.asarray(a + b)),
        "sub.rn.f32 v0, a, b": lambda a, b: canonical(np.asarray(a - b)),
        "mul.rn.f32 v0, a, b": lambda a, b: canonical(np.asarray(a * b)),
        "mul.rn.bf16 v0, a, b": mul_bf16,
        "and.b32 v0, a, 2147483647": partial(_sign_word, "and", 0x7FFFFFFF),
        "and.b16 v0, a, 32767": partial(_sign_word, "and", 0x7FFF),
        "xor.b32 v0, a, -2147483648": partial(_sign_word, "xor", 0x80000000),
        "xor.b16 v0, a, -32768": partial(_sign_word, "xor", 0x8000),
    }
    divide = partial(_special, special.div_full)
    table["div.full.f32 v0, a, b"] = divide
    table["div.approx.f32 v0, 0f3F800000, b; mul.rn.f32 v1, v0, a"] = div_by_constant
    narrow_types = (("bf16", bf16_to_f32, f32_to_bf16), ("f16", f16_to_f32, f32_to_f16))
    # An fp32 sum of two narrow values, and an fp32 product of two FP16 values, rounds innocuously
    # (24 >= 2 * 11 + 2), so the narrow operation is the wide one rounded again.
    for t, widen, narrow in narrow_types:
        names = ("add", "sub") if t == "bf16" else ("add", "sub", "mul")
        for name in names:
            wide = table[f"{name}.rn.f32 v0, a, b"]
            table[f"{name}.rn.{t} v0, a, b"] = partial(_through_f32, wide, widen, narrow)
        back = f"; cvt.rn.{t}.f32 "
        divisions: dict[str, Model] = {
            f"cvt.f32.{t} v0, a; cvt.f32.{t} v1, b; div.full.f32 v2, v0, v1{back}v3, v2": divide,
            f"cvt.f32.{t} v0, a; div.full.f32 v1, v0, b{back}v2, v1": divide,
            f"cvt.f32.{t} v0, b; div.full.f32 v1, a, v0{back}v2, v1": divide,
            f"cvt.f32.{t} v0, a; div.approx.f32 v1, 0f3F800000, b; mul.rn.f32 v2, v1, v0"
            f"{back}v3, v2": div_by_constant,
        }
        for text, function in divisions.items():
            table[text] = partial(_through_f32, function, widen, narrow)
    for t, widen, narrow in (("f32", _identity, _identity), *narrow_types):
        for nan in (False, True):
            mark = ".NaN" if nan else ""
            for name, largest in (("max", True), ("min", False)):
                wide = partial(extremum, largest, nan)
                table[f"{name}{mark}.{t} v0, a, b"] = partial(_through_f32, wide, widen, narrow)
            both = f"max{mark}.{t} v0, a, b; min{mark}.{t} v1, v0, c"
            table[both] = partial(_through_f32, partial(clamp, nan), widen, narrow)
            symmetric = partial(_through_f32, partial(min_xorsign_abs, nan), widen, narrow)
            table[f"min{mark}.xorsign.abs.{t} v0, a, c"] = symmetric
            table[
                f"cvt.f32.{t} v0, a; min{mark}.xorsign.abs.f32 v1, v0, c; cvt.rn.{t}.f32 v2, v1"
            ] = symmetric
        for name, compare in _COMPARE.items():
            test = partial(_through_f32, compare, widen, _identity)
            table[f"setp.{name}.{t} v0, a, b; selp.b32 v1, 1, 0, v0"] = test
    return table


def _fp32_only() -> dict[str, Model]:
    return {
        "fma.rn.f32 v0, a, b, c": fma_f32,
        "div.rn.f32 v0, a, b": lambda a, b: canonical(np.asarray(a / b)),
        "mul.rn.f32 v0, a, 0f3FB8AA3B; ex2.approx.f32 v1, v0": partial(
            _special, special.triton_exp
        ),
        "ex2.approx.ftz.f32 v0, a": lambda a: _special(partial(special.ex2_approx, ftz=True), a),
        "cvt.rmi.ftz.f32.f32 v0, a": partial(round_whole, np.floor),
        "cvt.rpi.ftz.f32.f32 v0, a": partial(round_whole, np.ceil),
    }


def _casts() -> dict[str, Model]:
    table: dict[str, Model] = {
        "cvt.rn.bf16.f32 v0, a": f32_to_bf16,
        "cvt.rn.f16.f32 v0, a": f32_to_f16,
        "cvt.rn.satfinite.e4m3x2.f32 v0, undefined, a": f32_to_e4m3,
        "cvt.f32.bf16 v0, a": bf16_to_f32,
        "cvt.f32.f16 v0, a": f16_to_f32,
        # The second half of the pair is not stored; E4M3 is exact in FP16 and in BF16.
        "mov.b32 v0, {a, undefined}; mov.b32 {v1, v2}, v0; cvt.f32.bf16 v3, v1; "
        "cvt.f32.bf16 v4, v2; cvt.rn.satfinite.e4m3x2.f32 v5, v4, v3": lambda a: f32_to_e4m3(
            bf16_to_f32(a)
        ),
        "mov.b32 v0, {a, undefined}; cvt.rn.satfinite.e4m3x2.f16x2 v1, v0": lambda a: f32_to_e4m3(
            f16_to_f32(a)
        ),
        "cvt.rn.f16x2.e4m3x2 v0, a; mov.b32 {v1, _}, v0; cvt.f32.f16 v2, v1": e4m3_to_f32,
        "cvt.rn.f16x2.e4m3x2 v0, a; cvt.u16.u32 v1, v0": lambda a: f32_to_f16(e4m3_to_f32(a)),
        "cvt.rn.f16x2.e4m3x2 v0, a; mov.b32 {v1, v2}, v0; cvt.bf16.f16 v3, v1; "
        "cvt.bf16.f16 v4, v2; mov.b32 v5, {v3, v4}; cvt.u16.u32 v6, v5": lambda a: f32_to_bf16(
            e4m3_to_f32(a)
        ),
    }
    to_f32 = {
        "cvt.rn.f32.s16 v0, a", "cvt.rn.f32.u16 v0, a", "cvt.rn.f32.s32 v0, a",
        "cvt.rn.f32.u32 v0, a", "cvt.rn.f32.s64 v0, a", "cvt.rn.f32.u64 v0, a",
        "and.b16 v0, a, 255; cvt.rn.f32.u16 v1, v0", "cvt.s16.s8 v0, a; cvt.rn.f32.s16 v1, v0",
        "and.b16 v0, a, 255; setp.ne.b16 v1, v0, 0; selp.f32 v2, 0f3F800000, 0f00000000, v1",
    }  # fmt: skip
    for text in to_f32:
        table[text] = lambda a: a.astype(np.float32)
    return table


MODELS: dict[str, Model] = {**_arithmetic(), **_fp32_only(), **_casts()}
"""Sequence of instructions -> what it computes."""

FROM_F32: dict[str, type[np.integer[Any]]] = {
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip
"""Integer type, as signatures spell it -> numpy type, for ``cvt.rzi``."""

_LONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "eaf5cfb8ead4a3b8": special.libdevice_log2,  # __nv_log2f, Triton 3.6 and 3.7
    "2f18023be912d128": special.libdevice_log2,  # the same with its last constant as an integer
    "6c5ef60adaa1bd19": special.libdevice_exp,  # __nv_expf, Triton 3.6 to 3.9
}
"""sha256 of a long sequence -> the reference that was written from it."""


def find(text: str, output: str) -> Model | None:
    """Return the model of a sequence whose result has type ``output``, or None."""
    if text in MODELS:
        return MODELS[text]
    if re.fullmatch(r"cvt\.rzi\.[su](16|32|64)\.f32 v0, a", text) and output in FROM_F32:
        return partial(f32_to_integer, FROM_F32[output])
    reference = _LONG.get(hashlib.sha256(text.encode()).hexdigest()[:16])
    return None if reference is None else partial(_special, reference)
