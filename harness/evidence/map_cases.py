"""On which case a kernel is mapped, and in which configurations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from moe_parity.harness.cases.sequences import bases, with_rows
from moe_parity.harness.checks.configs import configurations
from moe_parity.kernels import Kernel
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.errors import ParityError
from moe_parity.references.language import (
    Case,
    InputDtype,
    ScaleFormat,
    ScaleLayout,
    Values,
    parse_id,
)

MOST = {"cpu": 129, "cuda": 1025}
"""Device type -> up to how many tokens a map goes where nobody says it."""
AIMED = {
    "act_quant": Case(h=512),
    "fc1": Case(e=4, k=2, h=256, i=128),
    "fc2": Case(e=4, k=2, h=128, i=256),
    "swiglu": Case(e=4, i=256),
    "swiglu_quant": Case(e=4, i=256),
    "combine": Case(e=8, k=4, h=256),
    "layer": Case(e=4, k=2, h=256, i=256),
}
"""Stage -> a case that is cheap for each token, and has K in two halves that cancel."""


def case_of(kernel: Kernel, device: str, words: str | None, most: int | None, seed: int) -> Case:
    """Return the case of a map with all tokens: of some words, else one that tells decisions.

    Raises ParityError for words that are no case's, for a case that the kernel does not take, and
    for a stage whose rows cannot be called alone.
    """
    small = next(kernel.stage.witness_cases(), Case())
    if not kernel.stage.units(kernel.stage.inputs(small)):
        raise ParityError(f"{kernel.stage} of {kernel.name} has no rows that can be called alone.")
    if words is not None:
        first, case = parse_id(f"{kernel.name}-{words}", seed)
        if first != kernel.name:
            raise ParityError(f"--case {words!r}: it begins with a scale format, fp32-m64-h512.")
        said = case.m if any(w[:1] == "m" and w[1:].isdecimal() for w in words.split("-")) else None
        case = _with(kernel, case, most or said or MOST[device])
        reason = kernel.declines(case, device)
        if reason is not None:
            raise ParityError(f"{kernel.name} does not take {case.id}: {reason}")
        return case
    wanted = most or MOST[device]
    # some kernels take whole tiles of rows alone
    for count, base in itertools.product(
        (wanted, -(-wanted // BLOCK) * BLOCK), _cases(kernel, device)
    ):
        case = _with(kernel, dataclasses.replace(base, seed=seed), count)
        if kernel.declines(case, device) is None:
            return case
    raise ParityError(f"{kernel.name} takes no case of {kernel.stage} here; say one with --case.")


def _with(kernel: Kernel, case: Case, most: int) -> Case:
    """Return a case of so many units: tokens, or rows of tiles of a weight."""
    rows = "m" in kernel.stage.sizes
    return with_rows(case, "m" if rows else "i", most if rows else most * BLOCK)


def _cases(kernel: Kernel, device: str) -> Iterator[Case]:
    """Yield cases, aimed ones of the usual sizes first."""
    own = AIMED.get(kernel.stage.name)
    sizes = [*([own] if own else []), *kernel.stage.witness_cases()]
    if "k" in kernel.stage.reads:
        sizes += [dataclasses.replace(size, e=1, k=1) for size in sizes]
    words = itertools.product(sizes, (None, 1.0), ScaleFormat, ScaleLayout, InputDtype)
    for size, clamp, scale, layout, dtype in words:
        made = dataclasses.replace(
            size, scale=scale, layout=layout, dtype=dtype, values=Values.AIMED,
            clamp=size.clamp if clamp is None else clamp,
        )  # fmt: skip
        if kernel.stage.refusal(made) is None:
            yield made
    yield from bases(kernel, device)


def names_of(kernel: Kernel, case: Case, device: str, wanted: Sequence[str]) -> list[str]:
    """Return the configurations to map by name, one empty name where there is one only.

    Raises ParityError, listing those that there are, for a name that is none of them.
    """
    swept = [one.registered for one in configurations(kernel, case, device) if one.registered]
    known = [*swept, *kernel.stored(case, device)]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        names = ", ".join(known) or "one only"
        raise ParityError(f"{kernel.name} has no configuration {unknown[0]!r}; it has {names}.")
    return list(dict.fromkeys(wanted)) or known or [""]
