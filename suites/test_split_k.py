"""K cut into halves that are added last: the option, what tells it, and a kernel that does it."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.flow import check
from moe_parity.harness.diagnosis.answer import identify
from moe_parity.harness.diagnosis.identify import Probe, Seen
from moe_parity.harness.evidence.mutants import ENOUGH
from moe_parity.kernels import Call
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import bits_of, f32_to_bf16
from moe_parity.references.language import Case, Values
from moe_parity.references.recipes.deepgemm import DEEPGEMM_GEMM
from moe_parity.references.recipes.pytorch import SCALED_MM_HALVES
from moe_parity.references.stages import FC1
from moe_parity.references.stages.gemm import reference as gemm
from moe_parity.references.stages.gemm.aims import codes, negated_half
from moe_parity.references.stages.gemm.decisions import (
    Accumulate,
    DotUnit,
    GemmRecipe,
    Interval,
    ScaleOrder,
    SplitK,
    half_of,
)
from moe_parity.suites import by_definition as exact
from moe_parity.suites.planted import kernel_of, red

DENSE = Case(m=24, e=1, k=1, h=512, i=64, values=Values.AIMED)
SPLITS = ("torch_scaled_mm_halves",)


# --- the option ---------------------------------------------------------------------------------


def by_fractions(a: Tensor, s_a: Tensor, w: Tensor, s_w: Tensor, add: Accumulate, step: int):
    """Return one output: two sums of rounded steps, each from zero, added with one rounding."""
    rn = exact.fp32
    sums = [Fraction(0), Fraction(0)]
    for start in range(0, len(a), step):
        left, right = (t[start : start + step].tolist() for t in (a, w))
        p = exact.dot(left, right, Fraction(0), DotUnit.WGMMA_FP8.value)
        scale = rn(Fraction(float(s_a[start // 128])) * Fraction(float(s_w[start // 128])))
        part = start >= len(a) // 2
        once = add is Accumulate.FMA
        sums[part] = rn(p * scale + sums[part]) if once else rn(rn(p * scale) + sums[part])
    return rn(sums[0] + sums[1])


@pytest.mark.parametrize("interval", [Interval.K128, Interval.K64])
@pytest.mark.parametrize("add", Accumulate)
def test_halves_are_two_sums_that_are_added_once(add: Accumulate, interval: Interval):
    a, w = codes(4, "a", 2, 512), codes(4, "w", 130, 512)
    s_a = 1.0 + random_bits.uniform(4, "sa", 2, 4)
    s_w = 1.0 + random_bits.uniform(4, "sw", 2, 4)
    recipe = GemmRecipe(split_k=SplitK.HALVES, accumulate=add, interval=interval)
    got = gemm.gemm(a, s_a, w, s_w, recipe)
    step = 128 if interval is Interval.K128 else 64
    for m, n in itertools.product(range(2), (0, 127, 128, 129)):
        want = by_fractions(a[m], s_a[m], w[n], s_w[n // 128], add, step)
        assert Fraction(float(got[m, n])) == want, (m, n)


@pytest.mark.parametrize("k", [128, 320, 384, 640])
def test_without_halves_of_whole_blocks_there_is_one_chain(k: int):
    """Nothing was measured of an odd number of blocks: the choice does not exist there."""
    assert half_of(k) is None
    a, w = codes(4, "a", 4, k), codes(4, "w", 64, k)
    blocks = -(-k // 128)
    s_a = 1.0 + random_bits.uniform(4, "sa", 4, blocks)
    s_w = 1.0 + random_bits.uniform(4, "sw", 1, blocks)
    one, other = (gemm.gemm(a, s_a, w, s_w, GemmRecipe(split_k=how)) for how in SplitK)
    assert torch.equal(bits_of(one), bits_of(other))
    case = dataclasses.replace(DENSE, h=k)
    probe = Probe(stage=FC1, case=case, inputs=FC1.inputs(case))
    assert "gemm.split_k" not in {decision.name for _, _, decision in probe.fields}


# --- what tells it ------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ScaleOrder)
@pytest.mark.parametrize("unit", [DotUnit.WGMMA_FP8, DotUnit.MMA_F16])
def test_a_negated_half_tells_it(unit: DotUnit, order: ScaleOrder):
    """Two sums cancel to +0; one keeps what its roundings left."""
    made = negated_half(0)
    assert torch.equal(made.w[:, :512] ^ 0x80, made.w[:, 512:])
    base = GemmRecipe(unit=unit, scale_order=order)
    one, two = (
        bits_of(gemm.gemm(made.a, made.a_scale, made.w, made.w_scale, recipe))
        for recipe in (base, dataclasses.replace(base, split_k=SplitK.HALVES))
    )
    assert not bool(two.any())
    assert int((one != two).sum()) >= ENOUGH


@pytest.mark.parametrize("h", [256, 512])
def test_the_inputs_of_the_stage_tell_it_from_two_blocks_on(h: int):
    case = Case(m=24, e=4, k=2, h=h, i=256, values=Values.AIMED)
    made = FC1.inputs(case)
    one, two = (
        FC1.reference(case, made, recipe)["rows"].view(torch.int16)
        for recipe in (DEEPGEMM_GEMM, SCALED_MM_HALVES)
    )
    assert int((one != two).sum()) >= ENOUGH


# --- a kernel that does it ----------------------------------------------------------------------


def in_halves(call: Call) -> Tensor:
    """Return the rows of two chains, one over each half of K, from the chain of one alone."""
    given, half = call.inputs, call.inputs.a.shape[1] // 2
    sums = [
        gemm.gemm(
            given.a[:, cut], given.a_scale[:, scales], given.w[0][:, cut],
            given.w_scale[0][:, scales], GemmRecipe(),
        )
        for cut, scales in (
            (slice(None, half), slice(None, half // 128)),
            (slice(half, None), slice(half // 128, None)),
        )
    ]  # fmt: skip
    return call.new("rows").copy_(f32_to_bf16(sums[0] + sums[1]))


def test_a_kernel_that_splits_k_is_red_and_named():
    verdict = next(check(kernel_of("fc1", in_halves, DEEPGEMM_GEMM), DENSE, "cpu"))
    assert verdict.failed
    assert verdict.causes == ("gemm.split_k=halves",)
    assert "gemm.split_k=halves instead of none in fc1" in verdict.message


def test_a_kernel_that_states_it_is_green():
    assert not red(kernel_of("fc1", in_halves, SCALED_MM_HALVES), DENSE)


def test_one_chain_is_not_two():
    def one_chain(call: Call) -> Tensor:
        return call.new("rows").copy_(FC1.reference(call.case, call.inputs, DEEPGEMM_GEMM)["rows"])

    verdict = next(check(kernel_of("fc1", one_chain, SCALED_MM_HALVES), DENSE, "cpu"))
    assert verdict.failed
    assert verdict.causes == ("gemm.split_k=none",)


def test_it_is_named_from_outputs_alone():
    """On the probes of the stage, every decision of the chain is settled beside it."""
    case = next(c for c in FC1.probes() if c.e == 1)
    made = FC1.inputs(case)
    rows = FC1.reference(case, made, SCALED_MM_HALVES)
    answer = identify([Seen(Probe(stage=FC1, case=case, inputs=made), rows)])
    assert answer.names == SPLITS
    assert answer.fixed["gemm.split_k"] == "halves"
    assert answer.fixed["gemm.accumulate"] == "fma"


@pytest.mark.parametrize("block", [0, 2])
def test_a_mistake_of_a_kernel_that_splits_is_named(block: int):
    """Of the first half and of the second one: the catalogue follows the recipe's halves."""

    def lost(call: Call) -> Tensor:
        a = call.inputs.a.clone()
        a[:, block * 128 : block * 128 + 128] = 0
        without = dataclasses.replace(call, inputs=dataclasses.replace(call.inputs, a=a))
        return in_halves(without)

    verdict = next(check(kernel_of("fc1", lost, SCALED_MM_HALVES), DENSE, "cpu"))
    assert verdict.failed
    assert "k_block_lost" in verdict.causes
    assert f"block {block} of k left out" in verdict.message.lower()
