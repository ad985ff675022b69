"""Inputs as they come: scales of every exponent, their layouts, gaps, and pointers of any start."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from moe_parity.harness.cases.grid import param, params
from moe_parity.harness.checks.expect import Recorder, expect
from moe_parity.harness.checks.flow import check
from moe_parity.kernels import Call, Kernel, find
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout, bits_of
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Check, Contract, Hazard, Values, parse_id
from moe_parity.references.language.stage import tensors_of
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import FC1, PERMUTE, STAGES
from moe_parity.references.stages.gemm.decisions import Accumulate, GemmRecipe, ScaleOrder
from moe_parity.references.stages.gemm.reference import grouped_plain
from moe_parity.references.stages.gemm.scales import coded
from moe_parity.references.stages.routing import local_expert
from moe_parity.suites import by_definition as exact
from moe_parity.suites.planted import CASES, kernel_of, red, right

UE8M0, SCALES = ScaleFormat.UE8M0, Values.SCALES
TMA, COLUMN = ScaleLayout.TMA, ScaleLayout.COLUMN
GEMM = Case(m=14, e=3, k=2, h=256, i=256)
EXTREME = dataclasses.replace(GEMM, values=SCALES)
ROWS = Case(m=14, e=4, k=2, h=384, values=SCALES)

# --- kernels ------------------------------------------------------------------------------------

FEW: dict[str, list[Case]] = {
    "weight_quant": [Case(i=150, h=200)],
    "act_quant": [Case(m=5, h=256)],
    "align": [Case(m=9, e=4, k=2, ep_rank=1, ep_size=2)],
    "permute": [dataclasses.replace(ROWS, ep_rank=1, ep_size=2)],
    "swiglu": [Case(m=8, e=2)],
    "swiglu_quant": [Case(m=8, e=2)],
    "combine": [Case(m=5, e=4, k=2, h=256, ep_rank=1, ep_size=2)],
    "quant_gemm": [Case(m=5, h=256)],
}


def cases(stage: str) -> Iterator[Case]:
    """Yield the new words, each once."""
    if stage in ("fc1", "fc2"):
        yield dataclasses.replace(EXTREME, scale=UE8M0, layout=TMA)
        yield dataclasses.replace(EXTREME, hazard=Hazard.GAPS)
    for case, hazard in itertools.product(FEW.get(stage, ()), (Hazard.GAPS, Hazard.OFFSET2)):
        yield dataclasses.replace(case, hazard=hazard)
    if stage == "permute":
        yield from (dataclasses.replace(ROWS, layout=layout) for layout in (COLUMN, TMA))
    if stage == "layer":
        yield Case(m=2, e=4, k=2, h=256, scale=UE8M0, values=SCALES)
        yield Case(m=2, e=4, k=2, h=256, hazard=Hazard.GAPS)


def moved() -> Iterator[ParameterSet]:
    """Yield one GEMM of each project: another alignment of a pointer is compiled anew."""
    case = dataclasses.replace(EXTREME, layout=COLUMN, hazard=Hazard.OFFSET4)
    yield from (param(find(name), case) for name in ("ours_fc2_decode", "vllm_fused_moe_fc2"))


EVERY = [p for name, stage in STAGES.items() for p in params(stage, cases(name))] + [*moved()]


@pytest.mark.parametrize(("kernel", "case"), EVERY)
def test_inputs_as_they_come(
    kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder
):
    """Their bits alone."""
    bits = dataclasses.replace(kernel, contract=Contract(checks=frozenset({Check.EXACT})))
    expect(bits, case, parity_device, parity_recorder)


# --- the inputs ---------------------------------------------------------------------------------


def test_every_exponent_that_a_scale_may_have_is_read():
    """All bytes but 255, which is NaN, of either operand; of fp32 subnormals of many sizes too."""
    case = dataclasses.replace(EXTREME, m=520, h=512, scale=UE8M0)
    made = FC1.inputs(case)
    known = made.a_scale[~torch.isnan(made.a_scale)]
    assert set((bits_of(known) >> 23).tolist()) == set(range(255))
    assert bool(torch.isin(bits_of(known) & 0x007FFFFF, torch.tensor([0, 0x00400000])).all())
    weights = coded(0, "w", 8, 600, 4, power_of_two=True, nan=False, device="cpu")
    assert set((bits_of(weights).flatten() >> 23).tolist()) == set(range(255))
    later = coded(0, "w", 100, 9, 4, power_of_two=True, nan=False, device="cpu")
    assert torch.equal(later, weights[92:101])
    wide = FC1.inputs(dataclasses.replace(case, scale=ScaleFormat.FP32)).a_scale
    small = wide[(wide.abs() < 2.0**-126) & (wide != 0)]
    assert len(set(small.tolist())) > 8
    assert float(small.min()) == 2.0**-149
    zeros = wide[wide == 0]
    assert set(torch.signbit(zeros).tolist()) == {False, True}
    assert float(wide[~torch.isnan(wide)].max()) == torch.finfo(torch.float32).max


@pytest.mark.parametrize("scale", [ScaleFormat.FP32, UE8M0])
def test_no_two_neighbouring_scales_are_alike(scale: ScaleFormat):
    """Of a row in blocks, and of a transposed place, but where a value of its own stands."""
    made = FC1.inputs(dataclasses.replace(EXTREME, m=64, h=1024, scale=scale)).a_scale
    assert float((made[:, 1:] == made[:, :-1]).float().mean()) < 0.01
    assert float((made[1:] == made[:-1]).float().mean()) < 0.01
    square = made[:8, :8]
    other = ~torch.eye(8, dtype=torch.bool)
    assert float((square == square.t())[other].float().mean()) < 0.05


def test_products_of_scales_overflow_underflow_and_meet_zeros():
    """So that outputs are NaN, infinite, zero and finite, and depend on the order of a product."""
    case = dataclasses.replace(EXTREME, m=64)
    made = FC1.inputs(case)
    rows = {o: reference_of(made, GemmRecipe(scale_order=o)) for o in ScaleOrder}
    one = rows[ScaleOrder.PRODUCT_FIRST]
    for seen in (torch.isnan(one), torch.isinf(one), one == 0, one.abs() < 2.0**-126):
        assert int(seen.sum()) > 50
    assert int((torch.isfinite(one) & (one != 0)).sum()) > one.numel() // 3
    for a, b in itertools.combinations(rows.values(), 2):
        assert int((torch.isnan(a) != torch.isnan(b)).sum()) > 50


def reference_of(made: Any, recipe: GemmRecipe) -> Tensor:
    source = made.source
    return grouped_plain(
        made.a[source], made.a_scale[source], made.w, made.w_scale, made.expert, recipe
    )


def test_scales_that_nobody_reads_hold_nan():
    """Those of rows and of experts without a pair of this rank."""
    made = FC1.inputs(dataclasses.replace(EXTREME, m=40, e=6, ep_rank=1, ep_size=2, k=1))
    unread = made.expert < 0
    assert 0 < int(unread.sum()) < 40
    assert bool(torch.isnan(made.a_scale[unread]).all())
    few = FC1.inputs(dataclasses.replace(EXTREME, m=1, e=6))
    unhit = [e for e in range(6) if e not in few.expert.tolist()]
    assert bool(torch.isnan(few.w_scale[unhit]).all())


def test_padding_holds_nan_and_the_largest_number():
    """Of 13 rows three are padding, which is another one in every second column."""
    scales = PERMUTE.inputs(dataclasses.replace(ROWS, m=13, layout=TMA)).scales
    assert scales.stride() == (1, 16)
    pads = scales.as_strided((16, 3), (1, 16))[13:]
    assert bool(torch.isnan(pads[:, 0::2]).all())
    assert bool((pads[:, 1] == torch.finfo(torch.float32).max).all())
    for layout in (COLUMN, TMA):
        made = FC1.inputs(dataclasses.replace(GEMM, layout=layout))
        assert made.w_scale.transpose(1, 2).is_contiguous()
        assert made.a_scale.stride() == (1, 14 if layout is COLUMN else 16)


WHOLE = {**CASES, "align": dataclasses.replace(CASES["align"], e=6, ep_size=2)}


@pytest.mark.parametrize("stage", STAGES)
def test_what_surrounds_an_input_changes_no_value_of_it(stage: str):
    """Every tensor, starts where it should, with gaps where it has rows, and with poison before."""
    plain = tensors_of(STAGES[stage].inputs(WHOLE[stage]))
    for hazard in (Hazard.GAPS, *(h for h in Hazard if h.offset)):
        found = tensors_of(STAGES[stage].inputs(dataclasses.replace(WHOLE[stage], hazard=hazard)))
        for one, other in zip(found, plain, strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))
            if hazard.offset:
                size = one.element_size()
                assert one.data_ptr() % 64 == max(hazard.offset, size)
                assert one.stride() == other.stride()
                held = torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage())
                before = one.storage_offset() * size
                assert before > 0
                assert bool((held[:before] == 0x7F).all())
                assert bool((held[-64:] == 0x7F).all())
            elif one.dim() > 1:
                assert one.stride(-1) == 1
                assert one.stride(-2) > one.shape[-1]


def test_gaps_follow_the_columns_of_a_layout():
    """A pitch of whole 16 bytes where TMA wants one; the values are those of the layout alone."""
    case = dataclasses.replace(EXTREME, layout=TMA, m=16)
    alone, gaps = FC1.inputs(case), FC1.inputs(dataclasses.replace(case, hazard=Hazard.GAPS))
    assert gaps.a_scale.stride() == (1, 24)
    assert torch.equal(bits_of(gaps.a_scale), bits_of(alone.a_scale))
    assert gaps.w_scale.stride(1) == 1


@pytest.mark.parametrize("stage", ["fc1", "fc2", "permute"])
def test_rows_alone_keep_the_layout(stage: str):
    """A kernel may go by the case's word."""
    case = dataclasses.replace(WHOLE[stage], layout=TMA, m=13)
    (part,) = STAGES[stage].subsets(case, STAGES[stage].inputs(case))
    scales = part.inputs.scales if stage == "permute" else part.inputs.a_scale
    assert scales.stride() == TMA.strides(*scales.shape)


