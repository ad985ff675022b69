"""A stage: one step of the layer, as one object that owns all that the project knows of it.

The harness, the kernels and the suites know stages only through this class.  A new stage is a
subclass in a room of ``references/stages`` and a line in its table.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import E4M3, CodeFormat
from moe_parity.references.errors import ParityError
from moe_parity.references.language.case import Case
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Acting, Recipe

InputsT = TypeVar("InputsT")
Outputs = Mapping[str, Tensor]
Reads = Mapping[str, frozenset[Any] | None]
"""Word of a case -> which values of it; None for any."""


class Kind(StrEnum):
    """What an output's elements are."""

    CODES = "codes"
    """Quantized elements, uint8 or torch's own type."""
    SCALES = "scales"
    VALUES = "values"
    """Floating-point numbers."""
    INTEGERS = "integers"


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output as a kernel writes it, and the shape of its canonical form."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    """The strides that the case asks for; None for any."""
    canonical: tuple[int, ...] | None = None
    """The shape once unpacked; None where nothing is packed."""
    axes: tuple[str, ...] = ("row", "column")
    """What an index counts, for sentences."""
    noun: str = "outputs"
    """What its elements are called, for sentences."""
    any_length: bool = False
    """Whether a list of another length is judged, not refused."""
    codes: CodeFormat = E4M3
    """The format of codes."""


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Some rows of a case as a case of their own."""

    case: Case
    inputs: Any
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """Output -> where its rows stand among those of the whole case, int64."""


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A stage inside a layer, on the kernel's own upstream tensors."""

    stage: Stage[Any]
    case: Case
    inputs: Any
    got: Outputs


