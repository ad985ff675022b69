"""What a caller may ask besides: its own output, quantized input, biases, limits, alpha and beta.

Each against the reference of the whole layer, on values where sums cancel.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from moe_parity.harness.checks.compare import comparable
from moe_parity.kernels import find
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.language import Case, Gate, ScaleFormat, Values
from moe_parity.references.recipes.ours import OURS, OURS_AFTER
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.references.stages.layer.reference import layer
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import act_quant

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
scale_format = pytest.importorskip("moe_parity.kernels.ours.scale_format", reason="needs Triton")
activation = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")

CASE = Case(m=5, e=4, k=2, h=256, i=256, values=Values.AIMED)


FEW = dataclasses.replace(CASE, m=3, e=2, i=128)


@pytest.fixture
def made(parity_device: str):
    return layer_inputs(CASE, parity_device, spoil=False)


@pytest.fixture
def few(parity_device: str):
    return layer_inputs(FEW, parity_device, spoil=False)


def call(made, **options):
    batch = made.batch
    x = options.pop("x", batch.x)
    options.setdefault("power_of_two", False)
    return moe.run_moe(x, batch.ids, batch.weights, made.experts, **options)


def expected(made, recipe=OURS, **asked):
    question = dataclasses.replace(made.asked, **asked)
    return layer(dataclasses.replace(made, asked=question), recipe).out


def test_output_of_the_caller(made):
    """Written into the caller's rows, whatever lies between them stays."""
    wide = torch.full((5, 256 + 8), 3.0, dtype=torch.bfloat16, device=made.batch.x.device)
    out = wide[:, :256]
    assert call(made, out=out) is out
    assert torch.equal(comparable(out), comparable(expected(made)))
    assert bool((wide[:, 256:] == 3.0).all())


@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "ue8m0"])
def test_quantized_input(power_of_two: bool, made):
    """Codes and scales give the bits that the activations themselves give, in either layout."""
    scale = ScaleFormat.UE8M0 if power_of_two else ScaleFormat.FP32
    act = act_quant(made.batch.x, OURS.of("act_quant", QuantRecipe), scale=scale)
    want = comparable(expected(made, scale=scale, mid=scale))
    for scales in (act.scales, act.scales.t().contiguous().t()):
        got = call(made, x=act.codes, x_scale=scales, power_of_two=power_of_two)
        assert torch.equal(comparable(got), want)


def test_quantized_input_with_gaps(few):
    """Codes and scales are read by their strides; the gaps hold NaN."""
    act = act_quant(few.batch.x, OURS.of("act_quant", QuantRecipe))
    codes = torch.full((3, 300), 0x7F, dtype=torch.uint8, device=few.batch.x.device)
    scales = torch.full((3, 7), float("nan"), device=few.batch.x.device)
    codes[:, :256], scales[:, :2] = act.codes, act.scales
    got = call(few, x=codes[:, :256], x_scale=scales[:, :2])
    assert torch.equal(comparable(got), comparable(expected(few)))


@pytest.mark.parametrize(("name", "width"), [("bias13", 256), ("bias2", 256)])
def test_one_bias_alone(name: str, width: int, few):
    """Either bias makes the call one with a bias; the other GEMM has none."""
    device = str(few.batch.x.device)
    bias = random_bits.normal(1, name, 2, width, device=device)
    biased = dataclasses.replace(few, experts=dataclasses.replace(few.experts, **{name: bias}))
    got = comparable(call(biased))
    assert torch.equal(got, comparable(expected(biased)))
    assert not torch.equal(got, comparable(expected(few)))


def test_biases(made):
    """Added to the fp32 accumulators of both GEMMs; without them the bits are others."""
    device = str(made.batch.x.device)
    experts = dataclasses.replace(
        made.experts,
        bias13=random_bits.normal(1, "bias13", 4, 512, device=device),
        bias2=random_bits.normal(1, "bias2", 4, 256, device=device),
    )
    biased = dataclasses.replace(made, experts=experts)
    got = call(biased)
    assert torch.equal(comparable(got), comparable(expected(biased)))
    assert not torch.equal(comparable(got), comparable(call(made)))


def test_limits_of_the_experts(made):
    """A limit for each expert: equal ones are the scalar's, and each expert takes its own."""
    device = made.batch.x.device
    same = call(made, limit=torch.full((4,), 0.5, device=device))
    assert torch.equal(comparable(same), comparable(call(made, limit=0.5, path="large")))
    assert torch.equal(comparable(same), comparable(expected(made, limit=0.5)))
    limits = torch.tensor([0.25, 0.5, 1.0, 2.0], device=device)
    one = dataclasses.replace(made.batch, ids=torch.full_like(made.batch.ids, 2))
    alone = dataclasses.replace(made, batch=one)
    assert torch.equal(
        comparable(call(alone, limit=limits)), comparable(expected(alone, limit=1.0))
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(m=17, e=1, k=1, h=384, i=128),
        Case(m=1, e=5, k=1, h=1536, i=128, scale=ScaleFormat.UE8M0),
        Case(m=1, e=1, k=1, h=3584, i=128),
    ],
    ids=lambda case: case.id,
)
def test_hidden_sizes_that_are_no_power_of_two(case: Case, parity_device: str):
    """Three, 12 and 28 blocks; 1,536 and 3,584 are no multiple of the 1,024 columns of a sum."""
    made = layer_inputs(case, parity_device)
    want = comparable(expected(made))
    for path in ("decode", "large") if case.h < 1024 else ("large",):
        got = call(made, path=path, power_of_two=case.scale.is_power_of_two)
        assert torch.equal(comparable(got), want), path