@pytest.mark.parametrize("word", ["scales", "gaps", "offset2", "offset4", "offset8", "offset16"])
def test_a_new_word_stands_in_an_id(word: str):
    name, case = parse_id(f"it-ue8m0-tma-{word}-m3-h256", 5)
    assert case.id == f"ue8m0-tma-{word}-m3-h256"
    assert word in (case.values, case.hazard)
    assert name == "it"


def test_a_layout_may_be_refused_where_it_is_an_input():
    """By a GEMM and a permutation; what a quantizer shall write is declined by `supports`."""

    def refuses(call: Call) -> None:
        raise ParityError("row-major scales only.")

    for stage in ("fc1", "fc2", "permute"):
        case = dataclasses.replace(WHOLE[stage], layout=TMA)
        (verdict,) = check(kernel_of(stage, refuses), case, "cpu")
        assert (verdict.verdict, verdict.reason) == ("skip", "refused: row-major scales only.")
        assert red(kernel_of(stage, refuses), WHOLE[stage])
    assert red(kernel_of("act_quant", refuses), dataclasses.replace(CASES["act_quant"], layout=TMA))


# --- the reference ------------------------------------------------------------------------------


def rounded(x: Fraction, bits: int = 24, least: int = -149) -> float:
    """Round to nearest even as a format of 8 exponent bits does, past its end to infinity."""
    found = exact.nearest(x, bits, least)
    if abs(found) >= Fraction(2) ** 128:
        return math.copysign(math.inf, found)
    return float(found) if found else math.copysign(0.0, x)


