"""`parity new-kernel`: writes a file with a kernel of a stage that passes as it is.

The words at the top, shapes and dtypes, come from the stage's own description.  The body is a file
of ``starters``; a stage without one gets a body that returns its reference, for its author to
replace, so that a new stage needs nothing here.
"""

from __future__ import annotations

import ast
import dataclasses
import keyword
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

from torch import Tensor

from moe_parity.kernels import all_kernels
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Stage
from moe_parity.references.recipes import ALL
from moe_parity.references.stages import stage_named
from moe_parity.reports.results import write_atomic

FORMS = ("torch", "triton")
ALIKE = {"fc2": "fc1"}
"""Stages whose starter is another one's: the same fields."""
NO_TRITON = {
    "align": "its outputs are lists whose length depends on the routing, made on the host here",
    "layer": "a layer is several launches: write its stages, `--stage fc1 --form triton`, and call "
    "them from the torch form",
}
"""Stages for which a Triton form makes no sense, and why."""

SIZES = ("m", "e", "k", "h", "i")
SHOWN = Case(m=5, e=3, k=2, h=896, i=512)
"""A case whose sizes are told apart by their numbers."""
LETTERS = {
    5: "M", 3: "E", 2: "k", 10: "P", 896: "H", 512: "I", 1024: "2 * I", 7: "H / 128",
    4: "I / 128", 8: "2 * I / 128",
}  # fmt: skip
MARK = "HERE"
"""What marks the places of one's own code."""

_BY_REFERENCE = """\
from moe_parity.kernels import register
from moe_parity.references.recipes import recipe_named

# HERE: the recipe that yours follows
RECIPE = recipe_named("{recipe}")


@register(
    "NAME", stage="STAGE", recipes=RECIPE,
    supports=lambda case, device: "no packed scales." if case.scale.is_packed else None,
)  # fmt: skip
def NAME(call):
    outputs = {{name: call.new(name) for name in call.outputs}}
    # HERE: your code, which writes every output; until then the reference does
    for name, bits in call.stage.reference(call.case, call.inputs, RECIPE).items():
        outputs[name].copy_(bits)
    return outputs
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `parity new-kernel`."""

    name: str
    stage: str
    form: str = "torch"
    file: Path | None = None


def run(request: Request) -> int:
    """Write the file and say how to check it; return the exit status.

    Raises ParityError for a bad name, an unknown stage, a form that the stage does not have, and
    a file that exists or cannot be written.
    """
    text = starter(request.name, request.stage, request.form)
    file = request.file or Path(f"{request.name}.py")
    if file.suffix != ".py":
        raise ParityError(f"a kernel file ends in .py, got {file}; name another with -o.")
    if os.path.lexists(file):
        raise ParityError(f"{file} exists and is not overwritten; name another with -o.")
    write_atomic(file, text)
    print(f"{file}: your code goes where {MARK} stands; parity check --kernel {file}")
    return 0


def starter(name: str, stage: str, form: str = "torch") -> str:
    """Return the text of a kernel file; raises ParityError as :func:`run` does."""
    if not name or not set(name) <= set(ascii_lowercase + digits + "_") or name[0] in digits:
        raise ParityError(
            f"kernel name {name!r}: use lower-case letters, digits and _, a letter first."
        )
    owner = stage_named(stage)
    if form not in FORMS:
        raise ParityError(f"unknown form {form!r}; forms: {', '.join(FORMS)}.")
    body = body_of(owner, form)
    if keyword.iskeyword(name) or name in _taken(body):
        raise ParityError(f"kernel name {name!r} means something else in the file; take another.")
    if any(kernel.name == name for kernel in all_kernels()):
        raise ParityError(f"there is a kernel {name!r} already (`parity kernels`); take another.")
    body = body.replace("NAME", name).replace("STAGE", stage)
    return f'"""{head(name, owner)}"""\n\n{body}'


def body_of(stage: Stage[Any], form: str) -> str:
    """Return the part below the docstring, with NAME and STAGE to be replaced.

    Raises ParityError, with the reason, where the stage has no such form.
    """
    folder = resources.files("moe_parity.harness.cli") / "starters"
    file = folder / f"{ALIKE.get(stage.name, stage.name)}.{form}.txt"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if form != "torch":
        reason = NO_TRITON.get(stage.name, "nobody has written one")
        raise ParityError(f"{stage} has no {form} form: {reason}.")
    recipe = next(name for name, recipe in ALL.items() if stage.described_by(recipe))
    return _BY_REFERENCE.format(recipe=recipe)


def _taken(body: str) -> set[str]:
    """Return the names that a body defines or imports for itself."""
    found = set()
    for node in ast.parse(body).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


# --- what a stage gives and takes back ------------------------------------------------------------


def head(name: str, stage: Stage[Any]) -> str:
    """Return the docstring of a kernel file: what a kernel of the stage gets and returns."""
    return f"{name}: a kernel of the stage {stage} (docs/your-kernel.md).\n\n{_described(stage)}"


@cache
def _described(stage: Stage[Any]) -> str:
    case = Case(**{size: getattr(SHOWN, size) for size in SIZES if size in stage.reads})
    inputs = stage.inputs(case)
    lines = ["call.inputs, of a plain case", *(f"    {line}" for line in fields(inputs))]
    lines += ["outputs, in order, as call.new makes them"]
    for output, made in stage.outputs(case, inputs).items():
        shape = "[any length]" if made.any_length else shaped(made.shape)
        lines.append(f"    {output}  {dtype_word(made.dtype)} {shape}")
    return "\n".join([*lines, ""])


def fields(inputs: Any, before: str = "") -> Iterator[str]:
    """Yield a line for each field and property of a stage's inputs, those of nested ones too."""
    made = [name for name, what in vars(type(inputs)).items() if isinstance(what, property)]
    for name in [*vars(inputs), *made]:
        value = getattr(inputs, name)
        if isinstance(value, Tensor):
            yield f"{before}{name}  {dtype_word(value.dtype)} {shaped(tuple(value.shape))}"
        elif not dataclasses.is_dataclass(value):
            yield f"{before}{name} = {dtype_word(value)}"
        elif not before:
            yield from fields(value, f"{name}.")


def shaped(shape: tuple[int, ...]) -> str:
    """Return a shape in letters, where they are known."""
    return f"[{', '.join(LETTERS.get(size, str(size)) for size in shape)}]"


def dtype_word(dtype: object) -> str:
    """Return a dtype's name without its module; anything else as it prints."""
    return str(dtype).removeprefix("torch.")
