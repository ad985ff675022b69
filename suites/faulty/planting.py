"""How a fault is planted: a stage's own reference, wrong under a condition, as a kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels import Call, Kernel
from moe_parity.references.arithmetic.formats import bits_of, pack_ue8m0
from moe_parity.references.language import Case, Recipe
from moe_parity.references.recipes.ours import NO_ROUNDING, OURS
from moe_parity.suites.planted import Run, kernel_of

Outputs = dict[str, Tensor]
REGISTERED = Path(__file__).with_name("registered.py")
"""The file that registers them all: another process finds a kernel there."""
When = Callable[[Call], bool]
Given = Callable[[Call], Any]
"""Returns the inputs that the kernel computes from, in place of the call's."""
Edit = Callable[[Call, Outputs], Outputs]
"""Changes what is right."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A kernel with one fault, and what a red check has to say of it."""

    name: str
    """Of the kernel."""
    kinds: tuple[str, ...]
    """Kinds of faults (``kinds.KINDS``) that it is an instance of."""
    kernel: Kernel
    causes: frozenset[str]
    """One of these names is the cause, or what explains the same bits."""
    words: str
    """What it does wrong, in a line."""

    @property
    def stage(self) -> str:
        """The name of its stage."""
        return self.kernel.stage.name

    def named(self, causes: tuple[str, ...]) -> bool:
        """Whether a red verdict's causes name it; two changed decisions are one name."""
        parts = {part for cause in causes for part in (cause, *cause.split(" and "))}
        return bool(parts & self.causes)


def fault(
    name: str,
    kinds: str,
    stage: str,
    run: Run,
    causes: str,
    words: str,
    *,
    recipe: Recipe | None = None,
    **options: Any,
) -> Fault:
    """Return a fault; ``kinds`` and ``causes`` are words with blanks between them."""
    plain = kernel_of(stage, run, recipe)
    kernel = dataclasses.replace(plain, name=name, note=words, source=REGISTERED, **options)
    return Fault(
        name=name,
        kinds=tuple(kinds.split()),
        kernel=kernel,
        causes=frozenset(causes.split()),
        words=words,
    )


def recipe_of(call: Call) -> Recipe:
    """Return what a planted kernel follows."""
    return NO_ROUNDING if call.stage.name in ("align", "permute") else OURS


def with_parts(**changes: Mapping[str, Any]) -> Recipe:
    """Return our recipe with some fields of its parts changed."""
    parts = {name: dataclasses.replace(OURS.parts[name], **own) for name, own in changes.items()}
    return OURS.with_parts(**parts)


def always(call: Call) -> bool:
    """Hold for every call."""
    return True


def case_is(test: Callable[[Case], bool]) -> When:
    """Hold where a case has a property."""
    return lambda call: test(call.case)


def right(call: Call, given: Any = None, recipe: Recipe | None = None, **words: Any) -> Outputs:
    """Return what a recipe says, on other inputs or for another case where they are given."""
    case = dataclasses.replace(call.case, **words)
    inputs = call.inputs if given is None else given
    return dict(call.stage.reference(case, inputs, recipe or recipe_of(call)))


def written(
    call: Call, made: Mapping[str, Tensor], left: Mapping[str, slice] | None = None
) -> Outputs:
    """Return outputs in memory of the call, in the formats and layouts of its case.

    Rows of ``left`` are left as they were.
    """
    outputs, done = call.outputs, {}
    for name, value in made.items():
        output = outputs[name]
        packed = output.dtype is torch.int32 and value.is_floating_point()
        if packed:
            done[name] = call.new(name)
            value = pack_ue8m0((bits_of(value) >> 23 & 0xFF).to(torch.uint8))
        else:
            shape = tuple(value.shape)
            strides = output.strides if shape == output.shape else None
            done[name] = call.new(name, shape, strides, value.dtype)
        keep = torch.ones(len(value), dtype=torch.bool)
        keep[(left or {}).get(name, slice(0, 0))] = False
        done[name][keep] = value[keep]
    return done


def given(call: Call, **inputs: Any) -> Any:
    """Return the call's inputs with some of them replaced."""
    return dataclasses.replace(call.inputs, **inputs)


def wrong(
    when: When = always,
    *,
    given: Given | None = None,
    edit: Edit | None = None,
    recipe: Recipe | None = None,
    **words: Any,
) -> Run:
    """Return a kernel that is right, and wrong where ``when`` holds.

    There it computes from other inputs, follows another recipe, takes other words of the case, or
    changes what is right, as said.
    """

    def run(call: Call) -> Any:
        bad = when(call)
        own = given(call) if bad and given else call.inputs
        made = right(call, own, recipe if bad else None, **(words if bad else {}))
        made = edit(call, made) if bad and edit else made
        return written(call, made)

    return run


def unwritten(when: When, rows: Callable[[Call, int], slice]) -> Run:
    """Return a kernel that leaves some rows of its last output as they were."""

    def run(call: Call) -> Any:
        made = right(call)
        name, value = list(made.items())[-1]
        return written(call, made, {name: rows(call, len(value))} if when(call) else None)

    return run


def layer_with(call: Call, **changes: Mapping[str, Any]) -> Any:
    """Return a layer's inputs with fields of its batch, experts or asked replaced."""
    own = {n: dataclasses.replace(getattr(call.inputs, n), **c) for n, c in changes.items()}
    return dataclasses.replace(call.inputs, **own)
