"""What rewritten kernels and a few names of Triton's language mean: ``and``, ``range``, ``reduce``.

The compiler gives these their meaning from the source text, so they are no builtins that could be
handed a semantic; each function here does what the compiler's visitor of that node does.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic

from moe_parity.kernels.virtual_gpu import abreast, reduce
from moe_parity.kernels.virtual_gpu.errors import unmodelled
from moe_parity.kernels.virtual_gpu.values import Value, numpy_type

_ALIKE = {id(ty) for ty in (tl.int32, tl.int64, tl.float32)}
"""Types that an operation on two of them leaves as they are."""
_SIGNED = {id(ty) for ty in (tl.int32, tl.int64)}
"""Types that any whole number of 32 bits beside them takes."""


class _Semantic(TritonSemantic):  # type: ignore[misc]  # Triton has no types
    """Triton's type rules, with shortcuts where they change nothing: most operations are such."""

    def cast(self, input: Any, dst_ty: Any, *how: Any, **named: Any) -> Any:  # noqa: A002
        if input.dtype is dst_ty.scalar:
            return input
        return super().cast(input, dst_ty, *how, **named)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left is right or (left.is_block() and right.is_block() and left.shape is right.shape):
            return lhs, rhs
        return super().broadcast_impl_value(lhs, rhs)

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *how: Any, **named: Any) -> Any:
        left, right = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if left and right:
            same = lhs.type is rhs.type or lhs.type == rhs.type
            if same and id(lhs.dtype) in _ALIKE:
                return lhs, rhs
        elif left and _whole(rhs) and id(lhs.dtype) in _SIGNED:
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        elif right and _whole(lhs) and id(rhs.dtype) in _SIGNED:
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return super().binary_op_type_checking_impl(lhs, rhs, *how, **named)


def _whole(number: Any) -> bool:
    return type(number) is int and -(2**31) <= number < 2**31


SEMANTIC = _Semantic(None)
"""Type rules and broadcasting are Triton's own; its builder is that of the launch."""


def unwrap(value: Any) -> Any:
    """Return the Python value of a constexpr, anything else as it is."""
    return value.value if isinstance(value, tl.constexpr) else value


class Helpers:
    """The calls that ``rewrite`` puts in place of Python's syntax."""

    @staticmethod
    def assigned(value: Any) -> Any:
        """Make Python numbers tensors, as an assignment does."""
        value = unwrap(value)
        if isinstance(value, tl.core.tuple):
            return tl.core.tuple([Helpers.assigned(v) for v in value])
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(Helpers.assigned(v) for v in value)
        return SEMANTIC.to_tensor(value) if isinstance(value, (bool, int, float)) else value

    @staticmethod
    def truth(value: Any) -> bool:
        """Return a condition, which must be a scalar."""
        value = unwrap(getattr(value, "condition", value))
        if isinstance(value, tl.tensor) and value.type.is_block():
            raise TypeError(
                f"a condition has shape {[unwrap(n) for n in value.shape]}, and Triton takes "
                "scalars only: reduce it, or use tl.where."
            )
        if isinstance(value, tl.tensor):
            SEMANTIC.builder.block += 1
        return bool(value)

    @staticmethod
    def negated(value: Any) -> Any:
        """``not``."""
        value = unwrap(value)
        return SEMANTIC.not_(value) if isinstance(value, tl.tensor) else not value

    @staticmethod
    def all_of(first: Any, *rest: Callable[[], Any]) -> Any:
        """``and``."""
        return _joined(SEMANTIC.logical_and, False, first, *rest)

    @staticmethod
    def any_of(first: Any, *rest: Callable[[], Any]) -> Any:
        """``or``."""
        return _joined(SEMANTIC.logical_or, True, first, *rest)

    @staticmethod
    def asserted(condition: Any, message: Any) -> None:
        """``assert``."""
        value = unwrap(condition)
        if not (value.handle.data.all() if isinstance(value, tl.tensor) else value):
            raise AssertionError(f"an assert failed: {unwrap(message)}")

    @staticmethod
    def unsupported_chain() -> NoReturn:
        """Refuse a chained comparison whose middle operand is an expression."""
        unmodelled("a chained comparison of expressions (write it as two joined by `and`)")


