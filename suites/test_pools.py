"""The pools of aimed inputs are frozen: what is added changes no recorded case."""

from __future__ import annotations

import hashlib

import pytest
import torch

from moe_parity.harness import inputs, stages
from moe_parity.references import aims
from moe_parity.references.language import Case, Stage, Values, parse_id

QUANT = Case(m=64, h=512, values=Values.AIMED, seed=11)
GATES = Case(m=256, i=256, values=Values.AIMED, seed=11)
FROZEN = {
    "quant": "ca3188c8c3eb5b77d3f73ef589237c3f406aeb9ff2837c0547ede8a176aae040",
    "gates": "cd3377a44f9b9cc140e9001b1752e119e3bce6dd02c690c01352afaf245c384e",
}
"""SHA-256 of the two pools of seed 11, version 1, as they were when 116 witnesses were recorded."""


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_version_1_is_what_it_was():
    assert digest(inputs.aimed_pool(11, 1)) == FROZEN["quant"]
    assert digest(stages.gate_up_pool(GATES)) == FROZEN["gates"]


def test_an_aim_that_is_added_changes_no_recorded_case(monkeypatch: pytest.MonkeyPatch):
    """A second version holds the new aim; cases of the first keep their bits."""
    before = inputs.quant_input(QUANT, Stage.ACT_QUANT)
    monkeypatch.setitem(aims.POOLS, 2, (*aims.POOLS[1], aims.past_the_end))
    second = parse_id("any-fp32-aimed-pool2-m64-h512", seed=11)[1]
    assert second.id == "fp32-aimed-pool2-m64-h512"
    try:
        changed = inputs.quant_input(second, Stage.ACT_QUANT)
        after = inputs.quant_input(QUANT, Stage.ACT_QUANT)
    finally:
        inputs.aimed_pool.cache_clear()
    assert torch.equal(before.view(torch.int16), after.view(torch.int16))
    assert not torch.equal(before.view(torch.int16), changed.view(torch.int16))


def test_a_pool_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="there is no pool 7 of aimed inputs; there are: 1"):
        inputs.quant_input(parse_id("any-fp32-aimed-pool7-m4")[1], Stage.ACT_QUANT)
