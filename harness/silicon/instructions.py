"""The instructions behind the arithmetic models, run on a real GPU.

One lazily imported module: it needs Triton and CUDA.  PTX instructions go through inline
assembly, Triton's own functions through their names, nvcc's ``expf`` through torch's run-time
compiler, and the tensor-core units through ``tl.dot`` with the unit read from the PTX.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from moe_parity.harness.silicon.models import DotCase, Model
from moe_parity.references.chips import REFERENCE

_BLOCK = 1024


@triton.jit
def _asm1(x, out, n, ASM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    r = tl.inline_asm_elementwise(ASM, "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out + i, r, mask=i < n)


@triton.jit
def _asm2(x, y, out, n, ASM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    w = tl.load(y + i, mask=i < n)
    r = tl.inline_asm_elementwise(ASM, "=f,f,f", [v, w], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out + i, r, mask=i < n)


@triton.jit
def _asm3(x, y, z, out, n, ASM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    w = tl.load(y + i, mask=i < n)
    u = tl.load(z + i, mask=i < n)
    r = tl.inline_asm_elementwise(
        ASM, "=f,f,f,f", [v, w, u], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + i, r, mask=i < n)


@triton.jit
def _named(x, out, n, NAME: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    if NAME == "e4m3":
        tl.store(out + i, v.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32), mask=i < n)
    elif NAME == "bf16":
        tl.store(out + i, v.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32), mask=i < n)
    elif NAME == "f16":
        tl.store(out + i, v.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32), mask=i < n)
    elif NAME == "triton_exp":
        tl.store(out + i, tl.exp(v), mask=i < n)
    elif NAME == "libdevice_exp":
        tl.store(out + i, libdevice.exp(v), mask=i < n)
    elif NAME == "log2":
        tl.store(out + i, tl.log2(v), mask=i < n)


@triton.jit
def _dot(a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + rows[:, None] * K + k[None, :]).to(tl.float8e4nv, bitcast=True)
    right = tl.load(b + k[:, None] * N + columns[None, :]).to(tl.float8e4nv, bitcast=True)
    place = rows[:, None] * N + columns[None, :]
    tl.store(out + place, tl.dot(left, right, tl.load(c + place)))


_EXPF = """
extern "C" __global__ void kernel_expf(const float* x, float* out, long n) {
    long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = expf(x[i]);
}
"""


def run(model: Model, arguments: tuple[Tensor, ...]) -> Tensor:
    """Run the instruction on CUDA arguments; return its bits as int32 [n]."""
    x = arguments[0]
    n = x.numel()
    grid = (triton.cdiv(n, _BLOCK),)
    if model.name in ("e4m3", "bf16", "f16"):
        words = torch.empty(n, dtype=torch.int32, device=x.device)
        _named[grid](x, words, n, NAME=model.name, BLOCK=_BLOCK)
        return words
    out = torch.empty(n, dtype=torch.float32, device=x.device)
    if model.name == "cuda_expf":
        _expf()(grid=(triton.cdiv(n, 256), 1, 1), block=(256, 1, 1), args=[x, out, n])
    elif model.ptx:
        slots = ", ".join(f"${place}" for place in range(model.arity + 1))
        kernel: Any = (_asm1, _asm2, _asm3)[model.arity - 1]
        kernel[grid](*arguments, out, n, ASM=f"{model.instruction} {slots};", BLOCK=_BLOCK)
    else:
        _named[grid](x, out, n, NAME=model.name, BLOCK=_BLOCK)
    return out.view(torch.int32)


def _expf() -> Any:
    return torch.cuda._compile_kernel(_EXPF, "kernel_expf")


def run_dot(case: DotCase, a: Tensor, b: Tensor, c: Tensor | None) -> tuple[Tensor, str]:
    """Run ``tl.dot`` on CUDA operands; return its bits (int32 [m, n]) and the unit of its PTX."""
    if c is None:
        c = torch.zeros((case.m, case.n), dtype=torch.float32, device=a.device)
    out = torch.empty_like(c)
    compiled = _dot[(1,)](a, b, c, out, M=case.m, N=case.n, K=case.k, num_warps=4)
    return out.view(torch.int32), unit_of(compiled.asm["ptx"])


def unit_of(ptx: str) -> str:
    """Return the name of the unit that a kernel's PTX uses, or ``other``."""
    unit = REFERENCE.unit_of(ptx)
    return "other" if unit is None else unit.name