def _joined(join: Callable[..., Any], decided: bool, first: Any, *rest: Callable[[], Any]) -> Any:
    """Join operands; a Python value decides at compile time, a tensor is always evaluated."""
    value = unwrap(first)
    for operand in rest:
        if not isinstance(value, tl.tensor):
            if bool(value) is decided:
                return value
            value = unwrap(operand())
        else:
            value = join(value, SEMANTIC.to_tensor(unwrap(operand())))
    return value


def _range(*bounds: Any, **keywords: Any) -> Iterator[Any]:
    """``range`` and ``tl.range``: a loop variable is a tensor of the bounds' integer type."""
    named = [keywords[n] for n in ("arg1", "arg2", "step") if keywords.get(n) is not None]
    tensors = [SEMANTIC.to_tensor(unwrap(b)) for b in (*bounds, *named)]
    ty = tensors[0].dtype
    for t in tensors[1:]:
        ty = SEMANTIC.integer_promote_impl(ty, t.dtype)
    data = [t.handle.data.astype(np.int64) for t in tensors]
    start, stop = data[:2] if len(data) > 1 else (np.zeros(1, np.int64), data[0])
    step = data[2] if len(data) > 2 else np.ones(1, np.int64)
    for i in abreast.steps(start, stop, step):
        SEMANTIC.builder.block += 1
        yield tl.tensor(Value(i.astype(numpy_type(ty)), ty), ty)
    SEMANTIC.builder.block += 1


def _static_range(*bounds: Any, **keywords: Any) -> range:
    """``tl.static_range``: unrolled, its variable is a Python integer."""
    named = [keywords[n] for n in ("arg1", "arg2", "step") if keywords.get(n) is not None]
    return range(*(int(unwrap(b)) for b in (*bounds, *named)))


def _static_assert(condition: Any, message: Any = "", **_: Any) -> None:
    if not unwrap(condition):
        raise AssertionError(f"a static_assert failed: {unwrap(message)}")


def _hint(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _reduce(inputs: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    return reduce.reduce(SEMANTIC.builder, inputs, axis, combine_fn, keep_dims)


def _scan(inputs: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
    return reduce.scan(inputs, axis, combine_fn, reverse)


def _least_or_most(name: str) -> Callable[..., Any]:
    """``min`` and ``max``: Python's on numbers, Triton's on tensors."""
    original, on_tensors = getattr(builtins, name), getattr(tl.core, f"builtin_{name}").__wrapped__

    def function(*arguments: Any, **keywords: Any) -> Any:
        if any(isinstance(a, tl.tensor) for a in arguments):
            return on_tensors(*arguments, **keywords, _semantic=SEMANTIC)
        return original(*map(unwrap, arguments), **keywords)

    return function


def _element(tensor: Any) -> Any:
    size = tensor.handle.data[0].size
    if size != 1:
        raise TypeError(f"a block of {size} elements is no Python number.")
    return abreast.common(tensor.handle.data.reshape(-1))[0]


def _is_set(tensor: Any) -> bool:
    """Triton's own code asks whether an optional block was given; a scalar answers for itself."""
    data = tensor.handle.data
    # programs go on together where their answers are equal, whatever their numbers are
    return data[0].size != 1 or bool(abreast.common(data.reshape(-1) != 0)[0])


BUILTINS = {"range": _range, "min": _least_or_most("min"), "max": _least_or_most("max")}
"""Python's builtins that mean something else inside a kernel."""

LANGUAGE = {
    "range": _range,
    "static_range": _static_range,
    "static_assert": _static_assert,
    "static_print": print,
    "multiple_of": _hint,
    "max_contiguous": _hint,
    "max_constancy": _hint,
    "reduce": _reduce,
    "associative_scan": _scan,
}
"""Names of ``triton.language`` that the compiler treats on its own."""

TENSOR = {
    "__index__": _element,
    "__bool__": _is_set,
    "__repr__": lambda tensor: f"{tensor.type}{tensor.handle.data[0]}",
    "T": property(lambda tensor: SEMANTIC.permute(tensor, (1, 0))),
    "reduce": _reduce,
    "associative_scan": _scan,
}
"""Members of ``tl.tensor`` that have no meaning of their own."""
