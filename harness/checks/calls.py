"""Calls one after the other in one process, each judged, and their results looked at ever after.

Where two cases have inputs of the same geometry, the second one's are written over the first one's:
a server does that with its buffers, and what a kernel keeps by an address is stale by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.calling.run import WHOLE, Ran, run
from moe_parity.harness.checks.compare import Difference, differences, where
from moe_parity.harness.checks.flow import BROKEN, first_line
from moe_parity.kernels import Kernel
from moe_parity.kernels.call import BadCall
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Recipe
from moe_parity.references.language.stage import Output, Outputs
from moe_parity.references.stages.sparse import LARGE, pour, twin

KEPT = 8
"""Cases whose inputs and references are kept: a sequence comes back to a few."""


@dataclass(kw_only=True)
class Called:
    """One call of a sequence, counted from 1."""

    number: int
    case: Case
    ran: Ran | None = None
    """None where it raised, or where the kernel refused the case."""
    error: BaseException | None = None
    recipe: Recipe | None = None
    """That of the nearest bits."""
    compared: int = 0
    wrong: tuple[Difference, ...] = ()
    """Outputs that differ from the recipe."""
    moved: tuple[Difference, ...] = ()
    """Outputs that differ from those of the first call of the same case."""
    taken_by: int = 0
    """The number of the later call that has changed what this one returned; 0 for none."""
    taken: str = ""
    """What it has changed, in words."""
    place: str = ""
    """The first output in question, in words."""
    equals: int = 0
    """The number of an earlier call that has all the wrong bits; 0 for none."""
    outputs: Mapping[str, Output] = field(default_factory=dict)
    live: Mapping[str, Tensor] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    """Outputs in memory that is not that of the inputs."""

    @property
    def bad(self) -> bool:
        """Whether the call raised, or has other bits than it has to have."""
        return self.error is not None or bool(self.wrong or self.moved)


class Player:
    """Calls a kernel on one case after the other."""

    def __init__(self, kernel: Kernel, device: str) -> None:
        self.kernel, self.device = kernel, device
        self.calls: list[Called] = []
        self.seen: set[Case] = set()
        self._memory: dict[Any, Any] = {}
        self._made = lru_cache(maxsize=KEPT)(lambda case: kernel.stage.inputs(case, device))
        self._wanted = lru_cache(maxsize=KEPT)(self._references)

    def play(self, cases: Sequence[Case]) -> int:
        """Call on all cases, or up to the first bad call; return its number, 0 where none is."""
        for case in cases:
            if self.call(case).bad:
                return self.calls[-1].number
        return 0

    def call(self, case: Case) -> Called:
        """Call on one case, judge its bits, and look at what all calls before it returned."""
        called = Called(number=len(self.calls) + 1, case=case)
        self.calls.append(called)
        inputs = self._inputs(case)
        try:
            called.ran = run(self.kernel, case, inputs)
            self._judge(called, inputs)
        except BROKEN as error:
            refused = isinstance(error, ParityError) and not isinstance(error, BadCall)
            # what a kernel has taken once it may not refuse
            if not refused or case in self.seen:
                called.error = error
            return called
        finally:
            self._look_again(called.number)
        self.seen.add(case)
        return called

    def _inputs(self, case: Case) -> Any:
        made = self._made(case)
        key = geometry(made)
        if key not in self._memory:
            self._memory[key] = cloned(made)
        self._memory[key] = poured(self._memory[key], made)
        return self._memory[key]

    def _references(self, case: Case) -> list[tuple[Recipe, Outputs]]:
        kernel = self.kernel
        inputs = self._made(case)
        recipes = kernel.recipes(case, self.device)
        return [(r, kernel.stage.reference(case, inputs, r)) for r in recipes]

    def _judge(self, called: Called, inputs: Any) -> None:
        assert called.ran is not None
        stage, case, got = self.kernel.stage, called.case, called.ran.outputs
        called.outputs, called.live = stage.outputs(case, inputs), stage.live(case, inputs)
        theirs = {t.untyped_storage().data_ptr() for t in stage.handed(inputs) if t.numel()}
        called.own = frozenset(
            name
            for name, tensor in called.ran.returned.items()
            if tensor.untyped_storage().data_ptr() not in theirs
        )
        first = next((c for c in self.calls if c.case == case and c.ran is not None), called)
        if first is not called and first.ran is not None:
            called.moved = self._wrong(called, first.ran.outputs, got)
        # what is inside a layer is judged by what comes out of it
        seen = {list(got)[-1]: list(got.values())[-1]} if stage.partial else got
        tried = []
        for recipe, want in self._wanted(case):
            every = differences(called.outputs, seen, want, called.live)
            tried.append((sum(d.wrong for d in every), recipe, every, want))
        _, called.recipe, every, want = min(tried, key=lambda entry: entry[0])
        called.compared = sum(d.of for d in every)
        called.wrong = tuple(d for d in every if d.wrong)
        bad = (*called.wrong, *called.moved)
        if bad:
            called.place = where(inputs, bad[0].output, bad[0].index)
            called.equals = self._equal_to(called, seen, want)

    def _wrong(self, called: Called, want: Outputs, got: Outputs) -> tuple[Difference, ...]:
        every = differences(called.outputs, got, want, called.live)
        return tuple(d for d in every if d.wrong)

    def _equal_to(self, called: Called, got: Outputs, want: Outputs) -> int:
        """Return the number of the latest earlier call with all the bits that are wrong here."""
        for earlier in self.calls[-2::-1]:
            outputs = earlier.ran.outputs if earlier.ran is not None else {}
            same = [
                name in outputs and outputs[name].shape == got[name].shape
                and outputs[name].dtype == got[name].dtype
                for name in (d.name for d in called.wrong)
            ]  # fmt: skip
            if same and all(same):
                # an element is as it should be, or as it was in that call
                mixed = {
                    d.name: torch.where(got[d.name] == want[d.name], want[d.name], outputs[d.name])
                    for d in called.wrong
                }
                mine = {name: got[name] for name in mixed}
                if not self._wrong(called, mixed, mine):
                    return earlier.number
        return 0

    def _look_again(self, number: int) -> None:
        """Compare what earlier calls returned with what it was when they returned it."""
        for earlier in self.calls:
            if earlier.number == number or earlier.ran is None or earlier.taken:
                continue
            before = {name: earlier.ran.outputs[name] for name in earlier.own}
            try:
                now = earlier.ran.again()
            except BROKEN as error:  # packed exponents are those of nothing by now
                earlier.taken = f"{first_line(error)}"
            else:
                after = {name: now[name] for name in before}
                found = self._wrong(earlier, before, after)
                earlier.taken = ", ".join(d.words for d in found)
            earlier.taken_by = number if earlier.taken else 0


def geometry(inputs: Any) -> tuple[Any, ...]:
    """Return what two inputs share whose tensors fit into each other's memory."""
    found: list[Any] = []
    for entry in dataclasses.fields(inputs):
        value = getattr(inputs, entry.name)
        if isinstance(value, Tensor):
            shape = tuple(value.shape), value.stride(), value.storage_offset()
            found.append((entry.name, *shape, value.dtype))
        elif dataclasses.is_dataclass(value):
            found.append((entry.name, geometry(value)))
        elif value is None:
            found.append((entry.name, None))
    return tuple(found)


