"""The prefix-sum path of the layer: the bits of every other path, and one recorded call for all."""

from __future__ import annotations

import dataclasses
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling import recording
from moe_parity.harness.checks.compare import comparable
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Routing, Values
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.references.stages.layer.operands import LayerInputs
from moe_parity.suites.prefixed import expected, poison, untouched

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
prefix_sum = pytest.importorskip("moe_parity.kernels.ours.prefix_sum", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")

SMALL = Case(m=6, e=5, k=2, h=128, i=128, values=Values.AIMED)
ROUTED: dict[str, tuple[Case, int]] = {
    "five experts": (dataclasses.replace(SMALL, h=256, i=256), 128),
    "empty experts": (dataclasses.replace(SMALL, m=2, e=16), 64),
    "one live row": (dataclasses.replace(SMALL, m=1, k=1), 256),
    "nobody's": (dataclasses.replace(SMALL, m=2, k=1, e=4, routing=Routing.NOBODY), 128),
    "one expert for all": (dataclasses.replace(SMALL, m=35, k=1, routing=Routing.ONE), 32),
    "rank 1 of 2": (
        dataclasses.replace(SMALL, e=6, ep_rank=1, ep_size=2, routing=Routing.HOLES), 16,
    ),
    "the same expert twice": (dataclasses.replace(SMALL, routing=Routing.REPEATED), 64),
}  # fmt: skip
FORMATS = {
    "fp32": {},
    "ue8m0": {"power_of_two": True},
    "fp32-ue8m0": {"mid_power_of_two": True},
    "ue8m0-fp32": {"power_of_two": True, "mid_power_of_two": False},
}


def ran(made: LayerInputs, path: str, **options: Any) -> Any:
    batch = made.batch
    return moe.run_stages(batch.x, batch.ids, batch.weights, made.experts, path=path, **options)


def assert_alike(made: LayerInputs, alignment: int, other: str, **options: Any) -> Any:
    """Run both paths; everything of the rank's own pairs has the same bits."""
    want = ran(made, other, **options)
    got = prefix_sum.in_pair_order(ran(made, "prefix_sum", alignment=alignment, **options))
    own = made.expert >= 0
    for name, one in vars(got).items():
        right = getattr(want, name)
        rows = own if len(own) == len(one) and name not in ("act_codes", "out") else slice(None)
        assert torch.equal(comparable(one)[rows], comparable(right)[rows]), name
    return got


@pytest.mark.parametrize(
    ("name", "formats", "other"),
    [
        ("five experts", "fp32", "decode"), ("five experts", "ue8m0", "large"),
        ("empty experts", "ue8m0", "large"), ("one live row", "fp32", "decode"),
        ("nobody's", "fp32", "large"), ("one expert for all", "fp32", "large"),
        ("rank 1 of 2", "ue8m0-fp32", "decode"), ("the same expert twice", "fp32-ue8m0", "large"),
    ],
)  # fmt: skip
def test_the_prefix_sum_path_has_the_bits_of_the_others(
    name: str, formats: str, other: str, parity_device: str
):
    case, alignment = ROUTED[name]
    made = layer_inputs(case, parity_device)
    out = assert_alike(made, alignment, other, **FORMATS[formats]).out
    assert bool(out.any()) == bool((made.expert >= 0).any())


OPTIONS: dict[str, dict[str, Any]] = {
    "before": {"limit": 0.5},
    "after": {"limit": 0.5, "clamp": "after", "power_of_two": True},
    "alpha_and_beta": {"alpha": 1.702, "beta": 1.0, "limit": 7.0},
    "limits": {"limit": [0.25, 0.5, 1.0, 2.0, 4.0]},
    "bias": {},
    "quantized": {},
    "out": {"out_dtype": torch.float32},
    "wide_ids": {"out_dtype": torch.float16},
    "no_weights": {},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_prefix_sum_path_takes_what_else_is_asked(name: str, parity_device: str):
    """Each option changes bits, or is no option of values, and the large path has the same."""
    made = layer_inputs(dataclasses.replace(SMALL, m=3), parity_device, spoil=False)
    plain = ran(made, "prefix_sum").out
    options, batch = dict(OPTIONS[name]), made.batch
    if name == "limits":
        options["limit"] = torch.tensor(options["limit"], device=parity_device)
    if name == "bias":
        wide = 9.0 * random_bits.normal(5, "bias", 5, 384, device=parity_device)
        biased = dataclasses.replace(
            made.experts, bias13=wide[:, :256].contiguous(), bias2=wide[:, 256:].contiguous()
        )
        made = dataclasses.replace(made, experts=biased)
    if name == "wide_ids":
        made = dataclasses.replace(made, batch=dataclasses.replace(batch, ids=batch.ids.long()))
    if name == "no_weights":
        made = dataclasses.replace(made, batch=dataclasses.replace(batch, weights=None))
    if name == "quantized":
        first = ran(made, "prefix_sum")
        quantized = dataclasses.replace(batch, x=first.act_codes)
        made = dataclasses.replace(made, batch=quantized)
        options["x_scale"] = first.act_scales
    if name == "out":
        room = torch.full((3, 160), 7.0, device=parity_device)
        options["out"] = room[:, :128]
    got = assert_alike(made, 64, "large", **options).out
    same = got.dtype is plain.dtype and torch.equal(comparable(got), comparable(plain))
    assert same is (name == "quantized")
    if name == "out":
        assert got.data_ptr() == room.data_ptr()
        assert bool((room[:, 128:] == 7.0).all())


def test_no_tokens_have_no_prefix_rows(parity_device: str):
    """The ends are those of no row all the same."""
    made = layer_inputs(dataclasses.replace(SMALL, m=0), parity_device)
    assert ran(made, "prefix_sum").out.shape == (0, 128)


# --- a call that is recorded once -----------------------------------------------------------------


def kept_apart(tape: Any, given: LayerInputs, out: Tensor) -> list[Tensor]:
    """Return the tensors of a tape's launches that are the call's own: workspaces."""
    inputs = [*vars(given.batch).values(), *vars(given.experts).values(), out]
    known = {one.data_ptr() for one in inputs if isinstance(one, Tensor)}
    found = {
        arg.data_ptr(): arg
        for launch in tape.launches for arg in launch.args
        if isinstance(arg, Tensor) and arg.data_ptr() not in known
    }  # fmt: skip
    return list(found.values())


REPLAYED = [
    [[0, 1], [2, 3], [4, 0], [1, 2]],
    [[-1, -1], [-1, 3], [-1, -1], [-1, -1]],
    [[-1, 5], [900, -1], [-1, -1], [77, -1]],
    [[2, 2], [2, 2], [2, 2], [2, 2]],
    [[4, 0], [-1, 0], [3, 9], [1, 1]],
]
"""Every row live, one, none, one expert for all, some."""


@pytest.mark.parametrize("powers", [False, True])
def test_a_recorded_prefix_sum_call_replays_with_the_routing_as_it_is_then(powers: bool):
    """Changed ids, ends and counts under one list of launches, all workspaces poisoned before."""
    made = layer_inputs(dataclasses.replace(SMALL, m=4), spoil=False)
    batch, experts = made.batch, made.experts
    ids, x = batch.ids.clone(), batch.x.clone()
    given = dataclasses.replace(made, batch=dataclasses.replace(batch, ids=ids, x=x))
    out = torch.empty_like(x)
    with virtual_gpu.dry(), virtual_gpu.record() as tape:
        moe.run_moe(x, ids, batch.weights, experts, out=out, path="prefix_sum", power_of_two=powers)
    names = [item.kernel.__name__ for item in tape.launches]
    assert names == [
        "act_quant_kernel", "count_kernel", "ends_kernel", "place_kernel", "copy_kernel",
        "prefix_gemm_kernel", "prefix_quant_kernel", "prefix_gemm_kernel", "prefix_combine_kernel",
    ]  # fmt: skip
    workspaces = kept_apart(tape, given, out)
    # codes and scales of the input, of the rows, of SwiGLU; ends, places, both products
    assert len(workspaces) == 10
    for number, routed in enumerate(REPLAYED):
        ids.copy_(torch.tensor(routed, dtype=torch.int32))
        x.copy_(batch.x.roll(number, 0))
        for tensor in [*workspaces, out]:
            poison(tensor)
        tape.replay()
        want = moe.run_moe(x, ids, batch.weights, experts, path="large", power_of_two=powers)
        assert torch.equal(comparable(out), comparable(want)), routed


def test_what_a_prefix_sum_layer_leaves_alone_in_a_workspace():
    """Memory of the caller's, poisoned before each of two calls: live rows alone are written."""
    made = layer_inputs(dataclasses.replace(SMALL, m=4), spoil=False)
    batch, experts = made.batch, made.experts
    quant = ran(made, "prefix_sum", power_of_two=False)
    own = prefix_sum.Workspace.empty(8, experts, alignment=32)
    held = [own.rows.codes, own.rows.scales, own.fc1, own.mid_codes, own.mid_scales, own.fc2]
    for routed in REPLAYED[1:3]:
        ids = torch.tensor(routed, dtype=torch.int32)
        for tensor in (*held, own.rows.ends, own.rows.place):
            poison(tensor)
        out = torch.empty_like(batch.x)
        trace = prefix_sum.run(
            quant.act_codes, quant.act_scales, ids, batch.weights, experts,
            prefix_sum.Activation(), out, alignment=32, workspace=own,
        )  # fmt: skip
        want = expected(ids.flatten().tolist(), 0, 5, 32)
        assert (own.rows.ends.tolist(), trace.place.tolist()) == (want.ends, want.place)
        live = want.live(own.fc1.shape[0])
        assert all(untouched(tensor, live) for tensor in held)
        large = moe.run_moe(batch.x, ids, batch.weights, experts, path="large", power_of_two=False)
        assert torch.equal(comparable(out), comparable(large))


def test_the_prefix_sum_path_looks_at_no_value():
    made = layer_inputs(SMALL, spoil=False)
    batch = made.batch
    for validate in (False, True):
        with recording.recording(FilePath(prefix_sum.__file__)) as found:
            moe.run_moe(
                batch.x, batch.ids, batch.weights, made.experts, path="prefix_sum",
                validate=validate,
            )  # fmt: skip
        assert (found.stops is not None) is validate
        assert validate or found.waits == []


def test_serving_by_prefix_sums_compiles_nothing_after_prewarming():
    """Every kernel with every compile-time constant of batches of up to 300 tokens."""
    from moe_parity.kernels.virtual_gpu.specialize import forms

    experts = layer_inputs(SMALL, spoil=False).experts

    def keys(call: Any) -> set[str]:
        with virtual_gpu.dry(), virtual_gpu.record() as tape:
            call()
        return {f"{item.kernel.__name__} {forms(item)}" for item in tape.launches}

    options = {"limit": 7.0, "alignment": 64}
    warmed = keys(lambda: moe.prewarm(experts, topk=2, paths=("prefix_sum",), **options))
    for tokens in (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 40, 64, 100, 300):
        x = torch.zeros((tokens, 128), dtype=torch.bfloat16)
        ids, weights = torch.zeros((tokens, 2), dtype=torch.int32), torch.ones((tokens, 2))
        served = keys(
            lambda x=x, ids=ids, weights=weights: moe.run_moe(
                x, ids, weights, experts, path="prefix_sum", **options
            )
        )
        assert served <= warmed, f"{tokens} tokens: {sorted(served - warmed)}"


def test_prewarming_warms_the_paths_that_are_named(monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(moe, "run_moe", lambda *_, **given: calls.append(given))
    experts = layer_inputs(SMALL, spoil=False).experts
    named = {"paths": iter(("large", "prefix_sum")), "alignment": 32, "gemm": "deepgemm"}
    assert moe.prewarm(experts, topk=1, tokens=(1, 2), **named) == 4
    own = {"alignment": 32, "gemm": "deepgemm"}
    assert [(str(c["path"]), {k: c[k] for k in own if k in c}) for c in calls] == [
        ("large", {}), ("prefix_sum", own),
    ] * 2  # fmt: skip
    with pytest.raises(ParityError, match="prewarm: paths must be one of"):
        moe.prewarm(experts, topk=1, paths=("fast",))
