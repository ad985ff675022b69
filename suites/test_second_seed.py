"""The second seed's layer: our prefix-sum path against its recipe, our large path and DeepGEMM.

Capacities of which few tokens are live, and full ones, at the seed's shape and a sharded one, both
scale modes; every stage bit for bit.  On a CPU a small shape stands for them, without DeepGEMM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim, expect
from moe_parity.harness.session.skips import skip_test
from moe_parity.kernels import find
from moe_parity.references.language import Case, ScaleFormat, Values
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.references.stages.layer.operands import LayerInputs, Trace
from moe_parity.suites.prefixed import poison
from moe_parity.suites.test_first_seed import SHAPES, answer, wrong

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
prefix_sum = pytest.importorskip("moe_parity.kernels.ours.prefix_sum", reason="needs Triton")
arms = pytest.importorskip("moe_parity.suites.perf.prefix_arms", reason="needs Triton")

FORMATS = (ScaleFormat.FP32, ScaleFormat.UE8M0)
SMALL = Case(e=4, k=2, h=256, i=128, values=Values.AIMED)
CAPACITIES = {"seed_benchmark": ((512, 16), (512, 512), (4096, 4096)),
              "glm_5_3_tp8": tuple((m, m) for m in (1, 4, 33, 256, 1024, 4096))}  # fmt: skip
"""The shape, and tokens with how many of them are live."""


def sized(shape: str, device: str) -> Iterator[LayerInputs]:
    """Yield the batches of a shape, or small ones; tokens that are not live have ids -1."""
    if device == "cpu":
        seed = shape == "seed_benchmark"
        cases = [(dataclasses.replace(SMALL, m=12 if seed else 5), 3 if seed else 5)]
    else:
        base = Case(values=Values.AIMED)
        cases = [(SHAPES[shape].case(base, m), live) for m, live in CAPACITIES[shape]]
    for case, live in cases:
        made = layer_inputs(case, device, spoil=False)
        dead = torch.arange(case.m, device=device) % (case.m // live) != 0
        ids = made.batch.ids.masked_fill(dead[:, None], -1)
        few = device == "cpu" and shape != "seed_benchmark"
        for scale in FORMATS[:1] if few else FORMATS:
            asked = dataclasses.replace(made.asked, scale=scale, mid=scale)
            batch = dataclasses.replace(made.batch, ids=ids)
            yield dataclasses.replace(made, batch=batch, asked=asked)


def stages(made: LayerInputs, **options: Any) -> Trace:
    """Run the prefix-sum path; every stage's rows in the order of pairs."""
    batch = made.batch
    ran = moe.run_stages(
        batch.x, batch.ids, batch.weights, made.experts, path="prefix_sum",
        power_of_two=made.asked.scale.is_power_of_two, **options,
    )  # fmt: skip
    found: Trace = prefix_sum.in_pair_order(ran)
    return found


def where(made: LayerInputs) -> str:
    """Return the words of a batch."""
    (tokens, hidden), (experts, double) = made.batch.x.shape, made.experts.w13.shape[:2]
    live = int((made.batch.ids >= 0).any(1).sum())
    return (
        f"{live} of {tokens} tokens, E={experts} k={made.batch.ids.shape[1]} H={hidden} "
        f"I={double // 2}, {made.asked.scale}"
    )


def told(
    recorder: Recorder, name: str, made: LayerInputs, found: dict[str, Tensor], want: Trace
) -> None:
    """Record how many bits differ, by stage; raise AssertionError where one does."""
    differing, compared = wrong(found, want, made.expert >= 0)
    fault = f"{name}: {differing} outputs differ on {where(made)}." if differing else ""
    claim(
        recorder, f"second_seed_{name}", fault, kernel="run_moe", stage="layer",
        shape=where(made), device=made.batch.x.device.type, compared=compared,
        differing=sum(differing.values()),
    )  # fmt: skip


def deepgemm() -> Any:
    """Return DeepGEMM's chain; skip with the reason where it cannot run."""
    from moe_parity.kernels.vendors.deepgemm import api, chain

    missing = api.unavailable()
    if missing is not None:
        skip_test(missing)
    return chain


@pytest.mark.parametrize("shape", CAPACITIES)
def test_the_prefix_sum_path_has_the_bits_of_its_recipe_and_of_the_large_path(
    shape: str, parity_device: str, parity_recorder: Recorder
) -> None:
    for made in sized(shape, parity_device):
        found = vars(stages(made))
        told(parity_recorder, "prefix_sum", made, found, answer(made, "before"))
        batch = made.batch
        large = moe.run_stages(
            batch.x, batch.ids, batch.weights, made.experts, path="large",
            power_of_two=made.asked.scale.is_power_of_two,
        )  # fmt: skip
        told(parity_recorder, "prefix_sum_as_padded", made, found, large)


@pytest.mark.parametrize("layout", ["contiguous", "psum", "masked"])
@pytest.mark.parametrize("shape", CAPACITIES)
def test_the_prefix_sum_gemms_have_the_bits_of_deepgemm(
    shape: str, layout: str, parity_device: str, parity_recorder: Recorder
) -> None:
    """Both products of the same rows, padded by m_indices, by prefix sums and masked."""
    chain = deepgemm()
    for made in sized(shape, parity_device):
        ours, experts, k = stages(made), made.experts, made.batch.ids.shape[1]
        rows = chain.Rows(layout, made.expert, experts.count)
        pairs = [one.repeat_interleave(k, 0) for one in (ours.act_codes, ours.act_scales)]
        found = {
            "fc1": rows.gemm(*pairs, experts.w13, experts.w13_scale),
            "fc2": rows.gemm(ours.mid_codes, ours.mid_scales, experts.w2, experts.w2_scale),
        }
        told(parity_recorder, f"deepgemm_{layout}", made, found, ours)


