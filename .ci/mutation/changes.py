"""Small changes in the text of a module: cosmic-ray makes them, here they get names and places."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any


class Refusal(Exception):
    """Bad input: the text is a sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Lines of a module and what stands in their place.

    Both are known by their text, so that a session or a list of equivalent changes outlives changes
    elsewhere in the module; ``nth`` counts the places with the same lines from 0.
    """

    module: str
    operator: str
    line: str
    nth: int
    becomes: str

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """Return what it is known by, blanks apart."""
        return self.module, self.operator, squeeze(self.line), self.nth, squeeze(self.becomes)


def squeeze(text: str) -> str:
    """Return text with one blank, or none, for every run of blanks."""
    return re.sub(r"(?<=\W) | (?=\W)", "", " ".join(text.split()))


def places(lines: Sequence[str], text: str) -> list[int]:
    """Return the numbers, from 0, of the first lines of every place that has this text."""
    wanted = [line.strip() for line in text.split("\n")]
    bare = [line.strip() for line in lines]
    return [i for i in range(len(bare)) if bare[i : i + len(wanted)] == wanted]


def change(module: str, operator: str, old: str, new: str) -> Change:
    """Return how two texts of a module differ, whole lines of it."""
    a, b = old.split("\n"), new.split("\n")
    head = 0
    while head < min(len(a), len(b)) and a[head] == b[head]:
        head += 1
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    line = "\n".join(a[head : len(a) - tail])
    nth = places(a, line).index(head)
    return Change(module, operator, line, nth, "\n".join(b[head : len(b) - tail]))


def apply(made: Change, source: str) -> tuple[str, int]:
    """Return the changed text of a module and the number, from 1, of the line that changed."""
    lines = source.split("\n")
    found = places(lines, made.line)
    if len(found) <= made.nth:
        raise Refusal(
            f"{made.module} has {made.line.strip()!r} {len(found)} times, the session changes the "
            f"place with number {made.nth}: the module was edited since; make a new session."
        )
    at, size = found[made.nth], made.line.count("\n") + 1
    return "\n".join([*lines[:at], made.becomes, *lines[at + size :]]), at + 1


def words_only(leaf: Any) -> bool:
    """Say whether a place of a tree is an annotation, a decorator, a message or an f-string."""
    while leaf.parent is not None:
        parent = leaf.parent
        if leaf.type in ("fstring", "decorator", "raise_stmt", "tfpdef", "import_from"):
            return True
        if parent.type == "funcdef" and leaf is parent.annotation:
            return True
        if parent.type == "annassign" and leaf is parent.children[1]:
            return True
        leaf = parent
    return False


def compiles(text: str) -> bool:
    """Say whether Python takes a text without an error and without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            compile(text, "mutant", "exec")
        except (SyntaxError, ValueError):
            return False
    return True


def mutants(module: str, source: str, excluded: re.Pattern[str]) -> Iterator[Change]:
    """Yield every change that cosmic-ray makes in a module, each text once."""
    try:
        from cosmic_ray.ast import ast_nodes, get_ast
        from cosmic_ray.plugins import get_operator, operator_names
    except ImportError:
        raise Refusal("init needs cosmic-ray: pip install -e '.[mutation]'.") from None
    tree, seen = get_ast(source), {source}
    # An operator changes the tree that it is given, and a copy is made faster than parsed.
    pickled, nodes = pickle.dumps(tree), list(ast_nodes(tree))
    for name in operator_names():
        kind = get_operator(name)
        if excluded.search(name) or kind.arguments():
            continue
        operator = kind()
        for number, node in enumerate(nodes):
            for index, (start, _) in enumerate(operator.mutation_positions(node)):
                if words_only(tree.get_leaf_for_position(start)):
                    continue
                copy = pickle.loads(pickled)
                old = next(itertools.islice(ast_nodes(copy), number, None))
                parent, new = old.parent, operator.mutate(old, index)
                if new is not old:
                    parent.children[parent.children.index(old)] = new
                text = copy.get_code()
                if text not in seen and compiles(text):
                    yield change(module, name, source, text)
                seen.add(text)


def sample(groups: dict[str, list[Change]], size: int | None, rng: random.Random) -> list[Change]:
    """Return ``size`` changes, of every module its share but at least one, in a drawn order."""
    drawn = {module: rng.sample(found, len(found)) for module, found in groups.items()}
    total = sum(map(len, drawn.values()))
    if size is not None and size < total:
        for module, found in drawn.items():
            drawn[module] = found[: max(1, round(size * len(found) / total))]
    every = [made for found in drawn.values() for made in found]
    return rng.sample(every, len(every))
