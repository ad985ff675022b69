"""What `parity identify` finds of outputs alone: every kind of kernel, and two changes at once.

A kernel that runs here is run, on the virtual GPU where it is in Triton; of the others there are
witnesses, recorded on an H200.  What a kernel states is compared with the answer, never used in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling.run import run
from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.diagnosis.answer import Answer, identify, identify_each
from moe_parity.harness.diagnosis.identify import Probe, Seen
from moe_parity.harness.evidence import witness
from moe_parity.harness.evidence.dump import read_dump
from moe_parity.kernels import Kernel, all_kernels
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.arithmetic.rounding import div_rn, mul_rn
from moe_parity.references.chips import tensor_core, unit_named
from moe_parity.references.language import Case, Recipe, ScaleFormat, Stage
from moe_parity.references.recipes import ALL
from moe_parity.references.recipes.ours import NO_ROUNDING, OURS
from moe_parity.references.stages import FC1, LAYER, STAGES, WEIGHT_QUANT
from moe_parity.references.stages.gemm.reference import biased, hit
from moe_parity.references.stages.gemm.stage import GroupedRows

WITNESSES = witness.SHIPPED


# --- every kernel -------------------------------------------------------------------------------


def ran(kernel: Kernel) -> Iterator[tuple[Seen, set[str]]]:
    """Yield what a kernel gives on its witness cases here, and the recipes that it states."""
    # few rows make large tiles of a weight
    many = kernel.stage.probes() if kernel.stage is WEIGHT_QUANT else kernel.stage.witness_cases()
    for case in many:
        if kernel.declines(case, "cpu") is None:
            inputs = kernel.stage.inputs(case)
            got = run(kernel, case, inputs).outputs
            stated = {recipe.name for recipe in kernel.recipes(case, "cpu")}
            yield Seen(Probe(stage=kernel.stage, case=case, inputs=inputs), got), stated


def witnessed(kernel: Kernel) -> Iterator[tuple[Seen, set[str]]]:
    """Yield what a kernel gave on an H200, and the recipe that its witness states."""
    newest = [WITNESSES, WITNESSES / "vllm-0.33.0"]
    paths = [path for folder in newest for path in sorted(folder.glob(f"{kernel.name}-*"))]
    for path in paths:
        dump = read_dump(path)
        probe = Probe(stage=dump.stage, case=dump.case, inputs=dump.inputs)
        yield Seen(probe, dump.outputs), {witness.read(path)[0].recipe}


def inside(seen: Seen) -> list[Seen]:
    """Return the stages that a layer shows, or what was seen itself."""
    probe = seen.probe
    found = [
        Seen(Probe(stage=own.stage, case=own.case, inputs=own.inputs), own.got)
        for own in probe.stage.inner(probe.case, probe.inputs, seen.got)
    ]
    return found or [seen]


def kinds() -> list[Kernel]:
    """Return a kernel for each stage and recipes, one that runs here if there is one.

    The others of a kind have the same bits, which is what all other suites prove.
    """
    found: dict[tuple[str, frozenset[str]], Kernel] = {}
    for kernel in all_kernels():
        case = next(kernel.stage.witness_cases())
        key = kernel.stage.name, frozenset(r.name for r in kernel.recipes(case, "cpu"))
        away = key in found and (found[key].unavailable() or found[key].needs_gpu)
        if key not in found or (away and not kernel.needs_gpu and not kernel.unavailable()):
            found[key] = kernel
    return list(found.values())


@pytest.mark.parametrize("kernel", kinds(), ids=lambda kernel: kernel.name)
def test_every_kernel_is_named(kernel: Kernel, parity_recorder: Recorder):
    """Of its outputs alone: the recipe that it states is among the answers."""
    outside = kernel.unavailable() or kernel.needs_gpu
    found = list(witnessed(kernel) if outside else ran(kernel))
    assert found, f"{kernel.name} neither runs here nor has a witness"
    # a limit hides most of what a quantizer does, and takes longest
    found = [one for one in found if one[0].probe.case.clamp is None] or found
    # packed exponents are those of powers of two
    found = [one for one in found if not one[0].probe.case.scale.is_packed] or found
    # one case: the others say the same once more, or less
    found = found[:1]
    lacking = []
    outputs = 0
    for whole, stated in found:
        for seen in inside(whole):
            outputs += sum(bits.numel() for bits in seen.bits.values())
            names = set(identify([seen], kernel.name).names)
            stated = stated if seen.probe.stage.acting else {NO_ROUNDING.name}
            if not names & stated:
                lacking.append(f"{seen.probe.case.id}: {names or 'none'}, states {stated}")
    claim(
        parity_recorder, "identified", f"{kernel.name}: {lacking}" if lacking else "",
        kernel=kernel.name, stage=kernel.stage.name, device="reference", compared=outputs,
        could_show=outputs,
    )  # fmt: skip


def of_witnesses(*names: str) -> list[Seen]:
    found = []
    for name in names:
        dump = read_dump(WITNESSES / name)
        probe = Probe(stage=dump.stage, case=dump.case, inputs=dump.inputs)
        found.append(Seen(probe, dump.outputs))
    return found


def test_two_versions_of_an_op_are_two_recipes():
    """VLLM 0.26.0 divides, 0.33.0 multiplies by the reciprocal."""
    file = "vllm_per_token_group-fp32-f32-aimed-m24-h512.safetensors"
    (old,), (new,) = (of_witnesses(f"vllm-{v}/{file}") for v in ("0.26.0", "0.33.0"))
    before, after = identify([old]), identify([new])
    assert "vllm_cuda_0_26" in before.names
    assert "vllm_cuda" in after.names
    assert not set(before.names) & set(after.names)
    assert before.fixed["quant.apply"] == "divide"


def test_both_orders_of_scales_are_told():
    """A batch of 24 and one of 65 take other tiles of fused_moe, and other orders."""
    start = "vllm-0.33.0/vllm_fused_moe_fc1-fp32-aimed"
    seen = of_witnesses(f"{start}-m24-e4-k2-h512-i256.safetensors", f"{start}-m65-e4-k2-h256.safetensors")  # fmt: skip  # noqa: E501
    answers = [(len(group), bool(answer.recipes)) for group, answer in identify_each(seen)]
    assert answers == [(1, True), (1, True)], "each case has an answer of its own"
    few, many = (identify([one]) for one in seen)
    assert few.names == ("vllm_triton_swap",)
    assert "vllm_triton" in many.names
    assert many.fixed["gemm.scale_order"] == "a_then_b"


# --- two decisions at once ----------------------------------------------------------------------

PAIRS = 12


@lru_cache(maxsize=16)
def probes(stage: Stage) -> list[Probe]:
    """Return the probes of a stage in the format in which most decisions are made."""
    cases = [dataclasses.replace(case, scale=ScaleFormat.FP32) for case in stage.probes()]
    return [Probe(stage=stage, case=case, inputs=stage.inputs(case)) for case in cases]


def both(stage: Stage) -> list[tuple[str, Recipe]]:
    """Return two decisions changed at once, of every recipe: 12 at random, or all."""
    found = []
    for recipe in {id(r): r for r in ALL.values() if stage.described_by(r)}.values():
        for one, changed in stage.neighbours(recipe):
            for two, again in stage.neighbours(changed):
                if one.rpartition("=")[0] != two.rpartition("=")[0]:
                    found.append((f"{recipe.name} with {one} and {two}", again))
    chosen = random.Random(len(stage.name))
    return found if len(found) <= PAIRS else chosen.sample(found, PAIRS)


def agree(one: Recipe, other: Recipe, stage: Stage) -> bool:
    """Whether two recipes make the same choices, of those that the probes ask for and they have."""
    fields = {(p, a): decision for probe in probes(stage) for p, a, decision in probe.fields}
    return all(
        getattr(one.parts[part], name) is getattr(other.parts[part], name)
        for (part, name), decision in fields.items()
        if part in one.parts and part in other.parts and decision.exists(one.parts[part])
    )


@pytest.mark.parametrize(
    "name", ["act_quant", "weight_quant", "fc1", "swiglu", "swiglu_quant", "fc2", "combine"]
)
def test_two_decisions_changed_at_once_are_found(name: str, parity_recorder: Recorder):
    """The answer holds the very recipe, for 12 random pairs, or for all where there are fewer."""
    stage = STAGES[name]
    lacking = []
    pairs = both(stage)
    for label, recipe in pairs:
        seen = [
            Seen(probe, stage.reference(probe.case, probe.inputs, recipe))
            for probe in probes(stage)
        ]
        answer = identify(seen)
        if not any(agree(recipe, other, stage) for other in answer.recipes):
            lacking.append(label)
    assert len(pairs) == PAIRS or name in ("combine",)
    claim(
        parity_recorder, "identified", f"{stage}: {lacking}" if lacking else "", stage=name,
        device="reference", compared=len(pairs), could_show=len(pairs),
    )  # fmt: skip


def test_two_decisions_of_a_layer_are_found_in_its_output():
    """Of the output alone: the recipe with both changes, or one with fewer that has its bits."""
    case = next(LAYER.witness_cases())
    probe = Probe(stage=LAYER, case=case, inputs=LAYER.inputs(case))
    wanted = {"gemm.scale_order=a_then_b", "swiglu.product_rounding=twice"}
    recipe = OURS
    for label in sorted(wanted):
        recipe = dict(LAYER.neighbours(recipe))[label]
    out = LAYER.reference(case, probe.inputs, recipe)["out"]
    answer = identify([Seen(probe, {"out": out})])
    assert any(wanted == set(c.partition(" with ")[2].split(" and ")) for c in answer.changed), answer.changed  # fmt: skip  # noqa: E501


# --- none ---------------------------------------------------------------------------------------


def fed_back(inputs: GroupedRows, recipe: Recipe) -> Tensor:
    """Return rows of a GEMM whose accumulator goes through the dot, divided by the next scale."""
    unit = unit_named("wgmma_fp8")
    out = torch.zeros((inputs.expert.numel(), inputs.w.shape[1]))
    for index in hit(inputs.expert):
        rows = (inputs.expert == index).nonzero()[:, 0]
        a, s_a = inputs.a[inputs.source[rows]], inputs.a_scale[inputs.source[rows]]
        w = inputs.w[index].t()
        wide = inputs.w_scale[index].repeat_interleave(BLOCK, 0)[: w.shape[1]]
        acc = torch.zeros((rows.numel(), w.shape[1]))
        for start in range(0, a.shape[1], BLOCK):
            cut = slice(start, start + BLOCK)
            scale = mul_rn(s_a[:, start // BLOCK, None], wide[None, :, start // BLOCK])
            fed = div_rn(acc, scale)
            made = tensor_core.dot(a[:, cut].contiguous(), w[cut].contiguous(), fed, unit=unit)
            acc = mul_rn(made, scale)
        out[rows] = acc
    return biased(out, None, inputs.expert, recipe.parts["gemm"])


def test_what_no_recipe_does_is_none():
    """A kernel that feeds its accumulator back into the dot and rescales it."""
    probe = probes(FC1)[0]
    answer: Answer = identify([Seen(probe, {"rows": fed_back(probe.inputs, OURS)})])
    assert not answer.recipes
    assert not answer.names
    near = answer.nearest
    assert near is not None
    assert 0 <= near.equal < near.of
    assert near.place.startswith("token 0, k 0, column ")
    assert near.alone


def test_one_wrong_bit_is_none():
    """One code of all: the nearest has all the others, and the place is that code's."""
    stage = STAGES["act_quant"]
    probe = probes(stage)[0]
    got = stage.reference(probe.case, probe.inputs, OURS)
    got["codes"] = got["codes"].clone()
    got["codes"][7, 9] ^= 1
    near = identify([Seen(probe, got)]).nearest
    assert near is not None
    assert near.of - near.equal == 1
    assert near.recipe in ("ours", "ours_after")
    assert near.place.startswith("token 7, column 9 of ")


