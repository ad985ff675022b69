"""A layer of batched experts: the bits of ``run_moe`` before its sum, no wait, no compilation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling import recording
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.language import Case
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.references.stages.layer.operands import Experts
from moe_parity.suites.test_batched import (
    counts_of,
    ids_of,
    live,
    normal,
    poisoned,
    same,
    untouched,
)

batched = pytest.importorskip("moe_parity.kernels.ours.batched", reason="needs Triton")
moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
scale_format = pytest.importorskip("moe_parity.kernels.ours.scale_format", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")

CASE = Case(m=8, e=3, k=2, h=256, i=128)


def small(device: str, **changes: Tensor) -> tuple[Experts, Tensor, Tensor]:
    """Return experts, their counts and rows [3, 6, 256]."""
    experts = layer_inputs(CASE, device, spoil=False).experts
    counts = counts_of((6, 0, 4), device)
    return dataclasses.replace(experts, **changes), counts, normal("x", live(counts, 6), 256)


LAYERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "ue8m0": {"power_of_two": True},
    "mid_ue8m0": {"mid_power_of_two": True, "limit": 1.5},
    "mid_fp32": {"power_of_two": True, "mid_power_of_two": False, "limit": 1.5, "clamp": "after"},
    "formats": {"formats": scale_format.LayerFormats(act="ue8m0", mid="fp32")},
    "limits_and_shift": {"limit": (0.5, 9.0, 2.0), "alpha": 1.702, "beta": 1.0},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_batched_layer_has_the_bits_of_the_routed_one(name: str, parity_device: str):
    """Its rows before the sum; biases, and codes that arrive with their scales, as well."""
    options = dict(LAYERS[name])
    if isinstance(options.get("limit"), tuple):
        options["limit"] = torch.tensor(options["limit"], device=parity_device)
    bias = {}
    if name == "ue8m0":
        wide = random_bits.normal(5, "bias", 3, 512, device=parity_device)
        bias = {"bias13": wide[:, :256].contiguous(), "bias2": wide[:, 256:].contiguous()}
    experts, counts, x = small(parity_device, **bias)
    mask = live(counts, 6)
    weights = torch.ones(18, 1, device=parity_device)
    want = moe.run_stages(x.view(18, 256), ids_of(mask), weights, experts, path="large", **options)
    out = poisoned((3, 6, 256), torch.bfloat16, parity_device)
    assert batched.run_batched(x, counts, experts, out=out, **options) is out
    assert same(out, want.fc2, mask)
    assert untouched(out, mask)
    codes, scales = want.act_codes.view(3, 6, 256), want.act_scales.view(3, 6, 2)
    again = batched.run_batched(codes, counts, experts, x_scale=scales, **options)
    assert same(again, want.fc2, mask)


def test_a_batched_layer_that_is_told_no_format_has_the_default(
    monkeypatch: pytest.MonkeyPatch, parity_device: str
):
    experts, counts, x = small(parity_device)
    mask = live(counts, 6)
    fp32, powers = (batched.run_batched(x, counts, experts, power_of_two=p) for p in (False, True))
    assert not same(fp32, powers, mask)
    for default, want in (("fp32", fp32), ("ue8m0", powers)):
        value = scale_format.ScaleFormat(default)
        monkeypatch.setattr(scale_format, "default_format", lambda value=value: value)
        assert same(batched.run_batched(x, counts, experts), want, mask)


def test_a_batched_layer_without_room_has_no_rows(parity_device: str):
    experts, counts, _ = small(parity_device)
    empty = torch.zeros((3, 0, 256), dtype=torch.bfloat16, device=parity_device)
    assert batched.run_batched(empty, counts, experts).shape == (3, 0, 256)


def test_a_batched_layer_looks_at_no_value():
    """Nothing that it calls waits for a GPU; with ``validate`` the counts are looked at."""
    experts, counts, x = small("cpu")
    for validate in (False, True):
        with recording.recording(recording.Path(batched.__file__)) as found:
            batched.run_batched(x, counts, experts, validate=validate)
        assert (found.stops is not None) is validate
        assert validate or found.waits == []


def test_a_batched_layer_replays_with_the_counts_as_they_are_then():
    """The launches of one call, as a CUDA graph runs them, take other counts and rows."""
    experts, counts, x = small("cpu")
    out = poisoned((3, 6, 256), torch.bfloat16, "cpu")
    with virtual_gpu.dry(), virtual_gpu.record() as tape:
        batched.run_batched(x, counts, experts, out=out)
    assert len(tape.launches) == 4
    counts.copy_(counts_of((1, 6, 0), "cpu"))
    mask = live(counts, 6)
    x.copy_(normal("others", mask, 256))
    tape.replay()
    assert untouched(out, mask)
    assert same(out, batched.run_batched(x, counts, experts), mask)


def test_a_batched_layer_is_compiled_for_two_classes_of_rooms():
    """T up to 32 and more; nothing is compiled anew for any other T."""
    from moe_parity.kernels.virtual_gpu.specialize import forms

    experts, counts, _ = small("cpu")

    def keys(tokens: int) -> set[str]:
        x = torch.zeros((3, tokens, 256), dtype=torch.bfloat16)
        with virtual_gpu.dry(), virtual_gpu.record() as tape:
            batched.run_batched(x, counts, experts, limit=7.0)
        return {f"{item.kernel.__name__} {forms(item)}" for item in tape.launches}

    warmed = keys(1), keys(33)
    assert warmed[0] != warmed[1]
    for tokens in (2, 3, 15, 16, 17, 31, 32, 34, 48, 63, 64, 128, 255, 256, 1000):
        assert keys(tokens) == warmed[tokens > 32], f"T = {tokens}"


def test_the_programs_of_a_batched_quantization_are_no_more_than_the_rows_can_take():
    """From metadata alone: up to 528, whatever the counts are."""
    counts = torch.zeros(4, dtype=torch.int32)
    for tokens, columns, programs in ((16, 256, 8), (17, 256, 16), (4096, 256, 528)):
        rows = torch.zeros((4, tokens, columns), dtype=torch.bfloat16)
        with virtual_gpu.dry(), virtual_gpu.record() as tape:
            batched.batched_act_quant(rows, counts)
        assert tape.launches[0].grid == (programs,)
