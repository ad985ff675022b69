"""The pools of aimed inputs are frozen: what is added changes no recorded case."""

from __future__ import annotations

import hashlib

import pytest
import torch

from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Values, parse_id
from moe_parity.references.stages import ACT_QUANT
from moe_parity.references.stages.quant import aims, inputs
from moe_parity.references.stages.swiglu import aims as gates
from moe_parity.references.stages.swiglu.silu import Silu
from moe_parity.references.stages.swiglu.stage import pool

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
    assert digest(pool(GATES)) == FROZEN["gates"]


def test_an_aim_that_is_added_changes_no_recorded_case(monkeypatch: pytest.MonkeyPatch):
    """A second version holds the new aim; cases of the first keep their bits."""
    before = ACT_QUANT.inputs(QUANT).x
    monkeypatch.setitem(aims.POOLS, 2, (*aims.POOLS[1], aims.past_the_end))
    second = parse_id("any-fp32-aimed-pool2-m64-h512", seed=11)[1]
    assert second.id == "fp32-aimed-pool2-m64-h512"
    try:
        changed = ACT_QUANT.inputs(second).x
        after = ACT_QUANT.inputs(QUANT).x
    finally:
        inputs.aimed_pool.cache_clear()
    assert torch.equal(before.view(torch.int16), after.view(torch.int16))
    assert not torch.equal(before.view(torch.int16), changed.view(torch.int16))


def test_a_pool_that_is_not_there_is_refused():
    with pytest.raises(ParityError, match="there is no pool 7 of aimed inputs, only 1"):
        ACT_QUANT.inputs(parse_id("any-fp32-aimed-pool7-m4")[1])


def test_a_form_of_silu_that_is_added_changes_no_gate_of_the_first_pool():
    """The first pool names its forms; the decision's own aim takes all that there are."""
    assert set(gates.FIRST_FORMS) <= set(Silu)
    fewer = gates._gates_that_tell(11, tuple(form for form in Silu if form is not Silu.FAST))
    assert fewer.shape != gates.every_gate_of_pool_1(11).shape, "a form that tells nothing"
