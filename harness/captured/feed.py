"""Captured tensors as the inputs of a stage: of the one that was captured, and of those inside.

What the model gave at the stage before is taken where the capture has it; where it has not, the
recipe of the kernel under test, else ours, computes it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_parity.harness.captured.file import Captured, read
from moe_parity.kernels import Kernel
from moe_parity.references.errors import ParityError
from moe_parity.references.language import (
    Case,
    Recipe,
    ScaleFormat,
    ScaleLayout,
    Skip,
    Stage,
    Why,
)
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import LAYER
from moe_parity.references.stages.layer.stage import steps_of

INSIDE = (
    "act_quant", "align", "permute", "quant_gemm", "fc1", "swiglu", "swiglu_quant", "fc2",
    "combine", "layer",
)  # fmt: skip
"""The stages that a captured layer feeds."""
_SIZES = ("m", "e", "k", "h", "i")


class Declined(ParityError):
    """A kernel that does not take the captured tensors here; ``why`` is the kind of its reason."""

    why = Why.UNSUPPORTED


def feeds(captured: Captured, stage: Stage[Any]) -> bool:
    """Whether a stage takes its inputs from the capture."""
    if captured.stage is stage:
        return True
    return captured.stage is LAYER and stage.name in INSIDE


def case_from(path: Path | str, kernel: Kernel, device: str) -> tuple[Case, Any]:
    """Return the case and the inputs that a kernel is called with on a captured file.

    Raises ParityError, in a sentence, for a bad file, and for a kernel that it cannot feed or that
    does not take the case here.
    """
    return fed(read(path), kernel, device)


def fed(
    captured: Captured, kernel: Kernel, device: str, memory: str | None = None
) -> tuple[Case, Any]:
    """Return the case and the inputs that a kernel is called with.

    The inputs lie on the device, or in ``memory``.  Raises ParityError as ``case_from`` does.
    """
    words, tensors = named(captured, kernel, device)
    return kernel.stage.given(words, {n: t.to(memory or device) for n, t in tensors.items()})


def named(captured: Captured, kernel: Kernel, device: str) -> tuple[Case, dict[str, Tensor]]:
    """Return what ``Stage.given`` takes: the words of the case, and the inputs by name.

    Of a quantizer the layout of the scales is the first that it takes, packed ones too, as no
    captured tensor says it.  Raises ParityError as ``case_from`` does.
    """
    stage = kernel.stage
    if not feeds(captured, stage):
        takes = f"{captured.stage}" if captured.stage is not LAYER else ", ".join(INSIDE)
        raise Declined(
            f"{captured.path.name} holds {captured.stage} and feeds {takes}; {kernel.name} is a "
            f"kernel of {stage}."
        )
    refusal: Skip | None = None
    for words in _words(captured.case, stage):
        try:
            stage.check(_sized(words, captured.case, stage))
        except ParityError:
            continue
        reason = kernel.why_not(_sized(words, captured.case, stage), device)
        if reason is None:
            tensors = _named(captured, stage, _upstream(kernel, captured.case, device))
            case, _ = stage.given(words, tensors)
            stage.check(case)
            reason = kernel.why_not(case, device)
            if reason is None:
                return words, tensors
        refusal = refusal or reason
    declined = Declined(f"{kernel.name} does not take {captured.path.name} here: {refusal}")
    if refusal is not None:
        declined.why = refusal.why
    raise declined


def _words(case: Case, stage: Stage[Any]) -> Iterator[Case]:
    """Yield what a captured case asks of a stage: the words that it reads."""
    own = {n: getattr(case, n) for n in stage.reads if n == "e" or n not in _SIZES}
    if stage.name in ("swiglu_quant", "fc2"):
        own |= {"scale": case.mid}
    plain = Case(**own)
    if stage.name not in ("act_quant", "swiglu_quant"):
        yield plain
        return
    packed = (ScaleFormat.UE8M0_PACKED,) if plain.scale.is_power_of_two else ()
    for scale, layout in itertools.product((plain.scale, *packed), ScaleLayout):
        yield dataclasses.replace(plain, scale=scale, layout=layout)


def _sized(words: Case, case: Case, stage: Stage[Any]) -> Case:
    """Return words with the sizes that the stage's own tensors will have, about."""
    sizes = {name: getattr(case, name) for name in _SIZES if name in stage.reads}
    if stage.name in ("swiglu", "swiglu_quant"):
        sizes["m"] = case.m * case.k
    return dataclasses.replace(words, **sizes)


def _upstream(kernel: Kernel, case: Case, device: str) -> Recipe:
    """Return the recipe of what comes before a kernel: its own where that says all of a layer."""
    recipe = kernel.recipes(case, device)[0]
    return recipe if LAYER.described_by(recipe) else OURS


def _named(captured: Captured, stage: Stage[Any], recipe: Recipe) -> dict[str, Tensor]:
    """Return a stage's inputs by name."""
    if captured.stage is stage:
        return dict(captured.given)
    case, inputs = LAYER.given(captured.case, captured.given)
    trace: dict[str, Tensor] = dict(captured.seen)
    batch, experts = inputs.batch, inputs.experts
    if inputs.x_scale is not None:
        trace |= {"act_codes": batch.x, "act_scales": inputs.x_scale}
    before = {"permute": "fc1", "swiglu": "swiglu_quant"}.get(stage.name, stage.name)
    if stage.name not in ("align", "quant_gemm"):
        _run_up_to(before, case, inputs, recipe, trace)
    routed = {"ids": batch.ids} | ({} if batch.weights is None else {"weights": batch.weights})
    w13 = {"w": experts.w13, "w_scale": experts.w13_scale}
    act = {"codes": trace.get("act_codes"), "scales": trace.get("act_scales")}
    mid = {"a": trace.get("mid_codes"), "a_scale": trace.get("mid_scales")}
    rows = {"rows": trace.get("fc1"), "expert": inputs.expert}
    found: dict[str, dict[str, Any]] = {
        "act_quant": {"x": batch.x},
        "align": {"ids": batch.ids},
        "permute": {"ids": batch.ids, **act},
        "quant_gemm": {"x": batch.x, **{name: tensor[0] for name, tensor in w13.items()}},
        "fc1": {"a": act["codes"], "a_scale": act["scales"], **w13, **routed},
        "swiglu": rows,
        "swiglu_quant": rows,
        "fc2": {**mid, "w": experts.w2, "w_scale": experts.w2_scale, **routed},
        "combine": {"rows": _by_token(trace.get("fc2"), batch.ids), **routed},
    }
    return {name: tensor for name, tensor in found[stage.name].items() if tensor is not None}


def _by_token(rows: Tensor | None, ids: Tensor) -> Tensor | None:
    return None if rows is None else rows.view(*ids.shape, rows.shape[-1])


def _run_up_to(
    name: str, case: Case, inputs: Any, recipe: Recipe, trace: dict[str, Tensor]
) -> None:
    """Complete a trace up to what a stage takes."""
    for stage, own, upstream, names in steps_of(case):
        if stage.name == name:
            return
        if not set(names.values()) <= trace.keys():
            made: Mapping[str, Tensor] = stage.reference(own, upstream(inputs, trace), recipe)
            trace |= {theirs: made[ours] for ours, theirs in names.items()}
