"""Whether a Python file still has the functions that an adapter calls, as it calls them.

The file is parsed and not run, so this needs none of what it imports.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class Wanted:
    """A function as an adapter calls it."""

    path: str
    """Its file, from the package's folder on."""
    name: str
    placed: tuple[str, ...] = ()
    """The parameters that it hands over by their place, in order."""
    named: tuple[str, ...] = ()
    """Those that it hands over by name."""
    """Without any of both the function need only be there: another one calls it."""

    @property
    def words(self) -> str:
        """The call, for sentences."""
        given = [*self.placed, *(f"{name}=" for name in self.named)]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def refusal(self, file: Path) -> str:
        """Return why the file's function cannot be called so, or nothing."""
        if not file.is_file():
            return f"{file} does not exist; expected {self.words} in it."
        try:
            found = functions(file, file.stat().st_mtime_ns).get(self.name)
        except SyntaxError as error:
            return f"{file} is no Python that can be read: {error.msg}, line {error.lineno}."
        if found is None:
            return f"{file} has no function {self.name}; expected {self.words}."
        if not self.placed and not self.named:
            return ""
        reason = self._misfit(found)
        return f"{file}: {self.name} {reason}; expected {self.words}." if reason else ""

    def _misfit(self, found: ast.FunctionDef) -> str:
        has = signature(found)
        order = [p.name for p in has.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        for at, name in enumerate(self.placed):
            if name in order and order.index(name) != at:
                return f"has {name} as parameter {order.index(name) + 1}, not {at + 1}"
        try:
            has.bind(*self.placed, **dict.fromkeys(self.named))
        except TypeError as error:
            return f"takes other parameters ({error})"
        return ""


@lru_cache(maxsize=32)
def functions(file: Path, changed: int) -> dict[str, ast.FunctionDef]:
    """Return the functions of a file by name; ``changed`` is when, so that a new text is read."""
    tree = ast.parse(file.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def signature(node: ast.FunctionDef) -> inspect.Signature:
    """Return the signature of a function that is not run: whether a parameter has a default."""
    given, kinds = node.args, inspect.Parameter
    placed = [*given.posonlyargs, *given.args]
    bare = len(placed) - len(given.defaults)
    made = [
        kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if n < bare else None)
        for n, a in enumerate(placed)
    ]
    if given.vararg:
        made.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    made += [
        kinds(a.arg, kinds.KEYWORD_ONLY, default=None if default else kinds.empty)
        for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        made.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(made)
