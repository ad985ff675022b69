"""Where nothing known explains a difference: which outputs differ, and what their values equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_parity.harness.calling.poison import OWN, POISONS, SCRATCH
from moe_parity.harness.checks.compare import fitted, ordered
from moe_parity.harness.diagnosis.cause import Cause, CauseKind
from moe_parity.harness.diagnosis.scene import FEW, Scene, spread
from moe_parity.references.arithmetic.formats import to_f32
from moe_parity.references.language.stage import Kind, Output

SHIFTS = 8
"""Rows and columns up to which a shift is looked for."""
CLOSE = 2.0**-6
"""How nearly a ratio must be constant to be called one."""


def describe(scene: Scene) -> Cause:
    """Return what differs and what it equals, as a cause of the kind ``pattern``."""
    name = scene.differing[0]
    output = scene.judged.outputs[name]
    got, want, bad = scene.bits(name)
    values = fitted(scene.judged.got[name], scene.want[name])
    settled = scene.judged.settled
    none = ("unknown", "written differently" if settled else "")
    slug, equal = next(_equal(output, got, want, bad, values, settled), none)
    place = _place(scene, name)
    parts = ", ".join(filter(None, (equal, place)))
    words = f"unexplained {name}" + (f", {parts}," if parts else "")
    return Cause(kind=CauseKind.PATTERN, name=slug, words=words)


def _place(scene: Scene, name: str) -> str:
    """Return the narrowest ways to say where an output differs, at most one a dimension."""
    bad = {name: scene.bits(name)[2]}
    said: dict[int, tuple[float, str]] = {}
    for way in scene.labels:
        chosen = way.of(bad)
        every = torch.unique(way.along[name][1]) if name in way.along else []
        if chosen and len(chosen) < len(every) and way.plain(chosen):
            share = len(chosen) / len(every)
            dim = way.along[name][0]
            if dim not in said or share < said[dim][0] / 2:
                said[dim] = share, way.words(chosen)
    return ", ".join(words for _, words in said.values())


def _equal(
    output: Output, got: Tensor, want: Tensor, bad: Tensor, values: tuple[Tensor, Tensor],
    settled: bool,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield (name, words) of what the differing elements equal, the surest first.

    ``settled`` says that the kernel wrote them: what looks like poison is a NaN of its own.
    """
    seen, right = got[bad], want[bad]
    zero = 0x7F if output.kind is Kind.CODES else (1 << (8 * values[0].element_size() - 1)) - 1
    if output.kind is not Kind.INTEGERS and bool(((seen & zero) == 0).all()):
        yield "zeros", "all zero"
    if settled and output.kind is not Kind.INTEGERS and _all_nan(output, values[0][bad]):
        yield "nan", "written with NaN"
    for byte in () if settled else (POISONS[0], POISONS[1], SCRATCH[POISONS[1]], *OWN):
        if bool(_is_poison(values[0][bad], byte).all()):
            yield "poison", "as their memory was before the call"
    if bool((seen == seen[0]).all()) and seen.numel() > 1:
        value = values[0][bad].flatten()[0]
        said = f"{float(value):.6g}" if value.is_floating_point() else f"{int(value)}"
        yield "constant", f"all the same, {said}"
    if got.dim() == 2 and torch.unique(seen).numel() > 1 and seen.numel() >= FEW:
        yield from _moved(got, want, bad)
    if output.kind is not Kind.INTEGERS:
        yield from _numbers(output, seen, right, values, bad)


def _decoder(output: Output, values: Tensor) -> Callable[[Tensor], Tensor]:
    return output.codes.decode if values.dtype is torch.uint8 else to_f32


def _all_nan(output: Output, values: Tensor) -> bool:
    return bool(torch.isnan(_decoder(output, values)(values)).all())


def _is_poison(values: Tensor, byte: int) -> Tensor:
    raw = values.contiguous().view(torch.uint8)
    return raw == byte


def _moved(got: Tensor, want: Tensor, bad: Tensor) -> Iterator[tuple[str, str]]:
    """Yield a shift of rows or of columns, or a row that is another one."""
    for dim, noun in ((0, "row"), (1, "column")):
        for step in (*range(1, SHIFTS + 1), *range(-1, -SHIFTS - 1, -1)):
            if abs(step) < got.shape[dim] and bool((want.roll(-step, dim) == got)[bad].all()):
                side = "after" if step > 0 else "before"
                yield (
                    "another_" + noun,
                    f"those expected {abs(step)} {noun}{'s' * (abs(step) > 1)} {side}",
                )
    rows = bad.any(1).nonzero()[:, 0]
    other = [_row_like(got[row], want) for row in spread(rows, 4).tolist()]
    if all(found is not None for found in other):
        row, found = int(rows[0]), other[0]
        yield "another_row", f"the values of other rows (row {row} holds what row {found} should)"
    ordered_rows = [
        bool((got[row].sort().values == want[row].sort().values).all())
        for row in spread(rows, 4).tolist()
    ]
    if all(ordered_rows):
        yield "other_order", "the values of their row in another order"


def _row_like(row: Tensor, want: Tensor) -> int | None:
    same = (want == row).all(1).nonzero()
    return int(same[0, 0]) if len(same) else None


def _numbers(
    output: Output, seen: Tensor, right: Tensor, values: tuple[Tensor, Tensor], bad: Tensor
) -> Iterator[tuple[str, str]]:
    decode = _decoder(output, values[0])
    left, target = (decode(t[bad]).double() for t in values)
    if _all_nan(output, values[0][bad]):
        yield "nan", "all NaN"
    if bool((left == -target).all()):
        yield "negated", "of the other sign"
    width = 8 * values[0].element_size()
    distance = (ordered(seen, width) - ordered(right, width)).abs()
    if int(distance.max()) == 1:
        nearer = bool((left.abs() <= target.abs()).all())
        way = "cut, not rounded" if nearer else "another rounding"
        yield ("cut" if nearer else "one_step"), f"each next to the one expected ({way})"
    fine = torch.isfinite(left) & torch.isfinite(target) & (target != 0)
    ratio = (left / target)[fine]
    if ratio.numel() > 1 and fine.all():
        middle = float(ratio.median())
        if middle and bool(((ratio / middle - 1).abs() < CLOSE).all()):
            yield "factor", f"each about {middle:.4g} times the one expected"


__all__ = ["describe"]
