"""The prefix-sum path of the layer: the bits of every other path, and one recorded call for all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moe_parity.harness.checks.compare import comparable
from moe_parity.references.language import Case, Routing, Values
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.references.stages.layer.operands import LayerInputs

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
dispatch = pytest.importorskip("moe_parity.kernels.ours.dispatch", reason="needs Triton")
prefix_sum = pytest.importorskip("moe_parity.kernels.ours.prefix_sum", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")

SMALL = Case(m=6, e=5, k=2, h=256, i=128, values=Values.AIMED)
ROUTED: dict[str, tuple[Case, int]] = {
    "five experts": (SMALL, 128),
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