@pytest.mark.parametrize("alignment", [64, 128])
@pytest.mark.parametrize("shape", CAPACITIES)
def test_the_prefix_sum_path_has_the_same_bits_with_deepgemms_gemms(
    shape: str, alignment: int, parity_device: str, parity_recorder: Recorder
) -> None:
    deepgemm()
    for made in sized(shape, parity_device):
        found = vars(stages(made, gemm="deepgemm", alignment=alignment))
        told(parity_recorder, f"with_deepgemm_{alignment}", made, found, stages(made))


ROUTINGS = ("every", "some", "one", "none", "one expert")


def routed(ids: Tensor, kind: str) -> Tensor:
    """Return ids of the same shape of which few or many are live."""
    token = torch.arange(ids.shape[0], device=ids.device)[:, None]
    if kind == "one expert":
        return torch.full_like(ids, 1)
    keep = {"every": token >= 0, "some": token % 5 == 2, "one": token == 3, "none": token < 0}
    return torch.where(keep[kind], ids, -1)


@pytest.mark.parametrize("gemm", ["ours", "deepgemm"])
def test_a_captured_prefix_sum_graph_replays_with_any_routing(
    gemm: str, parity_gpu: str, parity_recorder: Recorder
) -> None:
    """One CUDA graph, its workspaces poisoned before every replay."""
    if gemm == "deepgemm":
        deepgemm()
    case = Case(m=256, e=32, k=8, h=1024, i=512, values=Values.AIMED)
    made = layer_inputs(case, parity_gpu, spoil=False)
    batch, experts = made.batch, made.experts
    first, ids = stages(made), batch.ids.clone()
    own = prefix_sum.Workspace.empty(ids.numel(), experts)
    out = torch.empty_like(batch.x)

    def call() -> None:
        prefix_sum.run(
            first.act_codes, first.act_scales, ids, batch.weights, experts,
            prefix_sum.Activation(), out, gemm=prefix_sum.Gemm(gemm), workspace=own,
        )  # fmt: skip

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for kind in ROUTINGS:
        ids.copy_(routed(batch.ids, kind))
        for tensor in (*vars(own.rows).values(), *vars(own).values(), out):
            if isinstance(tensor, Tensor):
                poison(tensor)
        graph.replay()
        want = moe.run_moe(batch.x, ids, batch.weights, experts, path="large")
        differing = int((comparable(out) != comparable(want)).sum())
        fault = f"{differing} outputs differ in a replay with {kind} live." if differing else ""
        claim(
            parity_recorder, f"second_seed_graph_{gemm}", fault, kernel="run_moe", stage="layer",
            shape=f"{case.id}, {kind}", device="cuda", compared=out.numel(), differing=differing,
        )  # fmt: skip


ACTIVATIONS = (
    (32, 1, 2048), (32, 4, 2048), (32, 16, 2048), (32, 129, 2048), (32, 1024, 2048),
    (256, 1, 256), (256, 8, 256), (256, 128, 256), (8, 2000, 4608), (1, 4096, 768),
)  # fmt: skip
SMALL_ACTIVATIONS = (
    (1, 1, 128), (1, 17, 128), (2, 3, 256), (3, 16, 128), (4, 1, 384), (5, 2, 256), (8, 1, 128),
    (9, 4, 128), (17, 1, 128), (20, 1, 128),
)  # fmt: skip
"""Experts, rows of each on average, and I."""


@pytest.mark.parametrize("number", range(10))
def test_a_prefix_swiglu_quant_alone_over_ten_shapes(
    number: int, parity_device: str, parity_recorder: Recorder
) -> None:
    """Against the reference, gaps untouched; plain, rounded and packed scales, clamped or not."""
    shapes = SMALL_ACTIVATIONS if parity_device == "cpu" else ACTIVATIONS
    experts, rows, width = shapes[number]
    base = Case(m=experts * rows, e=experts, i=width, h=128, values=Values.AIMED)
    every = (ScaleFormat.FP32, ScaleFormat.UE8M0, ScaleFormat.UE8M0_PACKED)
    for scale in every if parity_device != "cpu" else (every[number % 3],):
        case = dataclasses.replace(base, scale=scale, clamp=7.0 if number % 2 else None)
        expect(find("ours_swiglu_quant_prefix"), case, parity_device, parity_recorder)


def test_what_the_prefix_sum_timings_compare_has_the_same_bits(parity_device: str) -> None:
    """Every arm of ``suites/perf/prefix_arms.py`` that runs here."""
    setting = arms.Setting(
        experts=4, topk=2, hidden=256, width=128, capacity=6, live=2, powers=True
    )
    made = arms.Arms(setting, parity_device)
    outs = {name: made.call(name) for name in made.names()}
    assert {"ours_padded", "ours_prefix", "ours_every_row"} <= outs.keys()
    first = outs.pop("ours_padded")
    assert bool(first.any())
    for name, out in outs.items():
        assert torch.equal(comparable(out), comparable(first)), name