def fma(x: float, y: float, z: float) -> float:
    """Return x * y + z, rounded once; what is not finite, and a zero's sign, is as in float64."""
    plain = x * y + z
    if not all(map(math.isfinite, (x, y, z))):
        return plain
    total = Fraction(x) * Fraction(y) + Fraction(z)
    return rounded(total) if total else plain


def times(x: float, y: float) -> float:
    product = x * y  # of two fp32 numbers, exact in float64, or not finite
    return rounded(Fraction(product)) if math.isfinite(product) and product else product


def by_definition(made: Any, pair: int, column: int, recipe: GemmRecipe) -> float:
    """Return one accumulator, step by step in exact fractions."""
    row, expert = int(made.source[pair]), int(made.expert[pair])
    a, w = made.a[row].tolist(), made.w[expert, column].tolist()
    acc = 0.0
    for block in range(len(a) // 128):
        cut = slice(128 * block, 128 * block + 128)
        p = float(exact.dot(a[cut], w[cut], Fraction(0), "wgmma_fp8"))
        s_a = float(made.a_scale[row, block])
        s_b = float(made.w_scale[expert, column // 128, block])
        left, right = p, times(s_a, s_b)
        if recipe.scale_order is ScaleOrder.A_THEN_B:
            left, right = times(p, s_a), s_b
        elif recipe.scale_order is ScaleOrder.B_THEN_A:
            left, right = times(p, s_b), s_a
        if recipe.accumulate is Accumulate.FMA:
            acc = fma(left, right, acc)
        else:
            acc = fma(1.0, times(left, right), acc)
    return acc


@pytest.mark.parametrize("scale", [ScaleFormat.FP32, UE8M0])
def test_the_reference_is_exact_on_every_scale(scale: ScaleFormat):
    """Subnormals, overflow, zeros times infinity: fractions and one rule of rounding agree."""
    made = FC1.inputs(dataclasses.replace(EXTREME, m=32, i=128, scale=scale))
    for order, step in itertools.product(ScaleOrder, Accumulate):
        recipe = GemmRecipe(scale_order=order, accumulate=step)
        got = reference_of(made, recipe)
        kinds = set()
        for pair, column in itertools.product((*range(8, 28, 2), 19, 27), (3, 200)):
            want = torch.tensor(by_definition(made, pair, column, recipe))
            found = got[pair, column]
            place = f"pair {pair}, column {column}, {recipe}: {found} is not {want}"
            assert torch.equal(found.isnan(), want.isnan()), place
            assert bool(want.isnan()) or bits_of(found[None]) == bits_of(want[None]), place
            kinds.add((bool(want.isnan()), bool(want.isinf()), bool(want.abs() < 2.0**-126)))
        assert len(kinds) >= 3


# --- planted faults -----------------------------------------------------------------------------

Fault = Callable[[Any], dict[str, Tensor]]
"""Inputs -> the fields that a kernel takes for others."""


def flat(t: Tensor) -> Tensor:
    strides = [math.prod(t.shape[n + 1 :]) for n in range(t.dim())]
    return t.as_strided(t.shape, strides, t.storage_offset())


def from_storage(t: Tensor) -> Tensor:
    return t.as_strided(t.shape, t.stride(), 0)


def flushed(t: Tensor) -> Tensor:
    return torch.where(t.abs() < 2.0**-126, 0.0, t)


def transposed_if_square(inputs: Any) -> dict[str, Tensor]:
    square = inputs.w_scale.shape[1] == inputs.w_scale.shape[2]
    return {"w_scale": inputs.w_scale.transpose(1, 2)} if square else {}


def ids_as_if_contiguous(inputs: Any) -> dict[str, Tensor]:
    ids = flat(inputs.ids)
    experts = inputs.w.shape[0] if hasattr(inputs, "w") else inputs.experts
    return {"ids": ids, "expert": local_expert(ids, inputs.first, experts)}


PLANTED: list[tuple[str, dict[str, Any], str, Fault]] = [
    ("fc1", {"layout": COLUMN}, "scale_layout_ignored", lambda i: {"a_scale": flat(i.a_scale)}),
    ("fc2", {"layout": TMA}, "scale_layout_ignored", lambda i: {"a_scale": flat(i.a_scale)}),
    ("fc1", {"layout": TMA}, "scale_layout_ignored", lambda i: {"w_scale": flat(i.w_scale)}),
    ("fc1", {"layout": TMA}, "scale_padding_read",
     lambda i: {"a_scale": i.a_scale.as_strided(i.a_scale.shape, (1, i.a_scale.shape[0]))}),
    ("fc1", {"hazard": Hazard.OFFSET16}, "offset_ignored", lambda i: {"a": from_storage(i.a)}),
    ("fc2", {"hazard": Hazard.OFFSET2}, "offset_ignored",
     lambda i: {"w_scale": from_storage(i.w_scale)}),
    ("fc1", {"hazard": Hazard.GAPS}, "row_stride", lambda i: {"w": flat(i.w)}),
    ("fc1", {"values": SCALES}, "subnormal_scale_flushed",
     lambda i: {"a_scale": flushed(i.a_scale)}),
    ("fc2", {"values": SCALES, "scale": UE8M0}, "subnormal_scale_flushed",
     lambda i: {"w_scale": flushed(i.w_scale)}),
    ("fc1", {"values": SCALES, "scale": UE8M0}, "scale_exponent_clamped",
     lambda i: {"a_scale": i.a_scale.clamp(min=2.0**-126)}),
    ("fc2", {"values": SCALES, "scale": UE8M0}, "nan_scale_lost",
     lambda i: {"a_scale": i.a_scale.nan_to_num(nan=2.0**127)}),
    ("fc1", {"values": SCALES, "scale": UE8M0}, "transposed_scales", transposed_if_square),
    ("permute", {"layout": COLUMN}, "scale_layout_ignored", lambda i: {"scales": flat(i.scales)}),
    ("permute", {"values": SCALES}, "subnormal_scale_flushed",
     lambda i: {"scales": flushed(i.scales)}),
    ("permute", {"hazard": Hazard.OFFSET4}, "offset_ignored",
     lambda i: {"codes": from_storage(i.codes)}),
    ("combine", {"hazard": Hazard.GAPS}, "row_stride", lambda i: {"rows": flat(i.rows)}),
    ("combine", {"hazard": Hazard.GAPS}, "row_stride", lambda i: {"weights": flat(i.weights)}),
    ("combine", {"hazard": Hazard.GAPS}, "row_stride", ids_as_if_contiguous),
    ("align", {"hazard": Hazard.GAPS}, "row_stride", ids_as_if_contiguous),
    ("swiglu", {"hazard": Hazard.OFFSET8}, "offset_ignored",
     lambda i: {"rows": from_storage(i.rows)}),
    ("act_quant", {"hazard": Hazard.OFFSET2}, "offset_ignored", lambda i: {"x": from_storage(i.x)}),
]  # fmt: skip
SMALL = {
    "fc1": Case(m=13, e=3, k=2, h=256, i=128), "fc2": Case(m=7, e=3, k=2, h=256, i=256),
    "permute": Case(m=13, e=4, k=2, h=384), "combine": Case(m=6, e=4, k=4, h=256),
    "align": Case(m=9, e=4, k=2), "swiglu": Case(m=6, i=128), "act_quant": Case(m=6, h=256),
}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "words", "name", "fault"), PLANTED,
    ids=[f"{n}-{p[0]}-{p[2]}" for n, p in enumerate(PLANTED)],
)  # fmt: skip
def test_a_kernel_that_misreads_its_inputs_is_red_and_named(
    stage: str, words: dict[str, Any], name: str, fault: Fault
):
    case = dataclasses.replace(SMALL[stage], **words)

    def misreads(call: Call) -> dict[str, Tensor]:
        changed = dataclasses.replace(call.inputs, **fault(call.inputs))
        return right(dataclasses.replace(call, inputs=changed))

    kernel = kernel_of(stage, misreads, None if stage in ("align", "permute") else OURS)
    bits = dataclasses.replace(kernel, contract=Contract(checks=frozenset({Check.EXACT})))
    (verdict,) = check(bits, case, "cpu")
    assert verdict.failed
    assert name in verdict.causes, verdict.message
