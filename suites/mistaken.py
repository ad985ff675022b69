"""Cases in which every mistake of the catalogue shows, and kernels that make one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.kernels import Call
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout, bits_of, pack_ue8m0
from moe_parity.references.language import Case, Check, Contract, Mistake, Recipe, Stage, Values
from moe_parity.references.language.case import Gate, Hazard, InputDtype, Routing
from moe_parity.references.recipes.ours import NO_ROUNDING, OURS
from moe_parity.references.recipes.vllm import VLLM_FUSED_SILU, VLLM_TRITON
from moe_parity.references.stages import STAGES
from moe_parity.suites.planted import CASES, kernel_of

EXACT = Contract(checks=frozenset({Check.EXACT}))
Outputs = Mapping[str, Tensor]
Key = tuple[str, str, int]
"""(name, words, which of the ways to make it) of a mistake."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A case with the inputs and the recipe of a kernel that goes wrong."""

    case: Case
    stage: Stage[Any]
    recipe: Recipe
    change: Callable[[Any], Any] | None = None
    """What is changed in the inputs of the case."""
    kept: dict[Recipe, Outputs] = field(default_factory=dict)
    """The outputs of recipes on these inputs."""

    @cached_property
    def inputs(self) -> Any:
        """The inputs."""
        made = self.stage.inputs(self.case)
        return self.change(made) if self.change else made

    @cached_property
    def right(self) -> Outputs:
        """The outputs without a mistake."""
        return self.stage.reference(self.case, self.inputs, self.recipe)

    @cached_property
    def mistakes(self) -> dict[Key, Mistake]:
        """The mistakes that these inputs allow, each of which makes its outputs once."""
        seen: Counter[tuple[str, str]] = Counter()
        found = {}
        for mistake in self.stage.mistakes(self.case, self.inputs, self.recipe):
            words = mistake.name, mistake.words
            once = lru_cache(maxsize=1)(mistake.outputs)
            found[*words, seen[words]] = dataclasses.replace(mistake, outputs=once)
            seen[words] += 1
        return found

    def differing(self, made: Outputs, other: Outputs | None = None) -> int:
        """Count the outputs that are not those without a mistake, or not those of another."""
        live = self.stage.live(self.case, self.inputs)
        total = 0
        for name, right in (self.right if other is None else other).items():
            if name not in made:
                continue
            if made[name].shape != right.shape:
                return right.numel()
            size = right.element_size()
            a, b = (t.contiguous().view(torch.uint8) for t in (made[name], right))
            bad = (a != b).view(*right.shape, size).any(-1)
            total += int((bad[live[name]] if name in live else bad).sum())
        return total

    def said_before(self, made: Outputs) -> bool:
        """Whether a mistake that is tried earlier than the late ones gives the same bits."""
        early = (mistake for mistake in self.mistakes.values() if not mistake.late)
        return any(not self.differing(made, mistake.outputs()) for mistake in early)

    def remember(self, patch: pytest.MonkeyPatch) -> None:
        """Let the stage make its references and mistakes of these very inputs once.

        Both are pure functions, and each diagnosis of a setting asks for all of them again.
        """
        stage, reference, mistakes = self.stage, self.stage.reference, self.stage.mistakes

        def referred(case: Case, inputs: Any, recipe: Recipe) -> Outputs:
            if inputs is not self.inputs:
                return reference(case, inputs, recipe)
            if recipe not in self.kept:
                self.kept[recipe] = reference(case, inputs, recipe)
            return dict(self.kept[recipe])

        def made(case: Case, inputs: Any, recipe: Recipe) -> Iterator[Mistake]:
            if inputs is not self.inputs or recipe is not self.recipe:
                return mistakes(case, inputs, recipe)
            return iter(self.mistakes.values())

        patch.setattr(stage, "reference", referred)
        patch.setattr(stage, "mistakes", made)

    def verdict(self, made: Outputs) -> Verdict:
        """Return what the check ``exact`` says of a kernel with these outputs."""

        def run(call: Call) -> Any:
            copies = {}
            for name, output in self.stage.outputs(self.case, self.inputs).items():
                copies[name] = made[name].clone()
                if output.dtype is torch.int32 and copies[name].is_floating_point():
                    words = pack_ue8m0((bits_of(copies[name]) >> 23 & 0xFF).to(torch.uint8))
                    copies[name] = call.new(name).copy_(words)
            return copies["out"] if self.stage.partial else copies

        kernel = dataclasses.replace(kernel_of(str(self.stage), run, self.recipe), contract=EXACT)
        verdicts = list(check(kernel, self.case, "cpu", inputs=self.inputs))
        return verdicts[-1]


