"""What ``assert_matches`` refuses, each in a sentence: no call that compares nothing is green."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from moe_parity.harness import assert_matches
from moe_parity.harness.evidence import given
from moe_parity.references.errors import ParityError
from moe_parity.references.stages import STAGES
from moe_parity.suites.meta.test_dump import SMALL, named

X = torch.ones(2, 128, dtype=torch.bfloat16)
CODES, SCALES = torch.zeros(2, 128, dtype=torch.uint8), torch.ones(2, 1)
GOOD: dict[str, Any] = {
    "stage": "act_quant", "inputs": {"x": X}, "outputs": {"codes": CODES, "scales": SCALES},
    "recipe": "ours",
}  # fmt: skip


def of_combine(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a top-k sum of two tokens."""
    rows, ids = torch.ones(2, 2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 2]])
    out = {"outputs": {"out": torch.zeros(2, 128, dtype=torch.bfloat16)}}
    case = {"case": changes.pop("case")} if "case" in changes else {}
    return {"stage": "combine", "inputs": {"rows": rows, "ids": ids} | changes, **out, **case}


def of_fc1(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a GEMM of two tokens and two experts."""
    codes = torch.zeros(2, 128, dtype=torch.uint8)
    inputs = {
        "a": codes, "a_scale": torch.ones(2, 1), "w": codes.expand(2, 2, 128).clone(),
        "w_scale": torch.ones(2, 1, 1), "ids": torch.tensor([[0], [1]]),
    }  # fmt: skip
    out = {"rows": torch.zeros(2, 2, dtype=torch.bfloat16)}
    return {"stage": "fc1", "inputs": inputs | changes, "outputs": out}


def of_layer(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a small layer."""
    inputs = named("layer", SMALL["layer"])
    return {"stage": "layer", "inputs": inputs | changes, "outputs": {"out": inputs["x"]}}


NAN = torch.tensor([[1.0], [float("nan")]])
BAD: list[tuple[dict[str, Any], str]] = [
    ({"stage": "act_kwant"}, "unknown stage 'act_kwant'; stages: weight_quant, act_quant, "),
    ({"stage": STAGES["act_quant"]}, "the stage is STAGES['act_quant'], expected the name of one."),
    ({"recipe": "vlm_cuda"}, "unknown recipe 'vlm_cuda'; `parity recipes` lists: ours, "),
    ({"recipe": []}, "no recipe is given for act_quant: name one, or several."),
    ({"recipe": None}, "the recipe is None, expected a name, a Recipe, or a list of these."),
    ({"recipe": ["ours", 3]}, "the recipe is 3, expected a name, a Recipe, or a list of these."),
    ({"recipe": "deepgemm_gemm"},
     "recipe deepgemm_gemm says nothing about act_quant: it lacks act_quant."),
    ({"inputs": {}}, "act_quant is given no inputs: nothing to compare."),
    ({"outputs": {}}, "act_quant is given no outputs: nothing to compare."),
    ({"inputs": X}, "act_quant: the inputs are a Tensor, expected a mapping from names to"),
    ({"outputs": (CODES, SCALES)}, "act_quant: the outputs are a tuple, expected a mapping"),
    ({"inputs": {"y": X}}, "act_quant needs the input x, and there is y."),
    ({"inputs": {"x": X, "y": X}}, "act_quant takes no input y here; it asks for x."),
    ({"inputs": {"x": [1.0]}}, "act_quant: the input x is a list, expected a tensor."),
    ({"inputs": {"x": X.to_sparse()}}, "the input x is sparse_coo on cpu, expected a plain tensor"),
    ({"inputs": {"x": X.to("meta")}}, "the input x is strided on meta, expected a plain tensor"),
    ({"inputs": {"x": X.double()}}, "the input x is torch.float64 [2, 128], expected bfloat16 or"),
    ({"inputs": {"x": X[0]}}, "the input x is torch.bfloat16 [128], expected"),
    ({"inputs": {"x": X[:, :100]}}, "act_quant has whole groups: H = 100 is not a multiple of 128"),
    ({"outputs": {"codes": CODES}}, "act_quant: its result lacks scales; act_quant's outputs are"),
    ({"outputs": {"codes": CODES, "scales": SCALES, "amax": SCALES}},
     "act_quant has no output amax; its outputs are codes, scales."),
    ({"outputs": {"codes": None, "scales": SCALES}}, "the output codes is a NoneType, expected a"),
    ({"outputs": {"codes": CODES.int(), "scales": SCALES}},
     "act_quant got codes as torch.int32 [2, 128], expected torch.uint8 [2, 128]."),
    ({"outputs": {"codes": CODES, "scales": SCALES.t()}},
     "act_quant got scales as torch.float32 [1, 2], expected torch.float32 [2, 1]."),
    ({"inputs": {"x": X[:0]}, "outputs": {"codes": CODES[:0], "scales": SCALES[:0]}},
     "act_quant: the output codes, scales has no elements: nothing to compare."),
    ({"inputs": {"x": X[:, :0]}, "outputs": {"codes": CODES[:, :0], "scales": SCALES[:, :0]}},
     "case: h must be at least 1, got 0."),
    ({"case": "q9"}, "id 'case-fp32-q9': 'q9' is not a word of the id grammar (docs/ids.md)."),
    ({"case": "c7"}, "act_quant does not read the word clamp (here 7.0)"),
    ({"case": None}, "the case is None, expected its words, such as 'ue8m0-c7'."),
    ({"case": "m3"}, "act_quant: the case says m 3, the tensors have 2; what tensors say may be"),
    ({"case": "f32"}, "act_quant: the case says dtype f32, the tensors have bf16; what tensors"),
    (of_combine(ids=torch.tensor([[0, 1], [1, 1 << 40]])),
     "combine: the input ids is 1099511627776 at [1, 1], expected an expert from 0 to 65535, or"),
    (of_combine(ids=torch.tensor([[0, -2], [1, 1]])), "the input ids is -2 at [0, 1], expected an"),
    (of_combine(case="e2"), "the input ids is 2 at [1, 1], expected an expert from 0 to 1, or -1"),
    (of_combine(case="ep0of2"), "case: 3 experts are not a multiple of 2 ranks."),
    (of_fc1(ids=torch.tensor([[0], [2]])), "fc1: the input ids is 2 at [1, 0], expected an expert"),
    (of_fc1(ids=torch.tensor([[-1], [-1]])),
     "fc1: no output belongs to an expert of this rank: nothing to compare."),
    (of_fc1(a_scale=NAN), "fc1: the input a_scale is NaN at [1, 0], and what it scales is"),
    (of_fc1(w_scale=NAN[:, :, None]), "fc1: the input w_scale is NaN at [1, 0, 0], and what it sc"),
    (of_fc1(w=torch.zeros(2, 2, 100)), "fc1: the input w is torch.float32 [2, 2, 100], expected"),
    (of_layer(ids=torch.zeros(3, 2, dtype=torch.int32)),
     "layer: the input ids is torch.int32 [3, 2], expected int32 or int64 [4, any]."),
    (of_layer(w13_scale=torch.ones(4, 4, 1)),
     "layer: the input w13_scale is torch.float32 [4, 4, 1], expected float32 [4, 4, 2]."),
    (of_layer(w2_scale=torch.ones(4, 2)), "layer: the input w2_scale is torch.float32 [4, 2], exp"),
    (of_layer(w13=torch.zeros(4, 128, 256, dtype=torch.uint8)),
     "layer: the input w13 is torch.uint8 [4, 128, 256], expected uint8 or float8_e4m3fn [4, 512"),
    (of_layer(x_scale=torch.ones(4, 2)), "layer takes no input x_scale here; it asks for x, ids, "),
    ({**of_layer(), "outputs": {"fc1": X}}, "layer: its result lacks out; layer's outputs are"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), BAD, ids=[text[:40] for _, text in BAD])
def test_what_cannot_be_judged_is_refused_in_a_sentence(changes: Mapping[str, Any], sentence: str):
    with pytest.raises(ParityError) as caught:
        assert_matches(**{**GOOD, **changes})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_of_two_devices_are_refused():
    """There is one device here, so another one is only said."""
    there = {"input x": X, "output codes": CODES.to("meta")}
    with pytest.raises(ParityError, match="the input x is on cpu, the output codes on meta: move"):
        given._demand_one_device(STAGES["act_quant"], there)