def test_a_decision_that_does_not_act_in_a_stage_is_not_asked_for():
    """A weight's place acts in FC2, the order of the sum does not; no probe has a bias."""
    asked = {f[2].name for probe in probes(STAGES["fc2"]) for f in probe.fields}
    assert "combine.weights_at" in asked
    assert not asked & {"combine.order", "combine.step", "gemm.bias_at"}


def test_decisions_that_the_inputs_do_not_tell_are_open():
    """Ordinary numbers: no group is zero or tiny, none has a NaN."""
    case = Case(m=64, h=512)
    stage = STAGES["act_quant"]
    probe = Probe(stage=stage, case=case, inputs=stage.inputs(case))
    answer = identify([Seen(probe, stage.reference(case, probe.inputs, OURS))])
    assert "ours" in answer.names
    assert set(answer.open["quant.zero_group"]) == {"as_floored", "scale_one"}
    assert set(answer.open["quant.nan_amax"]) == {"ignore", "ignore_unless_all", "propagate"}
    assert answer.not_asked == ("quant.floor_order", "quant.power_of_two")


def test_what_reaches_codes_alone_leaves_the_scales():
    """The search leaves such decisions out while it looks at scales: it may."""
    stage = STAGES["act_quant"]
    for scale, dtype in itertools.product((ScaleFormat.FP32, ScaleFormat.UE8M0), stage.probes()):
        case = dataclasses.replace(dtype, scale=scale, m=64)
        inputs = stage.inputs(case)
        fields = [f for f in Probe(stage=stage, case=case, inputs=inputs).fields if f[2].reaches]
        assert {f[2].name for f in fields} == {"quant.apply", "quant.nan_element", "quant.overflow"}
        scales = stage.reference(case, inputs, OURS)["scales"]
        for part, attribute, decision in fields:
            for option in decision.options:
                changed = dataclasses.replace(OURS.parts[part], **{attribute: option})
                made = stage.reference(case, inputs, OURS.with_parts(**{part: changed}))
                assert torch.equal(made["scales"], scales), (decision.name, option)
