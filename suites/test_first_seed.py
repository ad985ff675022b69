"""Everything the first seed's layer may be asked, at once: each way through it, bit for bit.

Ways (decode, large, sorted rows, two launches for the activation) times the formats of both
quantizations times the limit, at the seed's shape on a GPU, at a small one on a CPU; then the
layouts of the activation's scales, its group of 64, and batched experts against the same answer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.cases.shapes import MODELS
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.references.language import Case, ScaleFormat, ScaleLayout, Values
from moe_parity.references.recipes.ours import OURS, OURS_AFTER
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.references.stages.layer.operands import LayerInputs, Trace
from moe_parity.references.stages.layer.reference import layer

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
activation = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")
batched = pytest.importorskip("moe_parity.kernels.ours.batched", reason="needs Triton")
steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
sorted_rows = pytest.importorskip("moe_parity.kernels.ours.sorted_rows", reason="needs Triton")

WAYS: dict[str, dict[str, Any]] = {
    "decode": {"path": "decode"},
    "large": {"path": "large"},
    "sorted": {"path": "large", "down": "sorted"},
    "unfused": {"path": "large", "fused": False},
}
FORMATS = tuple(itertools.product((ScaleFormat.FP32, ScaleFormat.UE8M0), repeat=2))
CLAMPS = ((None, "before"), (7.0, "before"), (9.97, "after"))
"""A limit and where it acts; BF16 cannot hold 9.97."""
SHAPES = {shape.name: shape for shape in MODELS}
SMALL = Case(e=4, k=2, h=256, i=256, values=Values.AIMED)


def sized(device: str) -> list[Case]:
    """Return the seed's shape with every number of tokens of its claims, or a small one."""
    if device == "cpu":
        return [dataclasses.replace(SMALL, m=3)]
    shape = SHAPES["glm_5_3_tp8"]
    return [shape.case(Case(values=Values.AIMED), m) for m in (1, 4, 32, 33, 256)]


def largest(device: str) -> list[Case]:
    """Return what is asked with default options alone."""
    if device == "cpu":
        return [dataclasses.replace(SMALL, m=66)]
    shape, near = SHAPES["glm_5_3_tp8"], SHAPES["near_tolerance"]
    base = Case(values=Values.AIMED)
    return [*(shape.case(base, m) for m in (1024, 4096)), near.case(base, 83)]


def answer(made: LayerInputs, clamp: str) -> Trace:
    return layer(made, OURS if clamp == "before" else OURS_AFTER)


def stages(made: LayerInputs, way: str, clamp: str) -> dict[str, Tensor]:
    """Run a way through the layer; every stage's rows in the order of pairs."""
    asked, batch = made.asked, made.batch
    ran = moe.run_stages(
        batch.x, batch.ids, batch.weights, made.experts, limit=asked.limit, clamp=clamp,
        power_of_two=asked.scale.is_power_of_two, mid_power_of_two=asked.mid.is_power_of_two,
        **WAYS[way],
    )  # fmt: skip
    found = dict(vars(ran))
    if way == "sorted":
        block = moe.BLOCK[moe.Path.LARGE]
        aligned = steps.align(batch.ids, made.experts.first, made.experts.count, block)
        found["mid_codes"], found["mid_scales"] = sorted_rows.in_pair_order(
            ran.mid_codes, ran.mid_scales, aligned, batch.ids.numel()
        )
    return found


def wrong(found: dict[str, Tensor], want: Trace, live: Tensor) -> tuple[dict[str, int], int]:
    """Count the bits' differences by stage, in rows that somebody owns, and what was compared."""
    differing, compared = {}, 0
    for name, one in found.items():
        right = getattr(want, name)
        owned = name not in ("act_codes", "act_scales", "out")
        rows = live if owned else torch.ones(len(one), dtype=torch.bool, device=one.device)
        count = int((comparable(one)[rows] != comparable(right)[rows]).sum())
        compared += int(rows.sum()) * one.shape[1]
        if count:
            differing[name] = count
    return differing, compared


def told(
    recorder: Recorder,
    name: str,
    differing: dict[str, int],
    compared: int,
    case: Case,
    how: str,
    device: str,
) -> None:
    """One record for each number of tokens, of all that was asked there."""
    fault = f"{name}: {differing} outputs differ on {case.id}, {how}." if differing else ""
    claim(
        recorder, f"first_seed_{name}_m{case.m}", fault, kernel="run_moe", stage="layer",
        shape=case.id, device=device, compared=compared, differing=sum(differing.values()),
    )  # fmt: skip


def asked_of(device: str) -> Iterator[tuple[tuple[ScaleFormat, ScaleFormat], Any]]:
    """Yield formats and limits: all pairs, or on a CPU each of either once."""
    if device == "cpu":
        yield from zip(FORMATS, itertools.cycle(CLAMPS), strict=False)
    else:
        yield from itertools.product(FORMATS, CLAMPS)


