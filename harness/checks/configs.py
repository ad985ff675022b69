"""The check ``configs``: every configuration of a kernel has the bits of a recipe.

An autotuner takes whichever configuration is fastest, on this machine, today: what it may take has
to be right.  Configurations are those that a kernel registered, and those of the autotuners that
it launches.  Where one recipe is known, all have the same bits; where tiles decide between several,
each follows one of them, and the verdict says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

from moe_parity.harness.calling.run import run
from moe_parity.harness.cases.budget import skip_of
from moe_parity.harness.cases.sequences import base_of, with_rows
from moe_parity.harness.cases.sweep import widened
from moe_parity.harness.checks.flow import BROKEN, bits
from moe_parity.harness.checks.verdict import Verdict, found
from moe_parity.kernels import Kernel
from moe_parity.kernels.choice import choosing
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Check, Values

ROWS = (40, 17, 65, 129)
"""Rows above the edges at which tiles change, what tells most first."""
WIDE = 384
"""Columns of the cases: more blocks of K than one tile takes, and no multiple of two."""
COST = 150
"""What one case may cost the virtual GPU with all configurations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """One configuration of a kernel on a case."""

    name: str
    registered: str | None = None
    tuned: int | None = None

    def chosen(self) -> AbstractContextManager[object]:
        """Return a context in which calls take it."""
        return choosing(registered=self.registered, tuned=self.tuned)

    @property
    def option(self) -> str:
        """What ``parity repro --config`` takes for it."""
        return self.registered or str(self.tuned)


def configurations(kernel: Kernel, case: Case, device: str) -> list[Configuration]:
    """Return the configurations of a kernel on a case; it is called once, to meet autotuners."""
    every = [Configuration(name=name, registered=name) for name in kernel.configs(case, device)]
    with choosing(tuned=0) as choice, suppress(*BROKEN):
        run(kernel, case, kernel.stage.inputs(case, device))
    for n in range(max(map(len, choice.met.values()), default=0)):
        words = {name: names[n % len(names)] for name, names in choice.met.items()}
        several = [f"{said} of {name}" for name, said in words.items() if len(choice.met[name]) > 1]
        if several:
            every.append(Configuration(name=" and ".join(several), tuned=n))
    return every


def chosen_by(
    kernel: Kernel, case: Case, device: str, wanted: str | None
) -> AbstractContextManager[object]:
    """Return a context for a configuration by its name, or by its number counted from 0.

    Raises ParityError, listing the configurations, where there is no such one.
    """
    if wanted is None:
        return nullcontext()
    known = configurations(kernel, case, device)
    for n, one in enumerate(known):
        if wanted in (one.name, one.registered) or (
            one.registered is None and wanted == str(one.tuned)
        ) or wanted == str(n):  # fmt: skip
            return one.chosen()
    names = ", ".join(one.name for one in known) or "one only"
    raise ParityError(
        f"{kernel.name} has no configuration {wanted!r} on {case.id}; it has {names}."
    )


def edges(kernel: Kernel, device: str, seed: int = 0) -> list[Case]:
    """Return a small case of a kernel, and such with more rows as the budget has room for."""
    base = base_of(kernel, device)
    if base is None:
        return []
    base = dataclasses.replace(base, seed=seed)
    word = "m" if "m" in kernel.stage.sizes else "i"
    few = base.m if word == "m" else base.i
    columns = [one for one in ("h", "i") if one in kernel.stage.sizes and one != word]
    count, left = max(len(kernel.configs(base, device)), 1), float(COST)
    found: list[Case] = []
    for n, rows in enumerate((*[few] * max(len(columns), 1), *ROWS)):
        small = with_rows(base, word, rows)
        wide = widened(small, columns[n % len(columns)], WIDE) if columns else small
        tried = [dataclasses.replace(wide, values=Values.AIMED), wide, small]
        case = next((one for one in tried if _fits(kernel, one, device, left / count)), None)
        if case is not None and case not in found:
            left -= kernel.cost(case) * count
            found.append(case)
    return found or [base]


def _fits(kernel: Kernel, case: Case, device: str, most: float) -> bool:
    virtual = kernel.runs_on(device) == "virtual_gpu"
    return skip_of(kernel, case, device) is None and (not virtual or kernel.cost(case) <= most)


def configs(kernel: Kernel, case: Case, device: str) -> Iterator[Verdict]:
    """Yield a red verdict for each configuration that follows no recipe, else a green one."""
    every = configurations(kernel, case, device)
    if len(every) < 2:
        yield Verdict(check=Check.CONFIGS, verdict="skip", reason="it has one configuration")
        return
    compared, red = 0, False
    follows: dict[str, list[str]] = {}
    for one in every:
        with one.chosen():
            verdict = bits(kernel, case, device)
        if verdict.failed:
            red = True
            yield dataclasses.replace(
                verdict, check=Check.CONFIGS, config=one.option,
                message=f"configuration {one.name} of {kernel.name}: {verdict.message}",
            )  # fmt: skip
        else:
            compared += verdict.compared
            follows.setdefault(verdict.recipe, []).append(one.name)
    if not red:
        said = [f"{recipe} by {'; '.join(names)}" for recipe, names in follows.items() if recipe]
        verdict = found(Check.CONFIGS, "", compared=compared, recipe=next(iter(follows), ""))
        text = f"{len(every)} configurations follow {', '.join(said)}" if len(said) > 1 else ""
        yield dataclasses.replace(verdict, message=text)
