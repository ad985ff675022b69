"""Planted faults that only a replay shows: what a graph keeps of the call it was captured from.

Every kernel here is right, bit for bit, when it is called as usual on the inputs of its case.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling import bystanders
from moe_parity.harness.calling.run import run
from moe_parity.harness.checks.expect import Recorder
from moe_parity.harness.checks.promises import no_sync
from moe_parity.harness.checks.replay import replay
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.kernels import Call, Kernel
from moe_parity.references.language import Case, Check, Recipe, Routing
from moe_parity.references.recipes import recipe_named
from moe_parity.references.recipes.ours import OURS
from moe_parity.suites import test_replay
from moe_parity.suites.planted import kernel_of

pytest.importorskip("triton", reason="needs Triton")

Outputs = dict[str, Tensor]
Body = Callable[[Call], Outputs]
CASES = {
    "act_quant": Case(m=6, h=256),
    "combine": Case(m=6, e=4, k=2, h=128),
    "layer": Case(m=3, e=4, k=2, h=128, i=128),
}
RECIPES: dict[str, Recipe] = {
    "act_quant": recipe_named("deepgemm"), "combine": recipe_named("vllm_triton"), "layer": OURS,
}  # fmt: skip


# --- right kernels --------------------------------------------------------------------------------


def quantized(call: Call) -> Outputs:
    """Quantize as DeepGEMM does, in plain torch."""
    x = call.inputs.x.float().unflatten(1, (-1, 128))
    scales = x.abs().amax(2).clamp(1e-4) / torch.full((), 448.0)
    codes = (x * (1 / scales[..., None])).flatten(1).to(torch.float8_e4m3fn)
    return {"codes": codes.view(torch.uint8), "scales": scales}


def summed(call: Call) -> Outputs:
    """Sum the owned rows, k ascending, in plain torch."""
    inputs = call.inputs
    owned = (inputs.expert >= 0).view(*inputs.ids.shape, 1)
    rows = torch.where(owned, inputs.rows, 0).float()
    total = torch.zeros(rows.shape[0], rows.shape[2])
    for k in range(rows.shape[1]):
        total += rows[:, k]
    return {"out": total.bfloat16()}


def layered(call: Call) -> Outputs:
    """Run our layer."""
    from moe_parity.kernels.ours.layers import run_path

    return {"out": run_path(call, "decode")["out"]}


BODIES: dict[str, Body] = {"act_quant": quantized, "combine": summed, "layer": layered}


def read(call: Call) -> Tensor:
    """Return the tensor that a host would look at."""
    inputs = call.inputs
    made: Tensor = inputs.x if hasattr(inputs, "x") else getattr(inputs, "batch", inputs).ids
    return made


def written(call: Call, made: Outputs) -> Outputs:
    return {name: call.new(name).copy_(value) for name, value in made.items()}


def right(body: Body) -> Body:
    return lambda call: written(call, body(call))


# --- faults ---------------------------------------------------------------------------------------


def host_read(body: Body) -> Body:
    """Look at a value on the host."""

    def run(call: Call) -> Outputs:
        most = read(call).max().item()
        made = body(call)
        return written(call, made if most > -(10**9) else {})

    return run


def early_out(body: Body) -> Body:
    """Launch nothing where nothing is live."""

    def run(call: Call) -> Outputs:
        if (read(call) >= -1).any():
            return written(call, body(call))
        return {}

    return run


def grown_workspace(body: Body) -> Body:
    """Make a workspace anew for a larger call; the graph keeps the old one."""
    kept: dict[str, Tensor] = {}

    def run(call: Call) -> Outputs:
        made = body(call)
        for name, value in made.items():
            if name not in kept or kept[name].numel() < value.numel():
                kept[name] = torch.empty(value.numel(), dtype=value.dtype)
            made[name] = kept[name][: value.numel()].view(value.shape).copy_(value)
        return written(call, made)

    return run


def flag_not_reset(body: Body) -> Body:
    """Set a flag in memory of the kernel's that says that the work is done."""
    kept: dict[Any, Tensor] = {}

    def run(call: Call) -> Outputs:
        made = body(call)
        done = kept.setdefault(read(call).shape, torch.zeros((), dtype=torch.bool))
        for name, value in made.items():
            mine = kept.setdefault((name, value.shape), torch.zeros_like(value))
            mine.copy_(torch.where(done, mine, value))
            made[name] = mine
        done.fill_(True)
        return written(call, made)

    return run


def cached_output(body: Body) -> Body:
    """Compute the result for a shape once."""
    kept: dict[Any, Outputs] = {}

    def run(call: Call) -> Outputs:
        if read(call).shape not in kept:
            kept[read(call).shape] = body(call)
        return kept[read(call).shape]

    return run