def _biased(inputs: Any) -> Any:
    shape = inputs.w.shape[:2]
    bias = random_bits.uniform(0, "bias", *shape, device="cpu")
    return dataclasses.replace(inputs, bias=4.0 * bias - 1.0)


def _cancelling(inputs: Any) -> Any:
    """Make the last two of three blocks of K cancel but for their scales, the first one zeros."""
    a, w, a_scale = inputs.a.clone(), inputs.w.clone(), inputs.a_scale.clone()
    a[:, :128] = 0
    a[:, 256:], w[:, :, 256:] = a[:, 128:256], w[:, :, 128:256] ^ 0x80
    a_scale[:, 2] = a_scale[:, 1] * (1.0 + 2.0**-20)
    w_scale = torch.cat([inputs.w_scale[:, :, :2], inputs.w_scale[:, :, 1:2]], 2)
    return dataclasses.replace(inputs, a=a, w=w, a_scale=a_scale, w_scale=w_scale)


def _at_the_ends(inputs: Any) -> Any:
    """Make the last element of the first tile the largest there, the first of the second."""
    x = inputs.x.clone()
    x[127, 127] = x[128, 0] = 8.0
    return dataclasses.replace(inputs, x=x)


def _cases() -> dict[str, list[Setting]]:
    aimed, ue8m0, strided = Values.AIMED, ScaleFormat.UE8M0, Hazard.STRIDED
    holes, repeated = Routing.HOLES, Routing.REPEATED
    rank = {"ep_rank": 1, "ep_size": 2}
    found: dict[str, list[Setting]] = {}

    def add(stage: str, *cases: Case, recipe: Recipe | None = None, change: Any = None) -> None:
        for case in cases:
            own = NO_ROUNDING if stage in ("align", "permute") else OURS
            one = Setting(case=case, stage=STAGES[stage], recipe=recipe or own, change=change)
            found.setdefault(stage, []).append(one)

    weight = Case(i=150, h=200, values=aimed)
    tile = Case(i=512, h=384, values=aimed, dtype=InputDtype.FP32)
    add(
        "weight_quant", weight, dataclasses.replace(weight, scale=ue8m0), tile,
        dataclasses.replace(tile, scale=ue8m0), dataclasses.replace(weight, hazard=strided),
        dataclasses.replace(weight, values=Values.NORMAL),
    )  # fmt: skip
    add("weight_quant", Case(i=256), change=_at_the_ends)
    quant = Case(m=24, h=512, values=aimed, dtype=InputDtype.FP32)
    add(
        "act_quant", quant, dataclasses.replace(quant, scale=ue8m0),
        dataclasses.replace(quant, hazard=strided), dataclasses.replace(quant, m=160),
        Case(m=24, h=640, values=Values.WIDE, scale=ScaleFormat.UE8M0_PACKED),
    )  # fmt: skip
    routed = Case(m=20, e=6, k=3)
    for stage in ("align", "permute"):
        wide = dataclasses.replace(
            routed, h=256, values=aimed if stage == "permute" else Values.NORMAL
        )
        add(
            stage, wide, dataclasses.replace(wide, routing=holes, **rank),
            dataclasses.replace(wide, routing=repeated, **rank),
        )  # fmt: skip
        add(stage, dataclasses.replace(wide, m=96, e=10, k=2))
    add(
        "align",
        Case(m=3, e=8, k=2),
        Case(m=200, e=2, k=2),
        Case(m=32, e=3, k=1, routing=Routing.ONE),
    )
    add("permute", Case(m=96, e=2, k=2, h=256))
    add("permute", Case(m=20, e=6, k=3, h=256, values=aimed, hazard=strided))
    large = {stage: CASES[stage] for stage in ("fc1", "fc2")}
    for stage, sizes in (("fc1", {"h": 384, "i": 128}), ("fc2", {"h": 256, "i": 384})):
        small = Case(m=4, e=3, k=2, values=aimed, **sizes)
        add(
            stage, small, dataclasses.replace(small, e=6, routing=holes, **rank, m=12),
            dataclasses.replace(small, routing=repeated),
            dataclasses.replace(small, hazard=strided),
            large[stage],
        )  # fmt: skip
        add(stage, small, change=_biased)
        add(stage, Case(m=66, e=2, k=2, h=256, i=256))
        add(stage, dataclasses.replace(small, values=Values.NORMAL), change=_cancelling)
        add(stage, Case(m=3, e=6, k=9, **sizes))  # more pairs of a token than 4 and 8
    add("fc1", Case(m=4, e=2, k=2, h=512, i=512))
    add("fc2", Case(m=4, e=3, k=2, h=256, i=384, values=aimed), recipe=VLLM_TRITON)
    add("fc1", Case(m=3, e=2, k=1, h=128, i=116))  # N = 232: past every tile
    add("fc2", Case(m=3, e=2, k=1, h=232, i=128))
    gate = Case(m=32, i=256, clamp=9.97, values=aimed)
    for stage in ("swiglu", "swiglu_quant"):
        add(
            stage, dataclasses.replace(gate, m=8), dataclasses.replace(gate, clamp=None),
            dataclasses.replace(gate, hazard=strided),
            dataclasses.replace(gate, gate=Gate.SWIGLUOAI),
            dataclasses.replace(gate, values=Values.SPECIAL),
        )  # fmt: skip
    add("swiglu_quant", dataclasses.replace(gate, m=160), dataclasses.replace(gate, scale=ue8m0))
    unrounded = VLLM_FUSED_SILU
    add("swiglu_quant", Case(m=16, i=256), recipe=unrounded)
    add(
        "swiglu_quant", Case(m=32, i=256, scale=ue8m0),
        dataclasses.replace(gate, i=512, scale=ScaleFormat.UE8M0_PACKED),
    )  # fmt: skip
    total = Case(m=12, e=8, k=8, h=256, values=aimed)
    add(
        "combine", total, dataclasses.replace(total, routing=holes, **rank),
        dataclasses.replace(total, routing=repeated), dataclasses.replace(total, hazard=strided),
        dataclasses.replace(total, dtype=InputDtype.FP32),
    )  # fmt: skip
    add("combine", total, recipe=VLLM_TRITON)
    _add_geometry(add)
    add("layer", Case(e=4, k=2, h=256, i=256))
    return found