def cloned(inputs: Any) -> Any:
    """Return inputs in memory of their own, gaps between rows included; large ones hold zeros."""

    def copy(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().nbytes() > WHOLE and tensor.numel():
            return twin(tensor)
        bytes_ = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        kept = bytes_.set_(tensor.untyped_storage()).clone()
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return flat.set_(
            kept.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    return _mapped(inputs, lambda name, value: copy(value))


def poured(into: Any, made: Any) -> Any:
    """Return ``made`` in the memory of ``into``, which has the same geometry."""

    def over(name: str, value: Tensor) -> Tensor:
        target: Tensor = getattr(into, name)
        if target.data_ptr() == value.data_ptr():
            return target
        large = value.numel() >= LARGE
        return pour(target, value) if large else target.copy_(value)

    inner = {
        entry.name: poured(getattr(into, entry.name), getattr(made, entry.name))
        for entry in dataclasses.fields(made)
        if _nested(getattr(made, entry.name))
    }
    return dataclasses.replace(_mapped(made, over, deep=False), **inner)


def _nested(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and bool(geometry(value))


def _mapped(inputs: Any, change: Any, *, deep: bool = True) -> Any:
    made: dict[str, Any] = {}
    for entry in dataclasses.fields(inputs):
        value = getattr(inputs, entry.name)
        if isinstance(value, Tensor):
            made[entry.name] = change(entry.name, value)
        elif deep and _nested(value):
            made[entry.name] = _mapped(value, change)
    return dataclasses.replace(inputs, **made)