def counted_calls(body: Body) -> Body:
    """Hand on the host's count of calls, beside the device's own."""
    device, host = torch.zeros((), dtype=torch.int64), [0]

    def run(call: Call) -> Outputs:
        host[0] += 1
        device.add_(1)
        made = body(call)
        return written(call, {n: torch.where(device == host[0], v, 0) for n, v in made.items()})

    return run


def cached_scalar(body: Body) -> Body:
    """Keep what the host read in the first call of a shape."""
    kept: dict[Any, bool] = {}

    def run(call: Call) -> Outputs:
        seen = read(call)
        if seen.shape not in kept:
            kept[seen.shape] = float(seen.flatten()[0])
        made = body(call)
        fits = seen.flatten()[0] == kept[seen.shape]
        return written(call, {n: torch.where(fits, v, 0) for n, v in made.items()})

    return run


def nothing_for_none(body: Body) -> Body:
    """Leave outputs alone where no row is live."""

    def run(call: Call) -> Outputs:
        made = written(call, {n: torch.zeros_like(v) for n, v in body(call).items()}) and {}
        live = (read(call) >= 0).any()
        for name, value in body(call).items():
            out = call.new(name)
            made[name] = out.copy_(torch.where(live, value, out))
        return made

    return run


def in_the_input(body: Body) -> Body:
    """Return a result in the memory of an input."""

    def run(call: Call) -> Outputs:
        made = body(call)
        return {"out": call.inputs.rows[:, 0].copy_(made["out"])}

    return run


def mirrored(body: Body) -> Body:
    """Read ids on the host, in memory that both see, and hand on how many experts are hit."""
    from moe_parity.kernels.ours import steps

    def run(call: Call) -> Outputs:
        inputs, out = call.inputs, call.new("out")
        count = inputs.ids.numel()
        ids = (ctypes.c_int32 * count).from_address(inputs.ids.data_ptr())
        hit = max(max(ids) + 1, 1)
        steps.combine(inputs.rows, None, inputs.ids, inputs.first, hit, out)
        return {"out": out}

    return run


FAULTS = (
    (grown_workspace, "freed_memory", "keeps the address of memory that it freed"),
    (flag_not_reset, "stale_output", "as it was before"),
    (cached_output, "stale_output", "as it was before, replayed on other values"),
    (counted_calls, "frozen_scalar", "of eq, which these inputs make"),
    (cached_scalar, "replay_differs", "an eager call gives the same: it keeps a state"),
)
EVERYWHERE = [
    pytest.param(stage, *fault, id=f"{stage}-{fault[0].__name__}")
    for stage in CASES
    for fault in FAULTS
    if stage != "layer" or fault[0] in (grown_workspace, cached_output)
]


def made(stage: str, fault: Callable[[Body], Body], recipe: Recipe | None = None) -> Kernel:
    return kernel_of(stage, fault(BODIES[stage]), recipe or RECIPES[stage])


def verdict_of(kernel: Kernel, case: Case | None = None) -> Verdict:
    return replay(kernel, case or CASES[kernel.stage.name], "cpu")


@pytest.mark.parametrize("stage", ["act_quant", "combine"])
def test_a_right_kernel_replays(stage: str):
    verdict = verdict_of(made(stage, right))
    assert (verdict.verdict, verdict.message) == ("pass", "")
    assert verdict.compared > 0


@pytest.mark.parametrize(("stage", "fault", "name", "words"), EVERYWHERE)
def test_what_a_graph_keeps_is_named(
    stage: str, fault: Callable[[Body], Body], name: str, words: str
):
    verdict = verdict_of(made(stage, fault))
    assert (verdict.verdict, verdict.cause_kind, verdict.cause) == ("fail", "call", name)
    assert words in verdict.message


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        ("act_quant", host_read),
        ("combine", host_read),
        ("combine", early_out),
        ("layer", early_out),
    ],
)
def test_a_wait_for_the_gpu_is_named_with_its_line(stage: str, fault: Callable[[Body], Body]):
    """A skip by default; red where the contract promises that it never waits."""
    kernel = made(stage, fault)
    line = fault.__code__.co_firstlineno + 4
    verdict = verdict_of(kernel)
    assert verdict.verdict == "skip"
    where = f"waits for the GPU at line {line} of test_replay_faults.py (item)"
    assert where in verdict.reason
    promising = kernel.contract.promising(Check.NO_SYNC)
    verdict = verdict_of(dataclasses.replace(kernel, contract=promising))
    assert (verdict.verdict, verdict.cause) == ("fail", "waits_for_gpu")
    assert where in verdict.message