class Stage(ABC, Generic[InputsT]):
    """One step of the layer."""

    name: ClassVar[str]
    reads: ClassVar[Reads]
    """The words of a case that it reads."""
    acting: ClassVar[Acting]
    """The parts of a recipe that it reads, and which of their decisions act in it."""
    elsewhere: ClassVar[frozenset[str]] = frozenset()
    """Decisions of those parts that are made in another stage and show in this one."""
    needs: ClassVar[frozenset[str] | None] = None
    """The parts without which a recipe says nothing about it; None for all that act."""
    sizes: ClassVar[tuple[str, ...]]
    """The sizes that say how large a case is."""
    geometry: ClassVar[frozenset[str]] = frozenset({"hazard"})
    """The words that say how inputs lie in memory, which a kernel may refuse."""
    grouped: ClassVar[tuple[str, ...]] = ()
    """The sizes that are quantized along a row, in whole groups."""
    partial: ClassVar[bool] = False
    """Whether a kernel may return its last output alone."""
    in_two: ClassVar[bool] = False
    """Whether it is two steps: ``finished``, the first part of ``acting``, after ``handed_on``."""

    def __str__(self) -> str:
        """Return the name, as it stands in ids and records."""
        return self.name

    def __repr__(self) -> str:
        """Return source text."""
        return f"STAGES[{self.name!r}]"

    # --- cases -----------------------------------------------------------------------------------

    def refusal(self, case: Case) -> str | None:
        """Return what in a case this stage does not read, in a sentence, or None."""
        for word in dataclasses.fields(Case):
            value = getattr(case, word.name)
            if value == word.default or word.name == "seed":
                continue
            if word.name not in self.reads:
                return f"{self.name} does not read the word {word.name} (here {value})"
            allowed = self.reads[word.name]
            if allowed is not None and value not in allowed:
                known = ", ".join(sorted(map(str, allowed)))
                return f"{self.name} knows {word.name} {known}, not {value}"
        for size in self.grouped:
            width = getattr(case, size)
            if width % case.group:
                whole = f"{size.upper()} = {width} is not a multiple of {case.group}"
                return f"{self.name} has whole groups: {whole}"
        return None

    def check(self, case: Case) -> Case:
        """Return the case; raises ParityError, in a sentence, for a word that is not read."""
        refusal = self.refusal(case)
        if refusal is not None:
            raise ParityError(f"{refusal}; leave it out of {case.id}.")
        return case

    def may_be_refused(self, case: Case) -> bool:
        """Whether the inputs of a case lie in memory in a way that a kernel need not take."""
        return any(getattr(case, word) != getattr(Case(), word) for word in self.geometry)

    def size_words(self, case: Case) -> str:
        """Return the sizes of a case for a record: ``m33-h512``."""
        return "-".join(f"{name}{getattr(case, name)}" for name in self.sizes)

    @abstractmethod
    def inputs(self, case: Case, device: str = "cpu") -> InputsT:
        """Return the inputs of a case, the same bits on a CPU and a GPU.

        Raises ParityError for a case whose words the stage does not read.
        """

    def given(self, case: Case, tensors: Mapping[str, Tensor]) -> tuple[Case, InputsT]:
        """Return a case and its inputs of somebody's own tensors, by the names of the inputs.

        The sizes of the case become those of the tensors.  Raises ParityError, in a sentence, for
        a tensor that is missing or does not fit.
        """
        raise ParityError(f"{self.name} takes no inputs from a file.")

    @abstractmethod
    def cost(self, case: Case) -> int:
        """Return about how many programs, times blocks of K, a call costs the virtual GPU."""

    @abstractmethod
    def witness_cases(self) -> Iterator[Case]:
        """Yield the cases in which a kernel of this stage is witnessed."""

    def probes(self) -> Iterator[Case]:
        """Yield cases whose inputs tell the options of decisions apart, those that say most first.

        They are what an unknown kernel is identified by; each is asked for in every scale format.
        """
        yield from self.witness_cases()

    # --- what goes in and comes out --------------------------------------------------------------

    @abstractmethod
    def outputs(self, case: Case, inputs: InputsT) -> Mapping[str, Output]:
        """Return the outputs in order, in the format and layout that the case asks for."""

    @abstractmethod
    def reference(self, case: Case, inputs: InputsT, recipe: Recipe) -> dict[str, Tensor]:
        """Return what the recipe gives, in canonical form, on the device of the inputs."""

    def live(self, case: Case, inputs: InputsT) -> Mapping[str, Tensor]:
        """Return, for outputs some of whose rows nobody owns, a mask of the rows that are owned."""
        return {}

    def units(self, inputs: InputsT) -> int:
        """Return how many rows, or tokens, can be called alone; 0 where none can."""
        return 0

    def some(self, case: Case, inputs: InputsT, chosen: Tensor) -> Subset:
        """Return some units, int64, in any order and as often as they are named, as a case.

        Where the stage has an order of its own the units follow it; ``Subset.rows`` says which
        stands where.
        """
        raise NotImplementedError

    def spoiled(self, inputs: InputsT, chosen: Tensor, value: float) -> InputsT | None:
        """Return inputs in which some units, int64, hold a number throughout, NaN or infinite ones.

        The other units are as they were.  None where a unit has no numbers.
        """
        return None

    def subsets(self, case: Case, inputs: InputsT) -> Iterator[Subset]:
        """Yield parts of a case whose rows must keep their bits: here every second unit."""
        odd = every_second(self.units(inputs), self.handed(inputs)[0])
        if odd.numel():
            yield self.some(case, inputs, odd)

    def inner(self, case: Case, inputs: InputsT, got: Outputs) -> Iterator[Inner]:
        """Yield the stages inside, each on the kernel's own upstream tensors."""
        return iter(())

    def handed(self, inputs: InputsT) -> list[Tensor]:
        """Return the tensors that a kernel must leave as they are."""
        return tensors_of(inputs)

    def sealed(self, inputs: InputsT) -> list[Tensor]:
        """Return the tensors whose hash a witness keeps, in an order that never changes."""
        return tensors_of(inputs)

    def errors(
        self,
        case: Case,
        inputs: InputsT,
        got: Outputs,
    ) -> tuple[float | None, float | None]:
        """Return relative errors against BF16 and float64 arithmetic, where they mean something."""
        return None, None

    def told(self, case: Case, inputs: InputsT, got: Outputs) -> str:
        """Return what is wrong in the stage's own terms, where an index says too little.

        It completes a sentence that begins with the cause; empty for nothing.
        """
        return ""

    def handed_on(self, case: Case, inputs: InputsT, recipe: Recipe) -> Tensor:
        """Return what the first of two steps hands to the second, [rows, ...].

        Where it is the same whatever the first one's decisions are, outputs tell of the second.
        """
        raise NotImplementedError

    def finished(self, case: Case, handed: Tensor, recipe: Recipe) -> dict[str, Tensor]:
        """Return what the second step makes of what the first one handed on."""
        raise NotImplementedError

    # --- recipes and mistakes --------------------------------------------------------------------

    def described_by(self, recipe: Recipe) -> bool:
        """Whether a recipe says what this stage does."""
        needed = self.acting.keys() if self.needs is None else self.needs
        return needed <= recipe.parts.keys()

    def neighbours(self, recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
        """Yield (label, recipe) for each single decision changed, of those that act here."""
        return recipe.neighbours(self.acting)

    def mistakes(self, case: Case, inputs: InputsT, recipe: Recipe) -> Iterator[Mistake]:
        """Yield what a kernel that follows a recipe may do wrong on these inputs."""
        return iter(())


def every_second(count: int, like: Tensor) -> Tensor:
    """Return 1, 3, 5 ... below ``count``, int64, on the device of a tensor."""
    return torch.arange(count, device=like.device)[1::2]


def filled(tensor: Tensor, rows: Tensor, value: float) -> Tensor:
    """Return a copy of a tensor in which some rows hold a number, the largest where it has none."""
    made = tensor.clone()
    largest = torch.finfo(tensor.dtype).max
    made[rows] = max(-largest, min(value, largest)) if math.isfinite(value) else value
    return made


def tensors_of(inputs: Any) -> list[Tensor]:
    """Return the tensors among the fields of a dataclass, nested ones included, in order."""
    found: list[Tensor] = []
    for value in vars(inputs).values():
        if isinstance(value, Tensor):
            found.append(value)
        elif dataclasses.is_dataclass(value):
            found += tensors_of(value)
    return found
