"""Contraction: which products and additions become one FMA when a launch allows it.

Triton's default lets LLVM contract: an addition whose operand is a product in the same stretch of
straight-line code becomes ``fma.rn``, on this target also where the product has other uses.  What
is not certain raises: a sum of two products, a difference, a product that was reshaped or computed
before a branch or in another iteration.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from moe_parity.kernels.virtual_gpu.errors import UnmodelledOperation
from moe_parity.kernels.virtual_gpu.values import Product, Value

_ROUNDED = re.compile(r"\b(add|sub|mul)\.rn\.")
_ADDS = re.compile(r"\b(add|sub)\.[\w.]+ \w+, ([^;]*, )?[abc]\b")
"""An addition of an operand itself, among the instructions of a longer operation."""


def check(op: str, plain: str, contracted: str) -> None:
    """Raise where an operation by itself compiles to other instructions under contraction."""
    if _ROUNDED.sub(r"\1.", plain) != _ROUNDED.sub(r"\1.", contracted):
        raise UnmodelledOperation(
            f"{op} compiles to `{contracted}` where contraction is allowed and to `{plain}` where "
            "not, and only the second has a model: launch with enable_fp_fusion=False."
        )


def mark(op: str, text: str, arguments: Sequence[Value], result: Value, block: int) -> None:
    """Note on ``result`` that it is a product; raise where a product meets a hidden addition."""
    if op == "fmul":
        left, right = arguments
        result.product = Product((left, right), block)
    elif text.rsplit("; ", 1)[-1].startswith("mul."):
        result.product = Product(None, block)
    if op not in ("fadd", "fsub", "fma") and _ADDS.search(text):
        for value in arguments:
            if value.product is not None:
                _refuse(f"a product that enters {op}")


def addition(a: Value, b: Value, block: int) -> tuple[Value, Value, Value] | None:
    """Return the operands of the FMA that ``a + b`` becomes, or None."""
    if a.product is None and b.product is None:
        return None
    if a.product is not None and b.product is not None:
        _refuse("a sum of two products")
    value, other = (a, b) if a.product is not None else (b, a)
    product = value.product
    assert product is not None
    if product.factors is None or product.block != block or not value.dtype.is_fp32():
        _refuse("a product that was reshaped, cast or computed elsewhere, and then added")
    return *product.factors, other


def refuse(a: Value, b: Value) -> None:
    """Raise for a difference with a product."""
    if a.product is not None or b.product is not None:
        _refuse("a difference with a product")


def _refuse(what: str) -> NoReturn:
    raise UnmodelledOperation(
        f"{what}: whether it is contracted into an FMA is not modelled; launch with "
        "enable_fp_fusion=False, or write tl.fma."
    )
