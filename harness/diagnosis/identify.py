"""What does a kernel compute? The recipes that explain every bit that was seen of a stage.

Candidates are the product of the options of all decisions that a case asks for.  They are narrowed
in steps, each on the outputs that speak of few decisions: scales before codes, a few rows before
all of them, rows on which the first of two steps does not matter before the others.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.judged import Judged
from moe_parity.references.language import Case, Decision, Recipe, Stage
from moe_parity.references.language.decision import decisions
from moe_parity.references.language.stage import Outputs
from moe_parity.references.recipes import ALL
from moe_parity.references.recipes.ours import OURS

FEW = 24
"""Rows, or tokens, on which all candidates are tried before the survivors meet the others."""
ALIKE = 64
"""Recipes with the same bits that are listed where not all can be."""
MANY = 1 << 16
"""Combinations of options past which a stage of several parts that show nothing in between is
climbed, not searched."""
KNOWN = 2048
"""Recipes whose outputs a probe keeps."""
HANDED = 256
"""Tensors between two steps that a probe keeps."""
Field = tuple[str, str, Decision]
"""Part, attribute and decision."""
Bits = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A case with its inputs, and what recipes give on them, each computed once."""

    stage: Stage[Any]
    case: Case
    inputs: Any
    known: dict[tuple[object, ...], Bits] = field(default_factory=dict)
    digests: dict[tuple[object, ...], bytes] = field(default_factory=dict)
    handed: dict[bytes, Tensor] = field(default_factory=dict)
    """What the first of two steps hands on, by its digest, and that by the step's parts."""
    parts: dict[bytes, tuple[Probe, dict[str, Tensor]]] = field(default_factory=dict)
    muted: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    """Rows on which the first of two steps does not matter, by the decisions it has."""

    def bits(self, recipe: Recipe) -> Bits:
        """Return a recipe's outputs as comparable integers, zeros in rows of nobody."""
        key: tuple[object, ...] = tuple(recipe.parts.get(name) for name in self.stage.acting)
        digest = self._digest(key[1:], recipe) if self.stage.in_two else b""
        if digest:
            # recipes whose first steps hand the same on differ in the second alone
            key = key[0], digest
        if key not in self.known:
            if digest:
                made = self.stage.finished(self.case, self._handed(digest, recipe), recipe)
            else:
                made = self.stage.reference(self.case, self.inputs, recipe)
            if len(self.known) >= KNOWN:
                self.known.clear()
            self.known[key] = self.as_bits(made)
        return self.known[key]

    def _digest(self, first: tuple[object, ...], recipe: Recipe) -> bytes:
        """Return a digest of the bits that the first of two steps hands on."""
        if first not in self.digests:
            handed = self.stage.handed_on(self.case, self.inputs, recipe)
            digest = blake2b(handed.contiguous().view(torch.uint8).cpu().numpy().data).digest()
            self.digests[first] = digest
            self._keep(digest, handed)
        return self.digests[first]

    def _handed(self, digest: bytes, recipe: Recipe) -> Tensor:
        if digest not in self.handed:
            self._keep(digest, self.stage.handed_on(self.case, self.inputs, recipe))
        return self.handed[digest]

    def _keep(self, digest: bytes, handed: Tensor) -> None:
        if len(self.handed) >= HANDED:
            self.handed.clear()
        self.handed[digest] = handed

    def as_bits(self, made: Outputs) -> Bits:
        """Return outputs as comparable integers, zeros in rows of nobody."""
        outputs = self.stage.outputs(self.case, self.inputs)
        live = self.stage.live(self.case, self.inputs)
        found = {}
        for name, tensor in made.items():
            bits = comparable(tensor, outputs[name].codes)
            if name in live:
                bits = torch.where(live[name].view(-1, *[1] * (bits.dim() - 1)), bits, 0)
            found[name] = bits
        return found

    def some(self, chosen: Tensor) -> tuple[Probe, dict[str, Tensor]]:
        """Return some units as a probe of their own, and where the rows of its outputs stand.

        It is the same probe at every call, and keeps what it knows.
        """
        key = chosen.cpu().numpy().tobytes()
        if key not in self.parts:
            part = self.stage.some(self.case, self.inputs, chosen)
            own = Probe(stage=self.stage, case=part.case, inputs=part.inputs)
            self.parts[key] = own, dict(part.rows)
        return self.parts[key]

    @cached_property
    def few(self) -> tuple[Probe, dict[str, Tensor]]:
        """A few of its units, evenly spread, as :meth:`some` gives them."""
        count = self.stage.units(self.inputs)
        device = self.stage.handed(self.inputs)[0].device
        return self.some(torch.arange(0, count, max(count // FEW, 1), device=device))

    @property
    def fields(self) -> list[Field]:
        """The decisions that a kernel has to make here."""
        scale = "ue8m0" if self.case.scale.is_power_of_two else "fp32"
        found = []
        for part, chosen in self.stage.acting.items():
            for attribute, decision in decisions(OURS.parts[part]).items():
                acts = chosen is None or decision.name in chosen | self.stage.elsewhere
                if acts and scale in decision.formats and decision.asked(self.case, self.inputs):
                    found.append((part, attribute, decision))
        return found


class Seen:
    """What a kernel gave on a probe."""

    def __init__(self, probe: Probe, got: Outputs) -> None:
        self.probe, self.got = probe, got
        self.bits = probe.as_bits(got)
        self.few = self._few()

    def _few(self) -> tuple[Probe, Bits] | None:
        if self.probe.stage.units(self.probe.inputs) <= 2 * FEW:
            return None
        probe, rows = self.probe.few
        return probe, {name: self.bits[name][r] for name, r in rows.items() if name in self.bits}

    def matching(self, candidates: Iterable[Recipe], names: Sequence[str] = ()) -> list[Recipe]:
        """Return the candidates that give every bit of all outputs, or of those named."""
        alive = list(candidates)
        if self.few is not None and len(alive) > 1:
            probe, bits = self.few
            alive = [r for r in alive if _same(probe.bits(r), bits, names)]
        return [r for r in alive if _same(self.probe.bits(r), self.bits, names)]

    def equal(self, recipe: Recipe) -> tuple[int, int]:
        """Return how many outputs of a recipe are as seen, and of how many."""
        made = self.probe.bits(recipe)
        same = sum(int((made[name] == bits).sum()) for name, bits in self.bits.items())
        return same, sum(bits.numel() for bits in self.bits.values())


def _same(made: Bits, seen: Bits, names: Sequence[str]) -> bool:
    return all(torch.equal(made[n], bits) for n, bits in seen.items() if not names or n in names)


# --- narrowing ----------------------------------------------------------------------------------


def explaining(seen: Sequence[Seen]) -> list[Recipe]:
    """Return the recipes, of all that decisions can make, that explain every bit of all probes.

    Decisions that no probe asks for stay as ``ours`` has them.
    """
    alive, asked = [OURS], set[str]()
    for one in seen:
        fields = [f for f in one.probe.fields if f"{f[0]}.{f[1]}" not in asked]
        alive = _narrowed(one, alive, fields)
        asked |= {f"{part}.{attribute}" for part, attribute, _ in fields}
        if not alive:
            break
    return alive


def _narrowed(seen: Seen, alive: list[Recipe], fields: list[Field]) -> list[Recipe]:
    """Return what is left of some recipes, times the options of some decisions."""
    stage = seen.probe.stage
    parts = list(dict.fromkeys(part for part, _, _ in fields))
    many = math.prod(len(d.options) for _, _, d in fields) > MANY
    if len(parts) > 1 and many and not stage.in_two:
        return _climbed(seen)
    if len(alive) == 1 and len(parts) > 1 and stage.in_two:
        return _in_two(seen, alive[0], fields)
    for names, own in _phases(seen, fields):
        alive = seen.matching(_product(alive, own), names)
    return alive


def _phases(seen: Seen, fields: list[Field]) -> Iterator[tuple[Sequence[str], list[Field]]]:
    """Yield outputs and the decisions to narrow by them, those that fewest reach first."""
    narrow = {name for _, _, d in fields for name in d.reaches}
    wide = [name for name in seen.bits if name not in narrow]
    if narrow and wide:
        yield wide, [f for f in fields if not f[2].reaches]
        yield (), [f for f in fields if f[2].reaches]
    else:
        yield (), fields


def _in_two(seen: Seen, base: Recipe, fields: list[Field]) -> list[Recipe]:
    """Narrow a stage of two steps: the second where the first does not matter, then the first."""
    probe, stage = seen.probe, seen.probe.stage
    second = next(iter(stage.acting))
    of_second = [f for f in fields if f[0] == second]
    of_first = [f for f in fields if f[0] != second]
    firsts = list(_product([base], of_first))
    key = tuple(attribute for _, attribute, _ in of_first)
    if key not in probe.muted:
        probe.muted[key] = _muted(probe, firsts)
    quiet = probe.muted[key].nonzero()[:, 0]
    seconds = _on_rows(seen, quiet, base, of_second) if quiet.numel() else []
    if not seconds:
        return _climbed(seen)
    # rows on which what is left of the second step agrees tell of the first alone
    agreed = _agreed(probe, seconds)
    told = _matching_rows(seen, agreed, (_with(seconds[0], r, of_first) for r in firsts))
    found = seen.matching(_with(two, one, of_first) for two in seconds for one in told)
    # what those rows leave of the second step need not hold what the others show
    return found or _climbed(seen)


def _muted(probe: Probe, recipes: Sequence[Recipe]) -> Tensor:
    """Return a mask of the rows on which all recipes hand the same on."""
    same: Tensor | None = None
    first: Tensor | None = None
    for recipe in recipes:
        bits = comparable(probe.stage.handed_on(probe.case, probe.inputs, recipe))
        first = bits if first is None else first
        rows = (bits == first).flatten(1).all(1)
        same = rows if same is None else same & rows
    assert same is not None
    return same


def _agreed(probe: Probe, recipes: Sequence[Recipe]) -> Tensor:
    """Return the rows on which recipes give the same outputs, int64."""
    first = probe.bits(recipes[0])
    same: Tensor | None = None
    for recipe in recipes:
        made = probe.bits(recipe)
        rows = torch.stack([(made[n] == first[n]).flatten(1).all(1) for n in first]).all(0)
        same = rows if same is None else same & rows
    assert same is not None
    return same.nonzero()[:, 0]


def _on_rows(seen: Seen, rows: Tensor, base: Recipe, fields: list[Field]) -> list[Recipe]:
    part, places = seen.probe.some(rows)
    own = Seen(part, {name: seen.got[name][r] for name, r in places.items() if name in seen.got})
    alive = [base]
    for names, chosen in _phases(own, fields):
        alive = own.matching(_product(alive, chosen), names)
    return alive


def _matching_rows(seen: Seen, rows: Tensor, candidates: Iterable[Recipe]) -> list[Recipe]:
    part, places = seen.probe.some(rows)
    own = Seen(part, {name: seen.got[name][r] for name, r in places.items() if name in seen.got})
    return own.matching(candidates)


def _with(recipe: Recipe, other: Recipe, fields: list[Field]) -> Recipe:
    """Return a recipe with the parts of some decisions taken from another."""
    names = {part for part, _, _ in fields}
    return recipe.with_parts(**{name: other.parts[name] for name in names})


def _product(recipes: Iterable[Recipe], fields: Sequence[Field]) -> Iterator[Recipe]:
    """Yield every combination of the options of some decisions, on top of each recipe."""
    for recipe in recipes:
        for options in itertools.product(*(list(d.options) for _, _, d in fields)):
            changes: dict[str, dict[str, Any]] = {}
            for (part, attribute, _), option in zip(fields, options, strict=True):
                changes.setdefault(part, {})[attribute] = option
            parts = {
                name: dataclasses.replace(recipe.parts[name], **own)
                for name, own in changes.items()
            }
            made = recipe.with_parts(**parts)
            if all(
                d.exists(made.parts[part]) or option is getattr(recipe.parts[part], attribute)
                for (part, attribute, d), option in zip(fields, options, strict=True)
            ):
                yield made


def _climbed(seen: Seen) -> list[Recipe]:
    """Return recipes that explain every bit, found by one better decision after the other.

    From each named recipe that has most bits; then whatever single changes leave every bit as it
    is.  Where a step with one change helps no more, two at once are tried.
    """
    stage = seen.probe.stage
    named = [recipe for recipe in ALL.values() if stage.described_by(recipe)]
    start = max(named, key=lambda recipe: seen.equal(recipe)[0])
    best, most = start, seen.equal(start)[0]
    of = seen.equal(start)[1]
    while most < of:
        ones = list(_near(seen, best))
        counts = [seen.equal(changed)[0] for changed in ones]
        if max(counts) <= most:
            twos = (two for one in ones for two in _near(seen, one))
            return _alike(seen, seen.matching(twos))
        most = max(counts)
        best = ones[counts.index(most)]
    return _alike(seen, [best])


def _near(seen: Seen, recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe with each single decision changed that a kernel has to make there."""
    asked = {decision.name for _, _, decision in seen.probe.fields}
    for label, changed in seen.probe.stage.neighbours(recipe):
        if label.partition("=")[0].rpartition(" ")[2] in asked:
            yield changed


def _alike(seen: Seen, found: list[Recipe]) -> list[Recipe]:
    """Return recipes with all that single changes reach without a bit that differs."""
    stage = seen.probe.stage

    def key(recipe: Recipe) -> tuple[object, ...]:
        return tuple(recipe.parts.get(name) for name in stage.acting)

    known = {key(recipe): recipe for recipe in found}
    edge = list(known.values())
    while edge and len(known) < ALIKE:
        recipe = edge.pop(0)
        near = {key(r): r for r in _near(seen, recipe)}
        fresh = [r for k, r in near.items() if k not in known]
        for other in seen.matching(fresh):
            known[key(other)] = other
            edge.append(other)
    return list(known.values())


def judged(seen: Seen, who: str) -> Judged:
    """Return what was seen as outputs to be judged."""
    probe = seen.probe
    return Judged(who=who, stage=probe.stage, case=probe.case, inputs=probe.inputs, got=seen.got)
