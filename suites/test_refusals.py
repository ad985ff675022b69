"""Bad input is refused in one sentence, before anything is written."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from moe_parity.kernels import register
from moe_parity.kernels.ours.validate import check_codes, check_scales
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Check, Contract, parse_id
from moe_parity.references.recipes.deepgemm import DEEPGEMM
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import STAGES
from moe_parity.references.stages.quant import reference as quant
from moe_parity.references.stages.quant.decisions import Apply, QuantRecipe

X = torch.ones(4, 256, dtype=torch.bfloat16)


def _out(shape=(4, 256), groups=2, dtype=torch.float32):
    return torch.empty(shape, dtype=torch.uint8), torch.empty((shape[0], groups), dtype=dtype)


@pytest.mark.parametrize(
    ("x", "group", "sentence"),
    [
        (X.to(torch.int32), 128, "x must be bfloat16, float16 or float32, got torch.int32."),
        (X.double(), 128, "x must be bfloat16, float16 or float32, got torch.float64."),
        (X[0], 128, "x must be [rows, columns], got shape [256]."),
        (X[:, :200], 128, "K = 200 is not a positive multiple of group 128."),
        (X[:, :0], 128, "K = 0 is not a positive multiple of group 128."),
        (X, 32, "group must be 64 or 128, got 32."),
    ],
)
def test_act_quant_refuses_its_input(x: torch.Tensor, group: int, sentence: str):
    ours = pytest.importorskip("moe_parity.kernels.ours.quant", reason="needs Triton")
    with pytest.raises(ParityError, match=re.escape(f"act_quant: {sentence}")):
        ours.act_quant(x, group=group)


@pytest.mark.parametrize(
    ("codes", "scales", "sentence"),
    [
        (*_out((4, 128)), "codes must be torch.uint8 [4, 256], got torch.uint8 [4, 128]."),
        (*_out(groups=3), "scales must be torch.float32 [4, 2], got torch.float32 [4, 3]."),
        (
            *_out(dtype=torch.float64),
            "scales must be torch.float32 [4, 2], got torch.float64 [4, 2].",
        ),
        (
            *_out(groups=2, dtype=torch.int32),
            "scales must be torch.int32 [4, 1], got torch.int32 [4, 2].",
        ),
        (
            torch.empty(256, 4, dtype=torch.uint8).t(),
            _out()[1],
            "rows of codes must be contiguous, strides (1, 4).",
        ),
    ],
)
def test_act_quant_refuses_its_outputs(codes: torch.Tensor, scales: torch.Tensor, sentence: str):
    ours = pytest.importorskip("moe_parity.kernels.ours.quant", reason="needs Triton")
    with pytest.raises(ParityError, match=re.escape(f"act_quant: {sentence}")):
        ours.act_quant_out(X, codes, scales, 128, False)


@pytest.mark.parametrize(
    ("codes", "scales", "sentence"),
    [
        (torch.zeros(4, 4), torch.ones(1, 1), "codes must be uint8 with contiguous rows"),
        (torch.zeros(4, 4).byte().t()[:, :2], torch.ones(1, 1), "codes must be uint8"),
        (torch.zeros(4, 4).byte(), torch.ones(2, 1), "scales must be contiguous float32 [1, 1]"),
        (torch.zeros(4, 4).byte(), torch.ones(1, 1).double(), "scales must be contiguous float32"),
    ],
)
def test_requantize_refuses(codes: torch.Tensor, scales: torch.Tensor, sentence: str):
    ours = pytest.importorskip("moe_parity.kernels.ours.quant", reason="needs Triton")
    with pytest.raises(ParityError, match=re.escape(f"requantize_weight: {sentence}")):
        ours.requantize_weight(codes, scales)


@pytest.mark.parametrize(
    ("bad", "power_of_two", "sentence"),
    [
        (float("nan"), False, "[1, 0] is nan (0x7fc00000), expected a positive finite number."),
        (float("inf"), False, "[1, 0] is inf (0x7f800000), expected a positive finite number."),
        (0.0, False, "[1, 0] is 0 (0x00000000), expected a positive finite number."),
        (-1.0, False, "[1, 0] is -1 (0xbf800000), expected a positive finite number."),
        (3.0, True, "[1, 0] is 3 (0x40400000), expected a power of two."),
    ],
)
def test_scales_are_validated(bad: float, power_of_two: bool, sentence: str):
    scales = torch.ones(2, 2)
    check_scales(scales, power_of_two=True)
    scales[1, 0] = bad
    with pytest.raises(ParityError, match=re.escape(f"w13_scales{sentence}")):
        check_scales(scales, power_of_two=power_of_two, name="w13_scales")
    with pytest.raises(ParityError, match=r"must be float32, got torch\.float16"):
        check_scales(scales.half())


def test_codes_are_validated():
    codes = torch.arange(127).byte().view(1, 127)
    check_codes(codes)
    codes[0, 5] = 0xFF
    with pytest.raises(ParityError, match=r"codes\[0, 5\] is the NaN 0xff"):
        check_codes(codes)


def test_references_refuse():
    with pytest.raises(ValueError, match="K = 100 is not a multiple of the group, 128"):
        quant.act_quant(X[:, :100], OURS.of("act_quant", QuantRecipe))
    with pytest.raises(TypeError, match="takes bfloat16, float16 or float32"):
        quant.act_quant(X.int(), QuantRecipe())
    with pytest.raises(ValueError, match=r"quant\.floor cannot be Apply\.DIVIDE; its options are"):
        QuantRecipe(floor=Apply.DIVIDE)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ours_act_quant", "names no kernel and scale format"),
        ("fp32-m4", "names no kernel and scale format"),
        ("ours-fp32-q9", "'q9' is not a word of the id grammar"),
        ("ours-fp32-ep9of8-m1", "rank 9 is not one of 8"),
    ],
)
def test_ids_are_refused(text: str, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        parse_id(text)


@pytest.mark.parametrize("wrong", [{"m": -1}, {"h": 0}, {"group": 0}, {"ep_rank": 1}])
def test_cases_are_refused(wrong: dict[str, int]):
    with pytest.raises(ValueError, match="case: "):
        Case(**wrong)


@pytest.mark.parametrize(
    ("stage", "word", "sentence"),
    [
        ("layer", "wide", "layer knows values aimed, normal, scales, not wide"),
        ("layer", "fp16", "layer does not read the word dtype"),
        ("layer", "g64", "layer does not read the word group"),
        ("fc1", "c7", "fc1 does not read the word clamp"),
        ("fc2", "swigluoai", "fc2 does not read the word gate"),
        ("combine", "col", "combine does not read the word layout"),
        ("weight_quant", "tma", "weight_quant does not read the word layout"),
        ("act_quant", "e4", "act_quant does not read the word e"),
        ("act_quant", "midue8m0", "act_quant does not read the word mid_scale"),
        ("swiglu", "pool7", "no pool 7"),
        *(
            (name, "ue8m0packed", f"{name} knows scale fp32, ue8m0, not ue8m0packed")
            for name in ("weight_quant", "align", "permute", "fc1", "fc2", "layer")
        ),
    ],
)
def test_a_word_that_a_stage_does_not_read_is_refused(stage: str, word: str, sentence: str):
    """It is never ignored: two ids are two cases."""
    text = {"pool7": "any-fp32-aimed-pool7-m4"}.get(word, f"any-fp32-{word}")
    case = parse_id(text.replace("fp32-ue8m0packed", "ue8m0packed"))[1]
    with pytest.raises(ParityError, match=sentence):
        STAGES[stage].inputs(case)


def test_a_contract_without_its_first_check_is_refused():
    with pytest.raises(ParityError, match="a contract holds the check exact"):
        Contract().without(Check.EXACT)


def test_the_name_of_another_recipe_is_refused():
    """Reports would speak of a recipe that the kernel does not follow."""
    other = dataclasses.replace(DEEPGEMM, name=OURS.name)
    with pytest.raises(ParityError, match="ours is another recipe's name; give yours one of its"):
        register("mine", stage="act_quant", recipes=other)
    register("mine", stage="act_quant", recipes=dataclasses.replace(other, name="my_own"))


def test_the_steps_of_our_layer_refuse_rows_that_are_not_contiguous():
    """Their kernels know one stride of a row, or none."""
    activation = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")
    steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
    ids, how = torch.zeros(4, 1, dtype=torch.int32), activation.Activation()
    columns = torch.zeros(256, 4, dtype=torch.bfloat16).t()
    codes, w = torch.zeros(128, 4, dtype=torch.uint8).t(), torch.zeros(1, 128, 128).byte()
    aligned, one = steps.align(ids, 0, 1, 16), torch.ones(4, 1)
    with pytest.raises(ParityError, match=r"^grouped_gemm: rows of a .*, strides \(1, 4\)\.$"):
        steps.grouped_gemm(codes, one, w, one[None, :1], aligned, 4, 1)
    with pytest.raises(ParityError, match=r"^grouped_gemm: out must be contiguous.*\(1, 4\)\.$"):
        steps.grouped_gemm(w[0, :4], one, w, one[None, :1], aligned, 4, 1, out=columns[:, :128])
    with pytest.raises(
        ParityError, match=r"^swiglu_quant: vectors need whole .*, strides \(1, 4\)"
    ):
        activation.swiglu_quant(columns, ids, 0, 1, how, vector=True)
    with pytest.raises(ParityError, match=r"^quant_rows: rows must be contiguous .*\(1, 4\)\.$"):
        activation.quant_rows(columns, ids, 0, 1)
    with pytest.raises(ParityError, match=r"^combine: rows must be contiguous, strides \(1, 4\)"):
        steps.combine(columns, one, ids, 0, 1, torch.empty(4, 256))


def test_the_first_of_several_bad_values_is_named():
    scales, codes = torch.ones(3, 4), torch.zeros(3, 4, dtype=torch.uint8)
    for at in ((0, 3), (1, 0), (2, 2)):
        scales[at], codes[at] = -2.0, 0x7F
    with pytest.raises(ParityError, match=r"^scales\[0, 3\] is -2 "):
        check_scales(scales)
    with pytest.raises(ParityError, match=r"^codes\[0, 3\] is the NaN 0x7f\.$"):
        check_codes(codes)
