"""The invariance map of a kernel: at which number of tokens a token's bits change, and why.

One token is called in batches of growing size M, at their start, in their middle and at their end,
beside drawn tokens, tokens of the same experts, tokens of other experts and rows of no number; and
as a batch of nothing but copies of itself, which puts it at every position of a tile.  Between two
sizes that were called and have the same bits, all are taken to have them; between two that have
not, the exact size is found by halving, in the same company.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_parity.harness.calling.run import run
from moe_parity.harness.cases.sequences import EDGES
from moe_parity.harness.checks.invariance import SPOILERS
from moe_parity.harness.diagnosis.labels import numbers
from moe_parity.harness.evidence.map_classes import (
    TRIED,
    Recognised,
    Recogniser,
    Token,
    decision_between,
    telling,
)
from moe_parity.harness.evidence.map_values import PLACES, InvarianceMap, Line, Places, Span
from moe_parity.kernels import Kernel
from moe_parity.kernels.choice import choosing
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Recipe

BESIDE = 1200
"""What the lines of other positions and companies may cost a CPU together."""
COPIES = 257
"""The largest batch of copies, whose positions are looked at one by one."""


def configured(name: str) -> AbstractContextManager[object]:
    """Return a context in which calls take a configuration; an empty name is the usual one."""
    return choosing(registered=name) if name else nullcontext()


def map_of(
    kernel: Kernel, case: Case, device: str, config: str = "", *, beside: float = BESIDE
) -> InvarianceMap:
    """Return the map of a configuration for up to ``case.m`` tokens.

    ``beside`` bounds what other positions and companies cost a CPU.  Raises ParityError where the
    stage has no units that can be called alone; what the kernel raises passes through.
    """
    with configured(config):
        return _Mapper(kernel, case, device, config, beside).made()


class _Called(NamedTuple):
    bits: str
    got: Mapping[str, Tensor]


class _Mapper:
    """Calls a kernel and keeps what came back."""

    def __init__(self, kernel: Kernel, case: Case, device: str, config: str, beside: float) -> None:
        self.kernel, self.case, self.device, self.config = kernel, case, device, config
        self.stage, self.beside = kernel.stage, beside
        self.inputs = self.stage.inputs(case, device)
        self.count = self.stage.units(self.inputs)
        if not self.count:
            raise ParityError(
                f"{self.stage} of {kernel.name} has no rows that can be called alone."
            )
        self.on = self.stage.handed(self.inputs)[0].device
        edges = {edge for edge in EDGES if edge < self.count} | {self.count}
        self.sizes = sorted(edges | set(self._stated_edges()))
        self.calls: dict[tuple[str, int], _Called | None] = {}
        self.stated: dict[int, tuple[Recipe, ...]] = {}
        tried = 1 if self.stage.partial else TRIED
        units = range(0, self.count, max(self.count // tried, 1))[:tried]
        one = self.stage.some(case, self.inputs, torch.zeros(1, dtype=torch.int64, device=self.on))
        recipe = kernel.recipes(one.case, device)[0]
        self.tokens = telling(self.stage, case, self.inputs, recipe, 2, units)
        self.recognisers: dict[int, Recogniser] = {}
        self.compared = self.shown = self.made_calls = 0

    def made(self) -> InvarianceMap:
        lines = list(self._lines())
        first = self._followed(lines[0], self.sizes, None)
        if not first.spans:
            raise ParityError(f"{self.kernel.name} takes no batch of {self.case.id}.")
        done = [first]
        share = self.beside / max(len(lines) - 1, 1)
        edges = [m for span in first.spans[1:] for m in (span.first - 1, span.first)]
        for line in lines[1:]:
            sizes = self._affordable([*edges, self.count, *EDGES], share)
            made = self._followed(line, sizes, first)
            done += [made] if made.spans else []
        places = tuple(self._places(first))
        refused = sorted({m for (_, m), called in self.calls.items() if called is None})
        return InvarianceMap(
            kernel=self.kernel, case=self.case, config=self.config, lines=tuple(done),
            places=places, compared=self.compared, could_show=self.shown,
            calls=self.made_calls, refused=tuple(refused),
        )  # fmt: skip

    def _stated_edges(self) -> Iterator[int]:
        """Yield the sizes on both sides of where the kernel states another recipe.

        It may come back to the first one before the next edge.
        """
        if "m" not in self.stage.sizes:
            return
        sizes = [dataclasses.replace(self.case, m=m) for m in range(1, self.count + 1)]
        for low, high in itertools.pairwise(sizes):
            if self.kernel.recipes(low, self.device) != self.kernel.recipes(high, self.device):
                yield from (low.m, high.m)

    # --- who stands beside a token ---------------------------------------------------------------

    def _lines(self) -> Iterator[Line]:
        """Yield the lines of a map, the one that the others are held against first."""
        token = self.tokens[0].unit
        drawn = torch.randperm(
            self.count, generator=torch.Generator().manual_seed(self.case.seed)
        ).to(self.on)
        others = drawn[drawn != token]

        def line(words: str, others: Tensor, place: str = PLACES[0], **more: Any) -> Line:
            made = {"unit": token, "inputs": self.inputs, **more}
            return Line(words=words, others=others, place=place, **made)

        yield line("first of M", others)
        if not others.numel():
            return
        for place in PLACES[1:]:
            yield line(f"{place} of M", others, place)
        experts = _experts(self.inputs, self.count)
        if experts is not None:
            shared = torch.isin(experts, experts[token]).any(1)
            for words, mask in (("the same experts", shared), ("other experts", ~shared)):
                company = others[mask[others]]
                if company.numel():
                    yield line(f"beside tokens of {words} alone", company)
            nobody = others[(experts < 0).all(1)[others]]
            if nobody.numel():
                yield line("beside tokens of nobody here", nobody, PLACES[2])
        for words, value in SPOILERS.items():
            spoiled = self.stage.spoiled(self.inputs, others, value)
            if spoiled is not None:
                yield line(f"beside rows of {words}", others, PLACES[1], inputs=spoiled)
        for other in self.tokens[1:]:
            yield line("another token", drawn[drawn != other.unit], unit=other.unit)

    def _units(self, line: Line, m: int) -> Tensor:
        """Return the units of a batch of ``m``."""
        many = -(-(m - 1) // max(line.others.numel(), 1))
        others = line.others.repeat(many)[: m - 1]
        at = (0, m // 2, m - 1)[PLACES.index(line.place)]
        own = torch.tensor([line.unit], device=self.on)
        return torch.cat([others[:at], own, others[at:]])

    # --- calls -----------------------------------------------------------------------------------

    def _token(self, line: Line) -> Token:
        return next(token for token in self.tokens if token.unit == line.unit)

    def _call(self, line: Line, m: int) -> _Called | None:
        """Call a batch and return the token's bits, None where the kernel does not take it."""
        key = line.words, m
        if key not in self.calls:
            found = self._rows(line, self._units(line, m))
            self.calls[key] = found[0] if found else None
        return self.calls[key]

    def _rows(self, line: Line, units: Tensor) -> list[_Called] | None:
        """Call some units; return the bits of the token, for each time that it stands there."""
        stage, token = self.stage, self._token(line)
        part = stage.some(self.case, line.inputs, units)
        if self.kernel.declines(part.case, self.device) is not None:
            return None
        self.stated.setdefault(units.numel(), self.kernel.recipes(part.case, self.device))
        outputs = run(self.kernel, part.case, part.inputs).outputs
        times = int((units == line.unit).sum())
        cut: dict[str, Tensor] = {}
        for name, rows in part.rows.items():
            if name in outputs:
                at = torch.isin(rows, token.rows[name]).nonzero()[:, 0]
                order = torch.argsort(rows[at], stable=True)
                own = outputs[name][at[order]]
                # row by row, each as often as the token stands there
                cut[name] = own.view(token.rows[name].numel(), times, *own.shape[1:])
        found = []
        for n in range(times):
            got = {name: rows[:, n] for name, rows in cut.items()}
            bits = token.probe.as_bits(got)
            digest = hashlib.sha256()
            for name in sorted(bits):
                digest.update(name.encode() + bits[name].cpu().contiguous().numpy().tobytes())
            found.append(_Called(digest.hexdigest()[:12], got))
        self.made_calls += 1
        self.compared += times * token.outputs
        self.shown += times * token.shown
        return found

    def _affordable(self, wanted: Sequence[int], share: float) -> list[int]:
        """Return the sizes that a share of the budget has room for, in the order of wishes."""
        found: list[int] = []
        for m in dict.fromkeys(m for m in wanted if m <= self.count):
            part = dataclasses.replace(self.case, m=m)
            cost = self.kernel.cost(part) if self.device == "cpu" else 0
            if cost <= share:
                share -= cost
                found.append(m)
        return sorted(found)

    # --- spans -----------------------------------------------------------------------------------

    def _followed(self, line: Line, sizes: Sequence[int], first: Line | None) -> Line:
        """Return a line with its spans: calls at some sizes, and halving where bits change."""
        met = [m for m in sizes if self._call(line, m) is not None]
        every = dict.fromkeys(met)
        for low, high in itertools.pairwise(met):
            every |= dict.fromkeys(self._halved(line, low, high))
        order = sorted(every)
        spans: list[Span] = []
        for m in order:
            called = self._call(line, m)
            assert called is not None
            if spans and spans[-1].bits == called.bits:
                spans[-1] = dataclasses.replace(spans[-1], last=m)
            else:
                spans.append(self._span(line, m, called, spans[-1] if spans else None))
        agrees = first is None or self._agrees(line, order, first)
        return dataclasses.replace(line, spans=tuple(spans), called=tuple(order), agrees=agrees)

    def _halved(self, line: Line, low: int, high: int) -> Iterator[int]:
        """Yield the sizes called to find where bits change between two, if they do."""
        one, two = self._call(line, low), self._call(line, high)
        if one is None or two is None or one.bits == two.bits or high - low < 2:
            return
        middle = (low + high) // 2
        if self._call(line, middle) is not None:
            yield middle
            yield from self._halved(line, low, middle)
            yield from self._halved(line, middle, high)

    def _span(self, line: Line, m: int, called: _Called, before: Span | None) -> Span:
        found = self._recognised(line, m, called)
        span = Span(first=m, last=m, bits=called.bits, recipe=found.words)
        if before is None:
            return span
        earlier = self._call(line, before.last)
        assert earlier is not None
        words = decision_between(self.stage, self._recognised(line, before.last, earlier), found)
        declared = self.stated[m] != self.stated[before.last]
        return dataclasses.replace(span, decision=words, declared=declared)

    def _recognised(self, line: Line, m: int, called: _Called) -> Recognised:
        token = self._token(line)
        if token.unit not in self.recognisers:
            stated = [recipe for recipes in self.stated.values() for recipe in recipes]
            self.recognisers[token.unit] = Recogniser(token, self.kernel.name, stated)
        return self.recognisers[token.unit].find(called.bits, called.got, self.stated[m])

    def _agrees(self, line: Line, order: Sequence[int], first: Line) -> bool:
        """Whether a line has the bits of the first; of another token, changes where that does."""
        common = [m for m in order if m in first.called]
        pairs = [(self._call(line, m), self._call(first, m)) for m in common]
        bits = [(a.bits, b.bits) for a, b in pairs if a is not None and b is not None]
        if line.unit == first.unit:
            return all(a == b for a, b in bits)
        return all((a[0] == b[0]) == (a[1] == b[1]) for a, b in itertools.combinations(bits, 2))

    def _places(self, first: Line) -> Iterator[Places]:
        """Yield the positions of copies that have the same bits, where not all have."""
        for span in first.spans:
            m = min(span.last, max(span.first, COPIES))
            found = self._rows(first, torch.full((m,), first.unit, device=self.on))
            kinds = dict.fromkeys(called.bits for called in found or ())
            if found is None or len(kinds) < 2:
                continue
            earlier: Recognised | None = None
            for bits in kinds:
                at = {n for n, called in enumerate(found) if called.bits == bits}
                called = found[min(at)]
                known = self._recognised(first, m, called)
                words = decision_between(self.stage, earlier, known) if earlier else ""
                yield Places(
                    m=m, positions=numbers(at), bits=bits, recipe=known.words, decision=words
                )
                earlier = earlier or known


def _experts(inputs: Any, count: int) -> Tensor | None:
    """Return the global or local experts of each unit, [count, k], where units have any."""
    batch = getattr(inputs, "batch", inputs)
    for name in ("ids", "expert"):
        found = getattr(batch, name, None)
        if isinstance(found, Tensor) and found.shape[0] == count:
            return found.view(count, -1)
    return None