@pytest.mark.parametrize(("alpha", "beta"), [(1.702, 1.0), (1.0, 0.5), (2.0, 0.0)])
def test_alpha_and_beta(alpha: float, beta: float, made):
    got = call(made, alpha=alpha, beta=beta, limit=1.0)
    assert torch.equal(
        comparable(got), comparable(expected(made, alpha=alpha, beta=beta, limit=1.0))
    )


@pytest.mark.parametrize(
    ("alpha", "beta", "limit"),
    [(0.5, 0.0, None), (1.0, -0.75, 1.0), (-1.0, 2.0, None)],
)
def test_alpha_below_one_and_beta_below_zero(alpha: float, beta: float, limit, few):
    got = comparable(call(few, alpha=alpha, beta=beta, limit=limit))
    assert torch.equal(got, comparable(expected(few, alpha=alpha, beta=beta, limit=limit)))
    assert not torch.equal(got, comparable(expected(few, limit=limit)))


@pytest.mark.parametrize("limit", [1, np.float32(1), np.int64(1)], ids=lambda v: type(v).__name__)  # fmt: skip  # noqa: E501
def test_any_number_is_a_limit(limit, few):
    """Integers and NumPy's numbers are the number that they are, on either path."""
    want = comparable(expected(few, limit=1.0))
    for path in ("decode", "large"):
        assert torch.equal(comparable(call(few, limit=limit, path=path)), want)
    assert not torch.equal(want, comparable(expected(few)))


@pytest.mark.parametrize("limit", [0.125, 1.0])
def test_a_limit_after_silu(limit: float, few):
    """It has no lower end: SiLU falls to -0.28, below a small limit's negative."""
    want = comparable(expected(few, OURS_AFTER, limit=limit))
    for path in ("decode", "large"):
        assert torch.equal(comparable(call(few, limit=limit, clamp="after", path=path)), want)
    assert not torch.equal(want, comparable(expected(few, limit=limit)))


def test_any_number_is_alpha_and_beta(few):
    want = comparable(expected(few, alpha=2.0, beta=-1.0))
    for kind in (int, np.float32):
        assert torch.equal(comparable(call(few, alpha=kind(2), beta=kind(-1))), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_output_types(dtype: torch.dtype, made):
    """The sum is rounded once, to the type that is asked for; wide ids are the same ids."""
    want = comparable(expected(made, dtype=dtype))
    assert torch.equal(comparable(call(made, out_dtype=dtype)), want)
    wide = dataclasses.replace(
        made, batch=dataclasses.replace(made.batch, ids=made.batch.ids.long())
    )
    assert torch.equal(comparable(call(wide, out_dtype=dtype)), want)


def test_what_is_left_out_has_a_default(few):
    """The global default for both quantizations, first expert 0: as if it were said."""
    batch, experts = few.batch, few.experts
    said = moe.run_stages(
        batch.x, batch.ids, batch.weights, experts, formats=scale_format.resolve()
    )
    plain = type(experts)(
        w13=experts.w13, w13_scale=experts.w13_scale, w2=experts.w2, w2_scale=experts.w2_scale
    )
    assert plain.first == 0
    left_out = moe.run_stages(batch.x, batch.ids, batch.weights, plain)
    for name, value in vars(said).items():
        assert torch.equal(comparable(value), comparable(vars(left_out)[name])), name


@pytest.mark.parametrize("path", ["decode", "large"])
def test_a_layer_that_we_do_not_take_is_declined_by_its_sentence(path: str):
    kernel = find(f"ours_{path}")
    assert kernel.declines(CASE, "cpu") is None
    for change in ({"h": 192}, {"i": 320}, {"h": 127}, {"i": 129}):
        case = dataclasses.replace(CASE, **change)
        ((name, width),) = change.items()
        words = f"layer has whole groups: {name.upper()} = {width} is not a multiple of 128."
        assert str(kernel.declines(case, "cpu")) == words
    shifted = kernel.declines(dataclasses.replace(CASE, gate=Gate.SWIGLUOAI), "cpu")
    expected = "alpha and beta take the large path." if path == "decode" else "None"
    assert str(shifted) == expected


@pytest.mark.parametrize("name", ["fc1_decode", "fc1_large", "fc2_decode", "fc2_large"])
def test_a_gemm_declines_a_ragged_k_by_its_sentence(name: str):
    kernel = find(f"ours_{name}")
    assert kernel.declines(CASE, "cpu") is None
    word = "h" if name.startswith("fc1") else "i"
    for k in (64, 129, 258):
        declined = kernel.declines(dataclasses.replace(CASE, **{word: k}), "cpu")
        assert str(declined) == f"K = {k} must be a multiple of 128."


def test_limits_of_experts_without_a_quantization(few):
    """A limit for each expert in SwiGLU alone: where all are one number, it is that number."""
    rows, ids = torch.randn(4, 512, device=few.batch.x.device).bfloat16(), few.batch.ids[:2, :2]
    limits = torch.full((few.experts.count,), 0.5, device=rows.device)
    one, each = (
        activation.swiglu(
            rows, ids, 0, few.experts.count, activation.Activation(clamp="before", **how)
        )
        for how in ({"limit": 0.5}, {"limits": limits})
    )
    assert torch.equal(comparable(one), comparable(each))
    free = activation.swiglu(rows, ids, 0, few.experts.count, activation.Activation())
    assert not torch.equal(comparable(one), comparable(free))