def test_an_output_that_is_left_alone_for_no_live_rows_is_stale():
    verdict = verdict_of(made("combine", nothing_for_none))
    assert (verdict.verdict, verdict.cause) == ("fail", "stale_output")
    assert "replayed with no row live" in verdict.message


def test_an_output_that_only_the_first_call_writes_is_stale_at_once():
    """Poison shows it before the inputs change."""
    seen: set[int] = set()

    def run(call: Call) -> Outputs:
        made = {name: call.new(name) for name in ("codes", "scales")}
        for name, value in quantized(call).items():
            if made[name].data_ptr() not in seen:
                made[name].copy_(value)
            seen.add(made[name].data_ptr())
        return made

    verdict = verdict_of(kernel_of("act_quant", run, RECIPES["act_quant"]))
    assert (verdict.verdict, verdict.cause) == ("fail", "stale_output")
    assert "as it was before, replayed on the inputs it was captured with" in verdict.message


def test_an_output_in_the_memory_of_an_input_is_told():
    verdict = verdict_of(made("combine", in_the_input))
    assert (verdict.verdict, verdict.cause) == ("fail", "stale_output")
    assert "in memory of its inputs" in verdict.message


def test_an_argument_that_the_host_made_of_data_is_frozen():
    """The host reads what no op shows; the capture is of one expert, the replay of four."""
    kernel = made("combine", mirrored, recipe_named("vllm_deepgemm"))
    case = dataclasses.replace(CASES["combine"], routing=Routing.ONE)
    verdict = verdict_of(kernel, case)
    assert (verdict.verdict, verdict.cause) == ("fail", "frozen_scalar")
    assert "keeps experts = 1 of combine_kernel, which these inputs make" in verdict.message


@pytest.mark.parametrize("stage", ["act_quant", "combine"])
def test_the_faults_do_not_show_in_one_call(stage: str):
    """Otherwise another check would have found them."""
    case = CASES[stage]
    inputs = made(stage, right).stage.inputs(case)
    want = run(made(stage, right), case, inputs).outputs
    for fault, _, _ in FAULTS:
        got = run(made(stage, fault), case, inputs).outputs
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("test", "look"),
    [
        (test_replay.test_a_captured_call_replays, "replay"),
        (test_replay.test_a_call_does_not_wait, "no_sync"),
        (test_replay.test_serving_compiles_nothing, "no_recompile"),
    ],
)
def test_the_seed_of_a_run_is_that_of_its_cases(
    test: Callable[..., None], look: str, monkeypatch: pytest.MonkeyPatch, parity_recorder: Recorder
):
    seen: list[Case] = []

    def note(kernel: Kernel, case: Case, device: str) -> Verdict:
        seen.append(case)
        return Verdict(check=look, verdict="pass")

    monkeypatch.setattr(test_replay, look, note)
    case = CASES["combine"]
    test(made("combine", right), case, "cpu", parity_recorder, 7)
    assert seen == [dataclasses.replace(case, seed=7)]


def test_a_captured_call_has_the_configuration_of_an_eager_one():
    """Otherwise the eager call asks for other memory than the graph has."""
    seen: list[object] = []

    def noted(call: Call) -> Outputs:
        seen.append(call.config)
        return written(call, quantized(call))

    kernel = kernel_of("act_quant", noted, RECIPES["act_quant"])
    kernel = dataclasses.replace(kernel, configs=lambda case, device: {"one": "first"})
    assert verdict_of(kernel).verdict == "pass"
    assert no_sync(kernel, CASES["act_quant"], "cpu").verdict == "pass"
    assert set(seen) == {"first"}


def test_what_stands_in_freed_memory_tells_who_writes_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bystanders, "MOST", 700)
    standing = bystanders.Bystanders([600, 64, 512], "cpu")
    assert [tensor.numel() for tensor in standing.tensors] == [64, 512]
    assert standing.hit == 0
    standing.tensors[1][5:8] = 0
    assert standing.hit == 3


def test_free_blocks_are_those_of_the_stream_and_of_no_graph():
    def segment(stream: int, pool: tuple[int, int], *blocks: tuple[int, str]) -> dict[str, Any]:
        every = [{"size": size, "state": state} for size, state in blocks]
        return {"stream": stream, "segment_pool_id": pool, "blocks": every}

    snapshot = [
        segment(0, (0, 0), (512, "inactive"), (1024, "active_allocated"), (2048, "inactive")),
        segment(0, (0, 1), (4096, "inactive")),
        segment(7, (0, 0), (8192, "inactive")),
    ]
    assert list(bystanders.free_blocks(snapshot, 0)) == [512, 2048]
