"""vLLM's Triton kernels and the functions that launch them, taken from the package's own files.

Importing vllm would pull in all of its dependencies.  A kernel refers to Triton's language alone
and a launcher to a few names besides, so chosen functions are compiled from the file, at their own
lines, in a namespace of our making, with the functions and constants of that file which they use;
nothing else of the file runs.  What they use of other files is stood in for, and refused when used.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_parity.kernels.call import Allocator, CannotCall
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.errors import ParityError

PLATFORM = SimpleNamespace(
    is_cuda=lambda: True,
    is_rocm=lambda: False,
    is_fp8_fnuz=lambda: False,
    is_device_capability=lambda capability: capability == 90,
    fp8_dtype=lambda: torch.float8_e4m3fn,
)
"""What vLLM's ``current_platform`` says on an H200."""


class Launchable:
    """``kernel[grid](...)`` as vLLM writes it, on the real GPU or the virtual one.

    vLLM says nothing of contraction, and Triton's default is to contract.
    """

    def __init__(self, kernel: Any) -> None:
        """Wrap a JIT function."""
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return the launch over ``grid``."""

        def launch(*args: Any, **options: Any) -> None:
            dispatch(self.kernel, grid, *args, **{"enable_fp_fusion": True, **options})

        return launch


class File:
    """Chosen functions of one file."""

    def __init__(self, path: Path, names: tuple[str, ...], given: Mapping[str, Any]) -> None:
        """Compile ``names`` and what they use; launchers see ``given`` besides torch and triton.

        Raises ParityError where the file is missing or lacks a name.
        """
        if not path.is_file():
            raise ParityError(f"{path} does not exist: is this vLLM?")
        body = ast.parse(path.read_text()).body
        found = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        missing = [name for name in names if name not in found]
        if missing:
            raise ParityError(f"{path} has no function {missing[0]}; this version lacks it.")
        constants = {name: node for node in body for name in _assigned(node)}
        used = _used(names, found, constants, given)
        kernels = [found[n] for n in used if n in found and _is_kernel(found[n])]
        # Only the innermost namespace of kernels: Triton reads their globals for its cache key.
        inside: dict[str, Any] = {
            "triton": triton,
            "tl": tl,
            "__name__": f"vllm_source_{path.stem}",
        }
        self.names: dict[str, Any] = {
            "torch": torch, "triton": triton, "tl": tl, "math": math, "functools": functools,
        }  # fmt: skip
        for name in used:
            if name in constants:
                self._define(constants[name], name, path, inside)
        _execute(kernels, path, inside, annotations=False)
        self.names |= {node.name: Launchable(inside[node.name]) for node in kernels}
        self.names |= dict(given)
        for name in used:
            if name not in found and name not in self.names and not hasattr(builtins, name):
                self.names[name] = Elsewhere(name, path)
        functions = [found[n] for n in used if n in found and not _is_kernel(found[n])]
        _execute(functions, path, self.names, annotations=True)

    def _define(self, node: ast.stmt, name: str, path: Path, inside: dict[str, Any]) -> None:
        """Define a constant, for kernels too, unless it needs what is not here."""
        with suppress(NameError, AttributeError):
            _execute([node], path, self.names, annotations=True)
            inside[name] = self.names[name]

    def __getattr__(self, name: str) -> Any:
        """Return a function of the file."""
        try:
            return self.names[name]
        except KeyError:
            raise AttributeError(name) from None

    @contextmanager
    def allocating(self, new: Allocator, *names: str) -> Iterator[None]:
        """Take what launchers ask of ``torch.empty`` from ``new``, called ``names`` in order."""
        order = iter(names)

        def empty(*shape: Any, dtype: torch.dtype, device: Any = None) -> Tensor:
            sizes = tuple(shape[0]) if isinstance(shape[0], tuple) else shape
            strides = [math.prod(sizes[n + 1 :]) for n in range(len(sizes))]
            return new(next(order), sizes, tuple(strides), dtype)

        members = {name: getattr(torch, name) for name in dir(torch)} | {"empty": empty}
        self.names["torch"] = SimpleNamespace(**members)
        try:
            yield
        finally:
            self.names["torch"] = torch


class Elsewhere:
    """A name that a launcher uses and that is neither of its file nor given: refused when used."""

    def __init__(self, name: str, path: Path) -> None:
        """Stand for ``name`` in the functions of a file."""
        self.said = (
            f"vLLM's {path.name} now uses {name}, which the adapter does not stand in for; "
            f"expected only what {path} defines itself."
        )

    def __getattr__(self, name: str) -> Any:
        """Refuse a member."""
        raise CannotCall(self.said)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse a call."""
        raise CannotCall(self.said)

    def __getitem__(self, key: Any) -> Any:
        """Refuse a launch."""
        raise CannotCall(self.said)

    def __bool__(self) -> bool:
        """Refuse a condition."""
        raise CannotCall(self.said)


def _assigned(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module assigns."""
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _used(
    names: tuple[str, ...], found: Mapping[str, ast.FunctionDef],
    constants: Mapping[str, ast.stmt], given: Mapping[str, Any],
) -> list[str]:  # fmt: skip
    """Return the names that some functions use, and those that these use, in no order."""
    todo, seen = list(names), dict.fromkeys(names)
    while todo:
        name = todo.pop()
        node = constants.get(name) or found.get(name)
        if node is None or name in given:
            continue
        for part in node.body if isinstance(node, ast.FunctionDef) else [node]:
            for inner in ast.walk(part):
                if isinstance(inner, ast.Name) and inner.id not in seen:
                    seen[inner.id] = None
                    todo.append(inner.id)
    return list(seen)


def _is_kernel(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)


def _execute(
    functions: Sequence[ast.stmt], path: Path, names: dict[str, Any], *, annotations: bool
) -> None:
    """Define functions; with ``annotations`` their annotations are not evaluated."""
    flags = __future__.annotations.compiler_flag if annotations else 0
    body: list[ast.stmt] = list(functions)
    code = compile(
        ast.Module(body=body, type_ignores=[]), str(path), "exec", flags=flags, dont_inherit=True
    )
    exec(code, names)
