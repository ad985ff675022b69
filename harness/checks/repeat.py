"""One case many times: what differs between runs, by row and tile.

A race that only a real GPU shows differs in some runs and not in others.  Inputs and the contents
of memory are the same every time; on the virtual GPU the programs run in another order each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from moe_parity.harness.calling.run import Ran, run
from moe_parity.harness.checks.compare import mask
from moe_parity.harness.checks.flow import BROKEN, raised
from moe_parity.harness.checks.verdict import Verdict, caused, found
from moe_parity.harness.diagnosis.cause import Cause, CauseKind
from moe_parity.kernels import Kernel
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.references.language.stage import Output

NAME = "repeat"
TILE = 128
"""Columns of a tile: a group of a quantizer, a block of a GEMM."""
SAID = 6
"""Tiles that a sentence names."""

Tile = tuple[str, tuple[int, ...]]
"""An output and the place of a tile in it: all indices but the last, and the group of columns."""


def repeat(kernel: Kernel, case: Case, device: str, times: int) -> Verdict:
    """Run a case ``times`` times; red where a run differs from the first, with rows and tiles.

    Raises ParityError for less than two runs.
    """
    if times < 2:
        raise ParityError(f"a case is repeated at least 2 times, got {times}.")
    stage, inputs = kernel.stage, kernel.stage.inputs(case, device)
    outputs, live = stage.outputs(case, inputs), stage.live(case, inputs)
    first: Ran | None = None
    elements: Counter[Tile] = Counter()
    runs: Counter[Tile] = Counter()
    compared = different = 0
    for n in range(times):
        try:
            with _order(kernel, case, device, n):
                ran = run(kernel, case, inputs)
        except BROKEN as error:
            return raised(kernel, case, error, NAME)
        if first is None:
            first = ran
            continue
        tiles = _tiles(outputs, ran.outputs, first.outputs, live)
        compared += sum(t.numel() for t in ran.outputs.values())
        different += bool(tiles)
        elements += tiles
        runs.update(tiles.keys())
    if not elements:
        return found(NAME, "", compared=compared)
    worst = sorted(elements, key=lambda tile: (-runs[tile], tile))
    places = [
        f"{_words(outputs, tile)} ({elements[tile]} elements in {runs[tile]} runs)"
        for tile in worst[:SAID]
    ]
    places += [f"{len(worst) - SAID} more"] if len(worst) > SAID else []
    text = (
        f"{stage} of {kernel.name} on {case.id} is not repeatable: {different} of {times - 1} runs "
        f"differ from the first: {'; '.join(places)}."
    )
    cause = Cause(kind=CauseKind.MEMORY, name="not_repeatable", words="not repeatable")
    return caused(found(NAME, text, compared=compared, differing=elements.total()), cause)


def _order(kernel: Kernel, case: Case, device: str, n: int) -> AbstractContextManager[object]:
    if kernel.runs_on(device) != "virtual_gpu" or not n:
        return nullcontext()
    from moe_parity.kernels.virtual_gpu import reversed_order, shuffled

    return reversed_order() if n == 1 else shuffled(case.seed + n)


def _tiles(
    outputs: Mapping[str, Output],
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
) -> Counter[Tile]:
    """Count the elements that differ, by tile."""
    tiles: Counter[Tile] = Counter()
    for name in got:
        bad = mask(outputs[name], got[name], want[name], live.get(name))
        for index in bad.nonzero().tolist():
            tiles[name, (*index[:-1], index[-1] // _width(outputs[name]))] += 1
    return tiles


def _width(output: Output) -> int:
    return TILE if output.axes[-1] == "column" else 1


def _words(outputs: Mapping[str, Output], tile: Tile) -> str:
    """Return for instance ``codes at token 3, columns 128 to 255``."""
    name, index = tile
    output = outputs[name]
    width, size = _width(output), output.shape[-1]
    parts = [f"{axis} {n}" for axis, n in zip(output.axes[:-1], index[:-1], strict=True)]
    start = index[-1] * width
    stop = min(start + width, size) - 1
    parts.append(f"columns {start} to {stop}" if width > 1 else f"{output.axes[-1]} {start}")
    return f"{name} at {', '.join(parts)}"
