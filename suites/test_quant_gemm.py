"""Stage ``quant_gemm``: rows that are quantized inside a GEMM, on inputs that show what is decided.

Codes and scales are seen by nobody there, so first of all the inputs are: what each kind of row and
column is made for, and that every decision of the quantizer and of the GEMM shows in the rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import Tensor

from moe_parity.harness.cases.grid import params
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, expect
from moe_parity.harness.checks.flow import check
from moe_parity.kernels import Call, Kernel
from moe_parity.references.arithmetic.formats import E4M3, f32_to_bf16
from moe_parity.references.language import Case, Hazard, ScaleFormat, Values
from moe_parity.references.recipes import ALL, recipe_named
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import QUANT_GEMM
from moe_parity.references.stages.gemm import reference as gemm
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.quant import reference as quant
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant_gemm import inputs as making
from moe_parity.references.stages.quant_gemm.inputs import QuantGemmInputs
from moe_parity.suites.planted import kernel_of

CASE = Case(m=24, h=512, i=128, values=Values.AIMED, seed=11)
EVERY = dataclasses.replace(CASE, m=128)
"""Rows of every mantissa of amax."""


# --- bits -----------------------------------------------------------------------------------------


def cases() -> Iterator[Case]:
    """Rows around every tile, ragged N, both formats, operands that lie elsewhere."""
    for m in (0, 1, 31, 32, 33):
        yield dataclasses.replace(CASE, m=m, h=256)
    yield dataclasses.replace(CASE, m=17, i=130, scale=ScaleFormat.UE8M0)
    yield dataclasses.replace(CASE, m=5, i=64, h=384)
    for values in (Values.NORMAL, Values.WIDE, Values.SPECIAL):
        yield dataclasses.replace(CASE, m=5, h=384, values=values)
    for hazard in (Hazard.STRIDED, Hazard.TRANSPOSED):
        yield dataclasses.replace(CASE, m=5, h=256, hazard=hazard)
    # as deep as a model's hidden size
    yield dataclasses.replace(CASE, m=2, h=7168, i=16)


@pytest.mark.parametrize(("kernel", "case"), params(QUANT_GEMM, cases()))
def test_quant_gemm(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    expect(kernel, case, parity_device, parity_recorder)


@pytest.mark.parametrize("scale", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_the_reference_is_a_quantizer_and_a_gemm(scale: ScaleFormat):
    case = dataclasses.replace(CASE, m=5, scale=scale)
    given = QUANT_GEMM.inputs(case)
    act = quant.act_quant(given.x, OURS.of("act_quant", QuantRecipe), scale=scale)
    chain = OURS.of("gemm", GemmRecipe)
    rows = gemm.gemm(act.codes, act.scales, given.w, given.w_scale, chain)
    got = QUANT_GEMM.reference(case, given, OURS)["rows"]
    assert torch.equal(comparable(got), comparable(gemm.finish(rows, None, chain)))


# --- what the inputs are made of ------------------------------------------------------------------


def test_a_groups_digits_are_its_amax_under_a_scale_that_is_a_power_of_two():
    """Exact in E4M3, so that no quantizer rounds them."""
    given = QUANT_GEMM.inputs(EVERY)
    measured = given.x[0::2].float()[0::2]
    second, first = (half.reshape(-1, 128) for half in measured.chunk(2, 1))
    assert bool((first[:, 0] == first.abs().amax(1)).all())
    assert bool((second[:, 1] + second[:, 2] == first[:, 0]).all())
    assert not second[:, 3:].any()
    for row in second.tolist():
        scale = Fraction(row[0]) / 448
        assert scale.numerator == 1 or scale.denominator == 1
        assert (scale.numerator * scale.denominator).bit_count() == 1
        for digit in row[1:3]:
            code = E4M3.encode(torch.tensor([float(Fraction(digit) / scale)]))
            assert Fraction(float(E4M3.decode(code))) * scale == Fraction(digit)


def test_every_mantissa_of_amax_is_measured():
    found = {round(128 * float(torch.frexp(g[0])[0]) * 2) for g in making.groups(3)}
    assert found == set(range(128, 256))


def test_groups_whose_amax_has_elements_on_midpoints_hold_nothing_else():
    """By whole numbers: 448 X = e A, with X and A of 8 bits and e a midpoint."""
    code = E4M3.decode(torch.arange(127, dtype=torch.uint8)).double()
    ends = (code[1:] + code[:-1]) * 2.0**9  # whole numbers: midpoints times 2^10
    whole = torch.arange(128, 256).double()
    binade = torch.exp2(-torch.arange(13).double())
    tied = 0
    for group in making.groups(3).double():
        amax = group[0] / torch.exp2(torch.floor(torch.log2(group[0])) - 7.0)
        below = (whole[None] * binade[:, None]).flatten()
        below = below[below < amax]
        possible = below[torch.isin(below * 448 * 2.0**10, ends * amax)]
        if possible.numel():
            tied += 1
            held = group[1:].abs() * amax / group[0]
            assert set(held.tolist()) == set(possible.tolist())
    assert tied == 45


def test_a_column_of_one_place_reads_a_code_off():
    """BF16 holds the product of a code and the scales closely enough to tell codes apart."""
    case = dataclasses.replace(CASE, m=9)
    given = QUANT_GEMM.inputs(case)
    act = quant.act_quant(given.x, OURS.of("act_quant", QuantRecipe))
    rows = QUANT_GEMM.reference(case, given, OURS)["rows"]
    for column in range(2, 128, 4):
        (place,) = given.w[column].nonzero()[:, 0].tolist()
        assert given.w[column, place] == 0x38
        assert place >= 256
        value = E4M3.decode(act.codes[0, place]).double() * act.scales[0, place // 128].double()
        exact = value * given.w_scale[0, place // 128].double()
        assert float((rows[0, column].double() - exact).abs()) <= float(exact.abs()) * 2.0**-8


def test_a_column_of_digits_leaves_the_error_of_a_scale():
    """448 s - amax, exactly, but for the rounding to BF16 of what is left."""
    x = making._measuring(CASE, 64, 256, "cpu")
    plain = torch.ones(1, 4)
    w = QUANT_GEMM.inputs(CASE).w
    given = QuantGemmInputs(x=f32_to_bf16(torch.cat([making._digits(x), x], 1)), w=w, w_scale=plain)
    case = Case(m=64, h=512, i=128)
    rows = QUANT_GEMM.reference(case, given, recipe_named("trtllm_fused"))["rows"].double()
    for row, column in itertools.product(range(64), (3, 7)):
        amax = float(given.x[row, 256 + column // 4 % 2 * 128])
        stored = float(torch.tensor(1.0) / (torch.tensor(448.0) / torch.tensor(amax)))
        left = torch.tensor(448 * stored - amax, dtype=torch.float32)
        assert float(rows[row, column]) == float(f32_to_bf16(left))


# --- what shows -----------------------------------------------------------------------------------

UNSEEN = {
    "quant.floor_order": "none of these recipes floors a scale",
    "quant.nan_amax": "a group with a NaN gives NaN whatever its scale",
    "quant.power_of_two": "another scale format",
    "gemm.bias_at": "there is no bias",
}
"""Decisions that show in no row, and why."""
OPEN = {
    ("trtllm_fused", "quant.apply=mul_recip"), ("ours", "quant.zero_group=as_floored"),
    ("flashinfer_cutlass", "quant.subnormal_amax=largest"),
}  # fmt: skip
"""Options that could not be told from a recipe's own on these inputs; the last one needs a group of
subnormals whose first lane holds zeros, which 128 aimed rows have."""
NO_EFFECT = {"quant.overflow=nan", "quant.floor=scale_min_normal"}
"""An amax keeps elements at 448 and below; a stored scale below 2^-126 has no BF16 to tell it."""


@cache
def rows_of(name: str, case: Case) -> Tensor:
    return comparable(
        QUANT_GEMM.reference(case, QUANT_GEMM.inputs(case), recipe_named(name))["rows"]
    )


@pytest.mark.parametrize("name", ["ours", "trtllm_fused", "flashinfer_cutlass"])
def test_every_decision_of_the_quantizer_and_of_the_gemm_shows_in_the_rows(name: str):
    given = QUANT_GEMM.inputs(EVERY)
    right = rows_of(name, EVERY)
    hidden = set()
    for label, recipe in QUANT_GEMM.neighbours(recipe_named(name)):
        decision = label.partition("=")[0]
        made = comparable(QUANT_GEMM.reference(EVERY, given, recipe)["rows"])
        if torch.equal(made, right):
            hidden.add(label)
        else:
            assert decision not in UNSEEN, label
    left = {label for label in hidden if label.partition("=")[0] not in UNSEEN} - NO_EFFECT
    assert left == {label for recipe, label in OPEN if recipe == name}


def test_recipes_of_quantizers_are_told_apart_by_four_rows():
    """Those that differ in how an element or a scale is divided: the two builds among them."""
    case = dataclasses.replace(CASE, m=4)
    names = ("trtllm_fused", "flashinfer_cutlass", "vllm_deepgemm", "vllm_fused_silu")
    for one, other in itertools.combinations(names, 2):
        assert not torch.equal(rows_of(one, case), rows_of(other, case)), (one, other)


def test_a_power_of_two_shows():
    case = dataclasses.replace(CASE, scale=ScaleFormat.UE8M0, m=64)
    right = rows_of("ours", case)
    given = QUANT_GEMM.inputs(case)
    for label, recipe in QUANT_GEMM.neighbours(OURS):
        if label.startswith("quant.power_of_two="):
            made = comparable(QUANT_GEMM.reference(case, given, recipe)["rows"])
            assert torch.equal(made, right) == label.endswith("=none"), label


def test_a_recipe_without_either_part_says_nothing_of_it():
    described = {name for name, recipe in ALL.items() if QUANT_GEMM.described_by(recipe)}
    assert {"ours", "trtllm_fused", "flashinfer_cutlass"} <= described
    assert not {"deepgemm_gemm", "flashinfer_mono", "no_rounding"} & described


# --- faults put into it ---------------------------------------------------------------------------

Change = Callable[[QuantGemmInputs], QuantGemmInputs]


def tail_lost(given: QuantGemmInputs) -> QuantGemmInputs:
    x = given.x.clone()
    x[:, -128:] = 0
    return dataclasses.replace(given, x=x)


def transposed(given: QuantGemmInputs) -> QuantGemmInputs:
    return dataclasses.replace(given, w_scale=given.w_scale.t().contiguous())


def signs_lost(given: QuantGemmInputs) -> QuantGemmInputs:
    return dataclasses.replace(given, w=given.w & 0x7F)


def from_the_start(given: QuantGemmInputs) -> QuantGemmInputs:
    rows = given.x.as_strided(given.x.shape, (given.x.shape[1], 1))
    return dataclasses.replace(given, x=rows)


@pytest.mark.parametrize(
    ("change", "words", "name"),
    [
        (tail_lost, {}, "k_tail"),
        (transposed, {"i": 512}, "transposed_scales"),
        (signs_lost, {}, "sign_lost"),
        (from_the_start, {"hazard": Hazard.STRIDED}, "row_stride"),
    ],
)
def test_a_wrong_quant_gemm_is_red_and_named(change: Change, words: dict[str, object], name: str):
    def wrong(call: Call) -> Tensor:
        made = QUANT_GEMM.reference(call.case, change(call.inputs), OURS)["rows"]
        return call.new("rows").copy_(made)

    case = dataclasses.replace(CASE, m=8, **words)
    verdict = next(check(kernel_of("quant_gemm", wrong), case, "cpu"))
    assert verdict.failed
    assert name in verdict.causes, verdict.message


def test_one_scale_for_two_groups_is_red_and_named():
    """A mistake of the quantizer, seen through the GEMM."""

    def wrong(call: Call) -> Tensor:
        given = call.inputs
        act = quant.act_quant(given.x, OURS.of("act_quant", QuantRecipe))
        chain = OURS.of("gemm", GemmRecipe)
        rows = gemm.gemm(act.codes, act.scales.roll(1, 1), given.w, given.w_scale, chain)
        return call.new("rows").copy_(gemm.finish(rows, None, chain))

    verdict = next(check(kernel_of("quant_gemm", wrong), dataclasses.replace(CASE, m=8), "cpu"))
    assert verdict.failed
    assert "scale_of_neighbour" in verdict.causes, verdict.message
