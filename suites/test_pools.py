"""The pools of aimed inputs are frozen: what is added changes no recorded case."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch

from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Values, parse_id
from moe_parity.references.language.decision import decisions
from moe_parity.references.stages import ACT_QUANT, FC1, SWIGLU
from moe_parity.references.stages.quant import aims, inputs
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.swiglu import aims as gates
from moe_parity.references.stages.swiglu.pools import pool
from moe_parity.references.stages.swiglu.silu import Silu

QUANT = Case(m=64, h=512, values=Values.AIMED, seed=11)
GATES = Case(m=256, i=256, values=Values.AIMED, seed=11)
FROZEN = {
    "quant": "ca3188c8c3eb5b77d3f73ef589237c3f406aeb9ff2837c0547ede8a176aae040",
    "gates": "cd3377a44f9b9cc140e9001b1752e119e3bce6dd02c690c01352afaf245c384e",
}
"""SHA-256 of the two pools of seed 11, version 1, as they were when 116 witnesses were recorded."""
SECOND = {
    (Values.AIMED, None): "39967a61feb1f95d29c7cb991348ea27465707d534f5df87eb43a572f093eccb",
    (Values.AIMED, 1.0115): "3551515948ea951bc6dee863cbb3a7771da571386664d1d06848d4beb7dfa749",
    (Values.SPECIAL, None): "5b7b354c98db663448e7af9fef343a04d880fa6c139e8f1dcc7b2e240091728e",
    (Values.SPECIAL, 1.0115): "5b7b354c98db663448e7af9fef343a04d880fa6c139e8f1dcc7b2e240091728e",
}
"""SHA-256 of the second pool of gates, by values and limit."""


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_version_1_is_what_it_was():
    assert digest(inputs.aimed_pool(11, 1)) == FROZEN["quant"]
    assert digest(pool(GATES)) == FROZEN["gates"]


def test_an_aim_that_is_added_changes_no_recorded_case(monkeypatch: pytest.MonkeyPatch):
    """A later version holds the new aim; cases of the first keep their bits."""
    before = ACT_QUANT.inputs(QUANT).x
    monkeypatch.setitem(aims.POOLS, 3, (*aims.POOLS[2], aims.past_the_end))
    later = parse_id("any-fp32-aimed-pool3-m64-h512", seed=11)[1]
    assert later.id == "fp32-aimed-pool3-m64-h512"
    try:
        changed = ACT_QUANT.inputs(later).x
        after = ACT_QUANT.inputs(QUANT).x
    finally:
        inputs.aimed_pool.cache_clear()
    assert torch.equal(before.view(torch.int16), after.view(torch.int16))
    assert not torch.equal(before.view(torch.int16), changed.view(torch.int16))


def test_a_pool_that_is_not_there_is_refused():
    with pytest.raises(ParityError, match="there is no pool 7 of aimed inputs, only 1, 2"):
        ACT_QUANT.inputs(parse_id("any-fp32-aimed-pool7-m4")[1])
    with pytest.raises(ParityError, match="there is no pool 7 of aimed inputs; there are: 1, 2"):
        SWIGLU.inputs(parse_id("any-fp32-aimed-pool7-m4-i128")[1])
    with pytest.raises(ParityError, match="fc1 knows pool 1, 2, not 7"):
        FC1.inputs(parse_id("any-fp32-aimed-pool7-m4-i128")[1])


def test_a_form_of_silu_that_is_added_changes_no_gate_of_the_first_pool():
    """The first pool names its forms; the decision's own aim takes all that there are."""
    assert set(gates.FIRST_FORMS) <= set(Silu)
    fewer = gates._gates_that_tell(11, tuple(form for form in Silu if form is not Silu.FAST))
    assert fewer.shape != gates.every_gate_of_pool_1(11).shape, "a form that tells nothing"


@pytest.mark.parametrize("clamp", [None, 1.0115])
@pytest.mark.parametrize("values", [Values.AIMED, Values.SPECIAL])
def test_the_second_pool_of_gates_is_what_it_was(clamp: float | None, values: Values):
    case = dataclasses.replace(GATES, clamp=clamp, values=values, pool=2)
    assert digest(pool(case)) == SECOND[values, clamp]


def test_the_last_pool_has_every_aim_of_the_quantizers():
    """What tells a decision of a quantizer is in the inputs of its stage."""
    wanted = {decision.aim for decision in decisions(QuantRecipe).values()}
    assert wanted <= set(aims.POOLS[max(aims.POOLS)])
