"""What a hypothesis is held against: the bits seen, the bits expected, and where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from moe_parity.harness.checks.compare import NOTHING, comparable, fitted
from moe_parity.harness.checks.judged import Judged
from moe_parity.harness.diagnosis.labels import Labels, labels_of
from moe_parity.references.language.stage import Outputs

FEW = 3
"""Outputs that must be explained before a hypothesis is believed that holds in one place only."""
UNITS = 6
"""Differing rows or tokens on which hypotheses are tried first, and a third as many others."""

MANY = 1 << 15
"""Outputs that they have together, about; of a whole layer, whose reference takes longer, one."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a hypothesis fits: every differing output has its bits."""

    explained: int
    missed: int
    """Outputs that it would change and that are as expected."""
    where: str = ""
    """Where it holds, if not everywhere."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Outputs that were seen beside those expected."""

    judged: Judged
    want: Outputs
    cache: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def names(self) -> list[str]:
        """The outputs that are compared, those that differ first."""
        return sorted(self.judged.got, key=lambda name: not bool(self.bits(name)[2].any()))

    def bits(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return got and want as comparable integers, and where they differ in live rows."""
        if name not in self.cache:
            output, live = self.judged.outputs[name], self.judged.live.get(name)
            got, want = (
                comparable(t, output.codes) for t in fitted(self.judged.got[name], self.want[name])
            )
            bad = got != want
            if live is not None:
                bad &= live.view(-1, *[1] * (bad.dim() - 1))
            self.cache[name] = got, want, bad
        return self.cache[name]

    @property
    def differing(self) -> list[str]:
        """The outputs that differ."""
        return [name for name in self.names if bool(self.bits(name)[2].any())]

    def possible(self, made: Outputs, names: list[str] | None = None) -> bool:
        """Whether every differing output has the bits that a hypothesis makes."""
        for name in self.differing if names is None else names:
            got, _, bad = self.bits(name)
            other = self.of_made(name, made)
            if other is None or bool((other != got)[bad].any()):
                return False
        return True

    def of_made(self, name: str, made: Outputs) -> Tensor | None:
        """Return the bits that a hypothesis makes; None where they are of another shape."""
        got = self.judged.got[name]
        if made[name].shape != got.shape:
            return None
        bits = comparable(made[name], self.judged.outputs[name].codes)
        short = self.bits(name)[0].shape[0] - bits.shape[0]
        return torch.nn.functional.pad(bits, (0, short), value=NOTHING) if short else bits

    def fit(self, made: Outputs, names: list[str] | None = None) -> Fit | None:
        """Return how a hypothesis fits, None where it leaves something unexplained."""
        if not self.possible(made, names):
            return None
        hit, missed = {}, {}
        for name in self.names if names is None else names:
            _, want, bad = self.bits(name)
            other, live = self.of_made(name, made), self.judged.live.get(name)
            if other is None:
                return None
            spared = (other != want) & ~bad
            if live is not None:
                spared &= live.view(-1, *[1] * (spared.dim() - 1))
            hit[name], missed[name] = bad, spared
        explained = sum(int(m.sum()) for m in hit.values())
        left = sum(int(m.sum()) for m in missed.values())
        if not left:
            return Fit(explained=explained, missed=0)
        if explained < FEW or self._constant(hit):
            return None
        where = apart(self.labels, hit, missed)
        return None if where is None else Fit(explained=explained, missed=left, where=where)

    def _constant(self, hit: Mapping[str, Tensor]) -> bool:
        """Whether all differing outputs are one value, which says nothing of where it is from."""
        values = [torch.unique(self.bits(name)[0][mask]) for name, mask in hit.items()]
        return all(value.numel() <= 1 for value in values)

    def right(self, made: Outputs) -> int:
        """Return how many differing outputs a hypothesis has right."""
        count = 0
        for name in self.differing:
            got, _, bad = self.bits(name)
            other = self.of_made(name, made)
            count += 0 if other is None else int(((other == got) & bad).sum())
        return count

    def explains_some(self, made: Outputs) -> bool:
        """Whether a hypothesis has some differing outputs right that are no constant."""
        for name in self.differing:
            got, _, bad = self.bits(name)
            other = self.of_made(name, made)
            if other is not None:
                same = got[(other == got) & bad]
                if same.numel() >= FEW and bool((same != same[0]).any()):
                    return True
        return False

    def places(
        self, made: Outputs, left: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, str, dict[str, Tensor]]]:
        """Yield (outputs explained, where, masks) of places that a hypothesis explains wholly.

        ``left`` are the differing outputs that nothing explains yet; a place is an expert, a k, a
        token, a block of columns: there every output is as the hypothesis makes it.
        """
        equal = {}
        for name in left:
            other = self.of_made(name, made)
            if other is None:
                return
            equal[name] = other == self.bits(name)[0]
        for way in self.labels:
            if not left.keys() <= way.along.keys() or way.texts:
                continue
            some = way.of(left) or set()
            wrong = way.of({name: ~mask & self._live(name, mask) for name, mask in equal.items()})
            chosen = some - (wrong or set())
            if chosen and way.plain(chosen):
                masks = {n: left[n] & way.where(n, chosen, left[n]) for n in left}
                count = sum(int(mask.sum()) for mask in masks.values())
                if count >= FEW:
                    yield count, way.words(chosen), masks

    def _live(self, name: str, like: Tensor) -> Tensor:
        live = self.judged.live.get(name)
        if live is None:
            return torch.ones_like(like)
        return live.view(-1, *[1] * (like.dim() - 1)).expand(like.shape)

    @cached_property
    def labels(self) -> list[Labels]:
        """The ways to say where outputs lie."""
        return labels_of(self.judged, {name: self.bits(name)[0].shape for name in self.names})

    def part(self) -> Part | None:
        """Return a few units, most of them differing; None where there are few or none."""
        stage, case, inputs = self.judged.stage, self.judged.case, self.judged.inputs
        count = stage.units(inputs)
        outputs = sum(tensor.numel() for tensor in self.judged.got.values())
        most = 1 if stage.partial else max(1, min(UNITS, MANY * count // max(outputs, 1)))
        if count <= most + most // 3:
            return None
        device = next(iter(self.judged.got.values())).device
        whole = stage.some(case, inputs, torch.arange(count, device=device))
        bad = torch.zeros(count, dtype=torch.bool, device=device)
        shown = []
        for name in self.differing:
            rows = whole.rows.get(name)
            if rows is not None and rows.numel():
                wrong = self.bits(name)[2].flatten(1).any(1)[rows]
                unit = torch.arange(rows.numel(), device=device) * count // rows.numel()
                bad[unit[wrong]] = True
                shown.append(torch.unique(unit[wrong]))
        if not shown:
            return None
        each = -(-most // len(shown))
        others = spread((~bad).nonzero()[:, 0], most // 3)
        chosen = torch.unique(torch.cat([*(spread(units, each) for units in shown), others]))
        return Part(scene=self, chosen=chosen)


def spread(index: Tensor, most: int) -> Tensor:
    """Return at most so many of some indices, first and last among them."""
    if index.numel() <= most:
        return index
    if most < 2:
        return index[:most]
    step = (index.numel() - 1) / (most - 1)
    return index[[round(n * step) for n in range(most)]]


class Part:
    """A few units of a scene as a scene of their own."""

    def __init__(self, scene: Scene, chosen: Tensor) -> None:
        judged = scene.judged
        subset = judged.stage.some(judged.case, judged.inputs, chosen)
        rows = {n: r for n, r in subset.rows.items() if n in judged.got}
        self.case, self.inputs, self.chosen = subset.case, subset.inputs, chosen
        self.scene = Scene(
            judged=Judged(
                who=judged.who, stage=judged.stage, case=subset.case, inputs=subset.inputs,
                got={name: judged.got[name][r] for name, r in rows.items()},
            ),
            want={name: scene.want[name][r] for name, r in rows.items()},
        )  # fmt: skip


def apart(
    labels: list[Labels], hit: Mapping[str, Tensor], missed: Mapping[str, Tensor]
) -> str | None:
    """Return the words that tell where something holds from where it does not; None for no such."""
    for way in labels:
        yes, no = way.of(hit), way.of(missed)
        if yes is not None and no is not None and not yes & no and way.plain(yes):
            return way.words(yes)
    return None
