"""The tables of ``parity kernels`` and ``parity recipes``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moe_parity.harness.evidence.mutants import Power, mutants, power
from moe_parity.kernels import all_kernels
from moe_parity.references.language import Case, Decision, Recipe, decisions
from moe_parity.references.recipes import ALL
from moe_parity.references.stages.quant.decisions import QuantRecipe


def kernels_table() -> str:
    """Return the registered kernels: stage, recipe of the plain case, and why one cannot run."""
    rows = [("kernel", "stage", "recipe", "here", "what it is")]
    for kernel in all_kernels():
        reason = kernel.unavailable()
        names = "/".join(recipe.name for recipe in kernel.recipes(Case(), "cpu"))
        here = "no" if reason else "yes"
        row = (kernel.name, kernel.stage.name, names, here, str(reason or kernel.note))
        rows.append(row)
    guesses = dict.fromkeys(kernel.guess for kernel in all_kernels() if kernel.guess)
    return "\n".join([align(rows), *(f"recipes are those of {guess}." for guess in guesses)])


def recipes_table() -> str:
    """Return every recipe's decisions, with the number of outputs that tell its worst mutant."""
    return "\n\n".join(recipe_table(recipe) for recipe in ALL.values())


def recipe_table(recipe: Recipe) -> str:
    """Return one recipe: a line for each decision of each distinct part."""
    blocks = []
    for part in dict.fromkeys(recipe.parts.values()):
        names = ", ".join(name for name, value in recipe.parts.items() if value == part)
        if isinstance(part, QuantRecipe):
            rows: list[tuple[str, ...]] = [
                ("decision", "option", "told by", "hardest to tell from")
            ]
            rows += _rows(part)
        else:
            rows = [("decision", "option")]
            rows += [(d.name, getattr(part, f).value) for f, d in decisions(part).items()]
        blocks.append(f"{recipe.name} ({names}): {recipe.source}\n{align(rows)}")
    return "\n".join(blocks) or f"{recipe.name}: {recipe.source}"


def _rows(part: QuantRecipe) -> Iterator[tuple[str, str, str, str]]:
    told: dict[str, tuple[Power, str]] = {}
    for mutant in mutants(part):
        found = power(part, mutant)
        name = mutant.decision.name
        if name not in told or found.told.total < told[name][0].told.total:
            told[name] = (found, mutant.option.value)
    for field, decision in decisions(part).items():
        if decision.name not in told:
            yield decision.name, getattr(part, field).value, "-", "shows beside other options only"
            continue
        found, option = told[decision.name]
        where = f"{option} ({found.dtype}, {found.scale})"
        yield decision.name, getattr(part, field).value, str(found.told.total), where


def decisions_markdown(chosen: Iterable[Decision]) -> str:
    """Return the documentation of decisions, a section each: question, options, sources."""
    parts = []
    for decision in chosen:
        lines = [f"### `{decision.name}`", "", decision.question, ""]
        lines += ["| option | meaning | who |", "|---|---|---|"]
        lines += [f"| `{o.value}` | {o.meaning} | {o.source} |" for o in decision.options]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def align(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as text in columns; the last column is not padded."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)
