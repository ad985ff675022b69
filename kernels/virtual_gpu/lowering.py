"""What Triton makes of an operation on sm_90, read from the PTX it compiles; no GPU is needed.

Nothing here is a rule about versions.  An elementary operation is compiled alone (``probes``) and
reduced to the instructions between its load and its store; ``models`` knows what some of those
sequences compute, and any other raises.  The unit of ``tl.dot`` is read from the PTX of the very
kernel that is launched, with its signature, constexprs and options.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from moe_parity.kernels.virtual_gpu.errors import UnmodelledOperation
from moe_parity.kernels.virtual_gpu.probes import probe
from moe_parity.references.chips import REFERENCE, Unit
from moe_parity.references.chips.chip import instructions_of

CHIP = REFERENCE
TARGET = GPUTarget("cuda", 10 * CHIP.capability[0] + CHIP.capability[1], 32)
"""The chip that the virtual GPU is, with warps of 32."""

_CONSTANT = re.compile(r"0f43E00000|0x43E0|0x5F00")
"""The constant of the probes, 448, in fp32, BF16 and FP16."""


def ptx(kernel: Any, *args: Any, num_warps: int = 4, **kwargs: Any) -> str:
    """Return the PTX of ``kernel`` for sm_90 as a launch with these arguments would compile it.

    ``args`` and ``kwargs`` are those of the launch: CPU or CUDA tensors, numbers, constexprs and
    compiler options.  ``enable_fp_fusion`` is False unless given.  Results are cached.
    """
    backend = make_backend(TARGET)
    options = {"enable_fp_fusion": False, "debug": False, **kwargs, "num_warps": num_warps}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = binder(*args, **options)
    parsed, signature, constexprs, attrs = kernel._pack_args(
        backend, options, bound, specialization, rest
    )
    key = (kernel.cache_key, str(specialization), str(parsed))
    if key not in _PTX:
        source = ASTSource(kernel, signature, constexprs, attrs)
        _PTX[key] = triton.compile(source, target=TARGET, options=parsed.__dict__).asm["ptx"]
    return _PTX[key]


_PTX: dict[tuple[str, str, str], str] = {}


def dot_unit(kernel: Any, *args: Any, num_warps: int = 4, **kwargs: Any) -> Unit:
    """Return the tensor-core unit that every ``tl.dot`` of this launch runs on.

    Raises UnmodelledOperation where the kernel has none, several, or one without a model.
    """
    text = ptx(kernel, *args, num_warps=num_warps, **kwargs)
    unit = CHIP.unit_of(text)
    if unit is not None:
        return unit
    found = instructions_of(text)
    named = ", ".join(found) or "no tensor-core instruction"
    raise UnmodelledOperation(
        f"tl.dot in {kernel.__name__} compiles to {named} (Triton {triton.__version__}, "
        f"{CHIP.architecture}, {num_warps} warps), but only E4M3 dots on one unit are modelled: "
        "FP8 WGMMA, or mma.sync m16n8k16 on FP16; change the tile, the dtypes or num_warps."
    )


def opcodes(kernel: Any, *args: Any, num_warps: int = 4, **kwargs: Any) -> dict[str, int]:
    """Return how often each opcode occurs in the PTX of this launch, for assertions.

    A kernel without ``tl.fma`` and libdevice calls shows no ``fma`` here if nothing was
    contracted.
    """
    text = ptx(kernel, *args, num_warps=num_warps, **kwargs)
    return dict(Counter(_parse(s)[0].split()[-1] for s in _statements(text)))


@cache
def instructions(op: str, inputs: tuple[str, ...], output: str, *, contracted: bool = False) -> str:
    """Return the instructions of ``op`` in order, joined by ``; ``.

    ``contracted`` compiles it as Triton does by default, with contraction into FMAs allowed.

    ``inputs`` and ``output`` are Triton type names (``fp32``, ``bf16`` ...).  Operands, a probe's
    constant included, are ``a``, ``b``, ``c``, other registers ``v0``, ``v1`` ... in order of
    definition; immediates are kept.
    """
    types = (*inputs, *["fp32"] * (3 - len(inputs)), output)
    names = ("x_ptr", "y_ptr", "z_ptr", "out_ptr")
    signature = {name: f"*{ty}" for name, ty in zip(names, types, strict=True)}
    source = ASTSource(probe, {**signature, "OP": "constexpr"}, {(4,): op}, {})
    options = {"num_warps": 4, "enable_fp_fusion": contracted}
    text = triton.compile(source, target=TARGET, options=options).asm["ptx"]
    loads, constant = _OPERANDS.get(op.split("_")[-1], ("abc", ""))
    loads, constant = ("b", "a") if op == "fdiv_of_constant" else (loads, constant)
    found = "; ".join(_slice(_statements(text), loads))
    return _CONSTANT.sub(constant, found) if constant else found


_OPERANDS = {"constant": ("a", "b"), "symmetric": ("a", "c")}
"""End of a probe's name -> names of its loaded operands, name of its constant one."""


