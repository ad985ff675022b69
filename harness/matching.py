"""``assert_matches``: tensors of anybody's own test against a recipe, bit for bit.

No kernel is registered and nothing is called: inputs and outputs are plain tensors by name.  What
is compared, and what a red sentence says, is what ``parity check`` compares and says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moe_parity.harness.cases.grid import words_of
from moe_parity.harness.checks.exact import every_stage
from moe_parity.harness.checks.judged import Judged
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.evidence.dump import own_words
from moe_parity.harness.evidence.given import demand_chip, judged_of, recipes_of, stage_of
from moe_parity.harness.session import recorder
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Recipe, Stage

WHO = "the given tensors"
"""What a sentence calls the kernel, where no marker or parameter of the test names it."""


def assert_matches(
    stage: str,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    *,
    recipe: str | Recipe | Sequence[str | Recipe],
    case: str = "",
) -> None:
    """Assert that outputs are what a recipe makes of inputs, every bit of them.

    ``stage`` is one of docs/stages.md, or ``"layer"``; ``inputs`` and ``outputs`` are tensors by
    the names of docs/identify.md, on one device, CPU or CUDA, FP8 as float8_e4m3fn or uint8.
    ``recipe`` is a name (``parity recipes`` lists them), a ``Recipe``, or several, of which one has
    to hold throughout.  ``case`` takes the words of a case that tensors do not say, joined by
    hyphens: ``"ue8m0-col"``, ``"c7"``, ``"ep1of4"``.  Sizes are the tensors' own; where only the
    routing would say how many experts there are, ``"e8"`` does.  A layer may give ``out`` alone; of
    what it shows besides, each stage is judged on its own upstream tensors.

    A running test of a session with the pytest plugin gets a record for each stage.

    Raises AssertionError with one sentence: the cause, the place, its bits got and expected, how
    many differ.  Raises ParityError, a ValueError, in a sentence for what cannot be judged: names,
    shapes, dtypes, strides or devices that do not fit, ids that are no expert's, scales that are
    NaN, and where there is nothing to compare.
    """
    __tracebackhide__ = True
    start = time.perf_counter()
    owner = stage_of(stage)
    with torch.no_grad():
        recipes = recipes_of(owner, recipe)
        judged = judged_of(owner, inputs, outputs, own_words(case), _who())
        demand_chip(judged, recipes)
        verdicts = list(_verdicts(judged, recipes))
    for verdict in verdicts:
        _demand_compared(owner, verdict)
    seconds = (time.perf_counter() - start) / len(verdicts)
    for verdict in verdicts:
        _record(judged, verdict, seconds)
    red = next((verdict for verdict in verdicts if verdict.failed), None)
    if red is not None:
        raise AssertionError(red.message)


def _verdicts(judged: Judged, recipes: tuple[Recipe, ...]) -> Iterator[Verdict]:
    """Yield the verdicts by the first recipe that holds in all stages, or else by the nearest."""
    nearest, least = recipes[0], -1
    for recipe in recipes if len(recipes) > 1 else ():
        # why none holds is looked for once, below
        found = list(every_stage(judged, (recipe,), search=False))
        if not any(verdict.failed for verdict in found):
            yield from found
            return
        wrong = sum(verdict.differing for verdict in found)
        if least < 0 or wrong < least:
            nearest, least = recipe, wrong
    yield from every_stage(judged, (nearest,))


def _record(judged: Judged, verdict: Verdict, seconds: float) -> None:
    """Leave a record in the running test, where there is one under the plugin."""
    running = recorder.running()
    if running is None:
        return
    told = verdict.fields()
    stage = told.pop("stage") or judged.stage.name
    told.pop("sequence"), told.pop("config")  # a call's, and nothing was called
    told["check"] = f"exact_{stage}"
    words = words_of(judged.stage, judged.case) | {"stage": stage}
    device = judged.stage.handed(judged.inputs)[0].device.type
    shape = judged.stage.size_words(judged.case)
    running.add(
        told | words | {"shape": shape, "device": device, "bound": "exact", "seconds": seconds}
    )


def _who() -> str:
    running = recorder.running()
    item = None if running is None else running.item
    return str(item.labels.get("kernel") or WHO) if item is not None else WHO


def _demand_compared(stage: Stage[object], verdict: Verdict) -> None:
    if not verdict.compared:
        where = verdict.stage or str(stage)
        raise ParityError(
            f"{where}: no output belongs to an expert of this rank: nothing to compare."
        )
