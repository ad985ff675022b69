"""The shortcuts of the virtual GPU, beside Triton's own type rules and constructors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux only")
import triton.language as tl
from triton.language.semantic import TritonSemantic

from moe_parity.kernels.virtual_gpu import language
from moe_parity.kernels.virtual_gpu.builder import VirtualBuilder
from moe_parity.kernels.virtual_gpu.meaning import SEMANTIC, unwrap
from moe_parity.kernels.virtual_gpu.memory import Memory
from moe_parity.kernels.virtual_gpu.values import Value, numpy_type
from moe_parity.references.chips.hopper import WGMMA_FP8

TYPES = (tl.int1, tl.int8, tl.int32, tl.int64, tl.uint32, tl.float32)
NUMBERS = (0, 1, -1, 127, 128, 2**31 - 1, 2**31, -(2**31) - 1, 2**40, True, 1.5)


def operands() -> Iterator[Any]:
    """Yield numbers, and a scalar and two blocks of each type."""
    yield from NUMBERS
    for ty in TYPES:
        for shape in ([1], [4], [2, 4]):
            whole = ty if shape == [1] else tl.block_type(ty, shape)
            yield tl.tensor(Value(np.ones(shape, numpy_type(ty)), ty), whole)


def outcome(rules: TritonSemantic, left: Any, right: Any, divides: bool) -> Any:
    """Return all that can be seen of two operands once they fit, or what is raised."""
    try:
        both = rules.binary_op_type_checking_impl(left, right, False, False, True, divides)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return [
        (str(one.type), str(one.dtype), [unwrap(n) for n in one.shape], unwrap(one.numel),
         one.handle.data.tolist(), one.handle.data.dtype, one.handle.constant, one.handle.dtype)
        for one in both
    ]  # fmt: skip


@pytest.mark.parametrize("divides", [False, True])
def test_shortcuts_change_nothing_of_tritons_type_rules(divides: bool):
    builder = VirtualBuilder(
        Memory("none", []), num_warps=4, read_unit=lambda: WGMMA_FP8, compiling=language.compiling,
        lanes=np.arange,
    )  # fmt: skip
    own = TritonSemantic(builder)
    every = list(operands())
    numbers = 0
    with language.active(builder):
        for left in every:
            for right in every:
                if not isinstance(left, tl.tensor) and not isinstance(right, tl.tensor):
                    continue
                got = outcome(SEMANTIC, left, right, divides)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(tl.tensor, "__init__", language._make)
                    patch.setattr(tl.block_type, "with_element_ty", language._with)
                    want = outcome(own, left, right, divides)
                assert got == want, (left, right)
                numbers += isinstance(got, list)
    assert numbers > 100