def mids_of(device: str) -> Iterator[tuple[ScaleFormat, Any, bool]]:
    """Yield formats of the second quantization, limits, vectors or scalars, likewise."""
    mids, ways = (ScaleFormat.FP32, ScaleFormat.UE8M0), (True, False)
    if device == "cpu":
        pairs = itertools.product(mids, ways)
        yield from ((mid, CLAMPS[n % 3], way) for n, (mid, way) in enumerate(pairs))
    else:
        yield from itertools.product(mids, CLAMPS, ways)


@pytest.mark.parametrize("way", WAYS)
def test_sorted_and_unfused_and_every_way_have_the_bits_of_the_reference(
    way: str, parity_device: str, parity_recorder: Recorder
) -> None:
    for case in sized(parity_device):
        made = layer_inputs(case, parity_device, spoil=False)
        for (act, mid), (limit, clamp) in asked_of(parity_device):
            asked = dataclasses.replace(made.asked, scale=act, mid=mid, limit=limit)
            given = dataclasses.replace(made, asked=asked)
            found = wrong(stages(given, way, clamp), answer(given, clamp), given.expert >= 0)
            how = f"{act} and {mid}, limit {limit} {clamp}"
            told(parity_recorder, way, *found, case, how, parity_device)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "decode"])
def test_sorted_and_unfused_and_every_way_at_large_sizes(
    way: str, parity_device: str, parity_recorder: Recorder
) -> None:
    for case in largest(parity_device):
        made = layer_inputs(case, parity_device, spoil=False)
        found = wrong(stages(made, way, "before"), answer(made, "before"), made.expert >= 0)
        told(parity_recorder, way, *found, case, "default options", parity_device)


@pytest.mark.parametrize("layout", ScaleLayout)
def test_a_gemm_reads_the_swiglu_scales_of_any_layout(
    layout: ScaleLayout, parity_device: str, parity_recorder: Recorder
) -> None:
    """Vectors and scalars, every layout, both formats: the second GEMM has the same bits."""
    for case in sized(parity_device):
        made = layer_inputs(case, parity_device, spoil=False)
        ids, experts = made.batch.ids, made.experts
        aligned = steps.align(ids, experts.first, experts.count, 16)
        for mid, (limit, clamp), vector in mids_of(parity_device):
            given = dataclasses.replace(
                made, asked=dataclasses.replace(made.asked, mid=mid, limit=limit)
            )
            want = answer(given, clamp)
            how = activation.Activation(
                clamp="none" if limit is None else clamp, limit=0.0 if limit is None else limit
            )
            codes, scales = activation.swiglu_quant(
                want.fc1, ids, experts.first, experts.count, how, scale=mid, layout=layout,
                vector=vector,
            )  # fmt: skip
            fc2 = steps.grouped_gemm(
                codes, scales, experts.w2, experts.w2_scale, aligned, ids.numel(), 1
            )
            found = {"mid_codes": codes, "mid_scales": scales, "fc2": fc2}
            told(
                parity_recorder, f"layout_{layout}", *wrong(found, want, given.expert >= 0), case,
                f"{mid}, limit {limit} {clamp}, {'vectors' if vector else 'scalars'}",
                parity_device,
            )  # fmt: skip


def test_batched_experts_have_the_bits_of_the_layer(
    parity_device: str, parity_recorder: Recorder
) -> None:
    """Each expert's pairs in rows of its own; FC2's rows are those of the routed layer."""
    for case in sized(parity_device):
        made = layer_inputs(case, parity_device, spoil=False)
        expert, experts, k = made.expert, made.experts, case.k
        counts = torch.bincount(expert[expert >= 0], minlength=experts.count).int()
        place = torch.zeros_like(expert)
        order = torch.argsort(expert, stable=True)
        order = order[expert[order] >= 0]
        starts = torch.cumsum(counts, 0) - counts
        place[order] = torch.arange(len(order), device=expert.device) - starts[expert[order]]
        room = max(int(counts.max()), 1)
        x = made.batch.x.new_zeros((experts.count, room, case.h))
        x[expert[order], place[order]] = made.batch.x[order // k]
        for (act, mid), (limit, clamp) in asked_of(parity_device):
            asked = dataclasses.replace(made.asked, scale=act, mid=mid, limit=limit)
            given = dataclasses.replace(made, asked=asked)
            out = batched.run_batched(
                x, counts, experts, limit=limit, clamp=clamp,
                power_of_two=act.is_power_of_two, mid_power_of_two=mid.is_power_of_two,
            )  # fmt: skip
            want = answer(given, clamp).fc2[order]
            got = out[expert[order], place[order]]
            differing = int((comparable(got) != comparable(want)).sum())
            told(
                parity_recorder, "batched", {"fc2": differing} if differing else {}, want.numel(),
                case, f"{act} and {mid}, limit {limit} {clamp}", parity_device,
            )  # fmt: skip