def _add_geometry(add: Callable[..., None]) -> None:
    """Add scales of every exponent, and inputs that lie elsewhere than by default."""
    lies = ({"hazard": Hazard.GAPS}, {"hazard": Hazard.OFFSET2})
    for stage in ("fc1", "fc2", "permute"):
        case = Case(m=14, e=3, k=2, h=256, i=256 if stage == "fc2" else 128)
        extreme = dataclasses.replace(case, values=Values.SCALES)
        add(
            stage, extreme,
            # of other seeds infinities hide the largest exponents
            dataclasses.replace(extreme, scale=ScaleFormat.UE8M0, seed=8 if stage == "fc2" else 0),
            dataclasses.replace(case, layout=ScaleLayout.TMA),
            *(dataclasses.replace(case, **how) for how in lies),
        )  # fmt: skip
    add("fc2", *(Case(m=5, e=3, k=2, h=256, **how) for how in lies), recipe=VLLM_TRITON)
    for how in lies:
        add("align", Case(m=20, e=6, k=3, **how))
        add("combine", Case(m=12, e=8, k=8, h=256, **how))
    add("permute", Case(m=14, e=3, k=2, h=256, hazard=Hazard.TRANSPOSED))
    far = {"hazard": Hazard.FAR}
    for stage in ("permute", "fc1", "fc2"):
        add(stage, Case(m=3, e=3, k=2, h=256, i=256 if stage == "fc2" else 128, **far))
    add("combine", Case(m=4, e=4, k=2, h=256, **far))
    add("weight_quant", Case(i=130, h=128, **far))
    for stage in ("act_quant", "swiglu", "swiglu_quant"):
        add(stage, Case(m=4, **far))
    add("weight_quant", Case(i=150, h=200, hazard=Hazard.OFFSET2))
    add("act_quant", Case(m=24, h=256, hazard=Hazard.OFFSET2))
    for stage in ("swiglu", "swiglu_quant"):
        add(stage, Case(m=8, i=128, hazard=Hazard.OFFSET2))


@lru_cache(maxsize=1)
def settings() -> dict[str, list[Setting]]:
    """Return the settings of every stage, those first in which most mistakes show."""
    return _cases()


@lru_cache(maxsize=1)
def named() -> list[tuple[str, str]]:
    """Return (stage, name) of every mistake that a stage's settings allow, the layer left out."""
    return list(
        dict.fromkeys(
            (stage, key[0])
            for stage, own in settings().items()
            if stage != "layer"
            for setting in own
            for key in setting.mistakes
        )
    )
