"""One-operation kernels: what Triton makes of each is read from the PTX of one of these.

``OP`` picks the operation, the pointers' element types pick the data types.  A constant operand
has probes of its own, since the compiler treats it differently (see ``lowering``).
"""

# The branches are constexpr: a probe is compiled from exactly one of them.

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def probe(x_ptr, y_ptr, z_ptr, out_ptr, OP: tl.constexpr):
    """Compute ``out = OP(x, y, z)`` on 128 elements, one a thread."""
    i = tl.arange(0, 128)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    z = tl.load(z_ptr + i)
    if OP == "fadd":
        r = x + y
    elif OP == "fsub":
        r = x - y
    elif OP == "fmul":
        r = x * y
    elif OP == "fneg":
        r = -x
    elif OP == "fma":
        r = tl.fma(x, y, z)
    elif OP == "fabs":
        r = tl.abs(x)
    elif OP == "fdiv":
        r = x / y
    elif OP == "fdiv_constant":
        r = x / 448.0
    elif OP == "fdiv_of_constant":
        r = 448.0 / x
    elif OP == "precise_divf":
        r = tl.math.div_rn(x, y)
    elif OP == "precise_divf_constant":
        r = tl.math.div_rn(x, 448.0)
    elif OP == "exp":
        r = tl.exp(x)
    elif OP == "exp2":
        r = tl.exp2(x)
    elif OP == "log2":
        r = tl.log2(x)
    elif OP == "floor":
        r = tl.floor(x)
    elif OP == "ceil":
        r = tl.ceil(x)
    elif OP == "__nv_expf":
        r = libdevice.exp(x)
    elif OP == "maxnumf":
        r = tl.maximum(x, y)
    elif OP == "minnumf":
        r = tl.minimum(x, y)
    elif OP == "maximumf":
        r = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "minimumf":
        r = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "clampf":
        r = tl.clamp(x, y, z)
    elif OP == "clampf_symmetric":
        r = tl.clamp(x, -448.0, 448.0)
    elif OP == "clampf_nan":
        r = tl.clamp(x, y, z, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "clampf_nan_symmetric":
        r = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "fcmpOLT":
        r = tl.where(x < y, 1, 0)
    elif OP == "fcmpOLE":
        r = tl.where(x <= y, 1, 0)
    elif OP == "fcmpOGT":
        r = tl.where(x > y, 1, 0)
    elif OP == "fcmpOGE":
        r = tl.where(x >= y, 1, 0)
    elif OP == "fcmpOEQ":
        r = tl.where(x == y, 1, 0)
    elif OP == "fcmpUNE":
        r = tl.where(x != y, 1, 0)
    else:
        tl.static_assert(OP == "cast")
        r = x.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + i, r)
