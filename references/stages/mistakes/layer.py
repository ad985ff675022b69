"""Mistakes of a whole layer of which only the output is seen: those of its stages, carried on.

Of a stage's many mistakes only those are tried here that a whole layer was seen to make; a kernel
that returns its trace has all of them tried, stage by stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from moe_parity.references.language.case import Case
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Recipe
from moe_parity.references.language.stage import Stage

Trace = Mapping[str, Tensor]
Onward = Callable[[str, Mapping[str, Tensor | None], int], dict[str, Tensor]]
"""(stage, its outputs, of how many copies of the batch) -> a trace."""
TOGETHER = 4
"""Tokens up to which all mistakes of a stage are carried on at once."""
Step = tuple[Stage[Any], Case, Any]
"""A stage inside, its case and its inputs."""
CARRIED = {
    "act_quant": (
        "another_maximum", "amax_of_neighbour", "payload", "power_lost", "power_unasked",
        "scale_of_neighbour", "transposed_scales", "row_stride", "frexp_power", "amax_of_the_row",
    ),
    "fc1": (
        "k_tail", "scale_of_neighbour", "scale_of_another_expert", "scale_lost", "wrong_expert",
        "global_id", "gate_up_swapped", "gate_up_interleaved", "transposed_scales",
        "narrow_accumulator", "duplicate_lost", "pair_for_token", "weights_here", "bias",
        "scale_of_the_first",
    ),
    "swiglu_quant": (
        "another_limit", "clamp_gate_only", "clamp_up_only", "alpha", "beta", "no_silu", "sigmoid",
        "another_maximum", "payload", "power_lost", "power_unasked", "transposed_scales",
        "gate_up_swapped", "amax_of_neighbour", "row_stride",
    ),
    "fc2": (
        "k_tail", "scale_of_neighbour", "scale_of_another_expert", "scale_lost", "wrong_expert",
        "transposed_scales", "narrow_accumulator", "weights_here", "bias", "token_for_pair",
        "scale_stride",
    ),
    "combine": (
        "weights_lost", "weights_squared", "weights_normalized", "weight_of_neighbour", "factor",
        "mean", "pair_lost", "duplicate_lost", "foreign_pair", "narrow_accumulator", "sum_order",
        "weights_rounded", "weight_of_another_token", "last_row_lost", "last_column_lost",
        "row_of_neighbour", "truncated", "rank_ignored", "row_stride",
    ),
}  # fmt: skip
"""Stage -> the names of the mistakes that are carried on to the layer's output."""


def mistakes(
    steps: Callable[[Trace], Sequence[Step]],
    onward: Onward,
    right: Callable[[], Trace],
    recipe: Recipe,
) -> Iterator[Mistake]:
    """Yield the mistakes of a layer.

    ``steps`` gives the stages with their inputs from a trace, ``onward`` what a layer gives once a
    stage has given something, several of them side by side, ``right`` the trace without a mistake.
    """
    made = {step[0].name: step for step in steps(right())}
    for name, (stage, case, inputs) in reversed(made.items()):
        own = [m for m in stage.mistakes(case, inputs, recipe) if m.name in CARRIED[name]]
        together = _together(name, own, onward, right)
        for number, mistake in enumerate(own):
            yield Mistake(
                name=mistake.name, words=f"{mistake.words.rstrip(',')} (its {name})",
                outputs=partial(together, number), local=mistake.local, late=mistake.late,
                figures=mistake.figures,
            )  # fmt: skip
    yield from _elsewhere(made, onward, recipe)
    yield from _exchanged(made, steps, onward, recipe)


def _together(
    name: str, own: Sequence[Mistake], onward: Onward, right: Callable[[], Trace]
) -> Callable[[int], Trace]:
    """Return what gives the trace of one mistake of a stage.

    Of a few tokens all mistakes are carried on at once, as so many more tokens: a stage's reference
    costs little more for a hundred rows than for one.
    """

    @lru_cache(maxsize=1)
    def every() -> list[dict[str, Tensor]]:
        outputs = [mistake.outputs() for mistake in own]
        joined = {key: torch.cat([o[key] for o in outputs]) for key in outputs[0]}
        trace = onward(name, joined, len(own))
        split = {key: tensor.chunk(len(own)) for key, tensor in trace.items()}
        return [{key: parts[n] for key, parts in split.items()} for n in range(len(own))]

    def one(number: int) -> Trace:
        if right()["out"].shape[0] <= TOGETHER:
            return every()[number]
        return onward(name, own[number].outputs(), 1)

    return one


def _elsewhere(made: Mapping[str, Step], onward: Onward, recipe: Recipe) -> Iterator[Mistake]:
    """Yield routing weights that are applied in the first GEMM and lost in the sum."""
    for name in ("fc1", "fc2"):
        stage, case, inputs = made[name]
        for mistake in stage.mistakes(case, inputs, recipe):
            if mistake.name == "weights_here":
                yield Mistake(
                    name="weights_elsewhere",
                    outputs=partial(_not_in_the_sum, onward, name, mistake),
                    words=f"{mistake.words.replace('this GEMM', name)}, not in the sum,",
                )  # fmt: skip


def _not_in_the_sum(onward: Onward, name: str, wrong: Mistake) -> Trace:
    trace = onward(name, wrong.outputs(), 1)
    return onward("fc2", {"rows": trace["fc2"], "weights": None}, 1)


def _exchanged(
    made: Mapping[str, Step],
    steps: Callable[[Trace], Sequence[Step]],
    onward: Onward,
    recipe: Recipe,
) -> Iterator[Mistake]:
    """Yield the two scale formats of a layer taken for each other, where they differ."""
    if not {"act_quant", "swiglu_quant"} <= made.keys():
        return
    first, case, inputs = made["act_quant"]
    second, other = made["swiglu_quant"][:2]
    if case.scale is other.scale:
        return

    def outputs() -> Trace:
        wrong = dataclasses.replace(case, scale=other.scale)
        trace = onward(first.name, first.reference(wrong, inputs, recipe), 1)
        inside = next(step[2] for step in steps(trace) if step[0] is second)
        later = second.reference(dataclasses.replace(other, scale=case.scale), inside, recipe)
        after = onward(second.name, later, 1)
        kept = {name: trace[name] for name in ("act_codes", "act_scales", "fc1")}
        return {**after, **kept}

    yield Mistake(
        name="formats_exchanged", outputs=outputs,
        words="the scale formats of the two quantizations exchanged,",
    )  # fmt: skip
