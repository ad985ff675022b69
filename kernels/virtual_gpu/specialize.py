"""What Triton would compile a launch for: the forms of its arguments, without compiling anything.

An integer is compiled in where it is 1 and known as divisible where 16 divides it, a pointer where
its address is, unless ``do_not_specialize`` says otherwise; constexprs and options are compiled in.
The rules are those of the installed Triton: its own binder says the forms.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from moe_parity.kernels.virtual_gpu.lowering import TARGET
from moe_parity.kernels.virtual_gpu.record import Launch

Forms = dict[str, str]
"""Argument or option -> the form that is compiled for."""


@lru_cache(maxsize=256)
def _binder(kernel: Any) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))


def forms(launch: Launch) -> Forms:
    """Return the form of every argument and option of a launch; the same forms, the same binary."""
    options = {"debug": False, "enable_fp_fusion": False, **launch.options}
    _, found, rest = _binder(launch.kernel)(*launch.args, **options)
    named = {
        parameter.name: repr(form)
        for parameter, form in zip(launch.kernel.params, found, strict=True)
    }
    return named | {name: repr(value) for name, value in rest.items()}


def integers(launch: Launch) -> set[str]:
    """Return the arguments of a launch that are integers at run time."""
    given = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.options
    return {
        parameter.name
        for parameter in launch.kernel.params
        if not parameter.is_constexpr and type(given.get(parameter.name)) is int
    }