def _statements(text: str) -> list[str]:
    """Return the statements of the only entry: no comments, labels or declarations."""
    body = text[text.index("{", text.index(".entry")) :]
    lines = (line.split("//")[0].strip() for line in body.splitlines())
    code = " ".join(x for x in lines if x not in ("{", "}") and x[:1] != "." and x[-1:] != ":")
    return [" ".join(part.split()) for part in code.split(";") if part.strip()]


_IMMEDIATE = re.compile(r"-?\d+|0[fdx][0-9A-Fa-f]+")
_REGISTER = re.compile(r"(?<![.\w])(?:%\w+|[a-z]\d*)(?![\w.])")


def _slice(statements: list[str], operands: str) -> list[str]:
    """Return the statements that the stored value depends on, registers renamed."""
    parsed = [_parse(s) for s in statements]
    store = next(p for p in parsed if p[0].startswith("st.global"))
    wanted = set(_REGISTER.findall(store[2]))
    for opcode, target, _ in parsed:
        if " bra" in opcode:  # the predicate of a branch decides which definition is live
            wanted |= set(_REGISTER.findall(opcode)) | set(_REGISTER.findall(target))
    loads = {r for op, target, _ in parsed if "ld.global" in op for r in _REGISTER.findall(target)}
    kept: set[int] = set()
    grown = True
    while grown:
        grown = False
        for n, (opcode, target, sources) in enumerate(parsed):
            defined = set(_REGISTER.findall(target))
            if n in kept or opcode.startswith("st.") or not defined & wanted:
                continue
            grown = True
            kept.add(n)
            if not defined & loads:
                wanted |= set(_REGISTER.findall(sources))
    return _rename([parsed[n] for n in sorted(kept)], loads, operands)


def _parse(statement: str) -> tuple[str, str, str]:
    """Split a statement into opcode (with its guard), destination and sources."""
    guarded = re.match(r"((?:@!?%p\d+ )?\S+) ?(.*)", statement)
    assert guarded is not None
    opcode, operands = guarded.groups()
    if opcode.startswith("st."):
        address, _, value = operands.rpartition("],")
        return opcode, address, value
    operands = operands.strip()
    end = operands.find("}") + 1 if operands.startswith("{") else operands.find(",")
    end = len(operands) if end < 0 else end
    return opcode, operands[:end], operands[end:].lstrip(", ")


def _rename(kept: list[tuple[str, str, str]], loads: set[str], operands: str) -> list[str]:
    names: dict[str, str] = {}
    letters = iter(operands)
    lines = []
    for opcode, target, sources in kept:
        registers = _REGISTER.findall(target)
        if set(registers) & loads:
            if registers[0] not in names:
                names[registers[0]] = next(letters)
            continue
        if opcode.startswith("mov.") and _IMMEDIATE.fullmatch(sources):
            names[target] = sources
            continue
        lines.append((opcode, target, sources))
    count = 0
    text = []
    for opcode, target, sources in lines:
        for register in _REGISTER.findall(target):
            if register not in names:
                names[register] = f"v{count}"
                count += 1
        written = f"{opcode} {target}, {sources}" if sources else f"{opcode} {target}"
        text.append(_REGISTER.sub(lambda m: names.get(m[0], "undefined"), written))
    return text
