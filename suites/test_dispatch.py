"""Which path ``run_moe`` takes, tested through ``run_moe`` with fakes that see all arguments."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from pathlib import Path as FilePath
from types import SimpleNamespace

import pytest
import torch

from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Routing
from moe_parity.references.stages.layer.inputs import layer_inputs

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
dispatch = pytest.importorskip("moe_parity.kernels.ours.dispatch", reason="needs Triton")
scale_format = pytest.importorskip("moe_parity.kernels.ours.scale_format", reason="needs Triton")

CASE = Case(m=4, e=4, k=2, h=128, i=128)


def weights_of(experts, **changes):
    return dataclasses.replace(experts, **changes)


@pytest.fixture
def taken(monkeypatch):
    """Replace the layer by a fake; return the list of (path, work)."""
    calls = []

    def fake(work):
        calls.append((work.choice.path.value, work))
        empty = torch.empty(0)
        return moe.Trace(
            act_codes=empty, act_scales=empty, fc1=empty, mid_codes=empty, mid_scales=empty,
            fc2=empty, out=work.out,
        )  # fmt: skip

    monkeypatch.setattr(moe, "_layer", fake)
    return calls


def call(m: int = 4, **changes):
    """Run the layer on m tokens with one thing changed."""
    made = layer_inputs(dataclasses.replace(CASE, m=m))
    experts = weights_of(made.experts)
    if changes.pop("bias", False):
        experts = weights_of(made.experts, bias13=torch.zeros(4, 256))
    x = made.batch.x
    if changes.pop("quantized", False):
        x = torch.zeros(m, 128, dtype=torch.uint8)
        changes["x_scale"] = torch.ones(m, 1)
    if changes.pop("own_out", False):
        changes["out"] = torch.empty(m, 128, dtype=torch.bfloat16)
    moe.run_moe(x, made.batch.ids, made.batch.weights, experts, **changes)
    return x, made.batch, experts


CALLS = [
    ("decode", 0, {}, "every condition"),
    ("decode", 1, {}, "every condition"),
    ("decode", 31, {}, "every condition"),
    ("decode", 32, {}, "every condition"),
    ("large", 33, {}, "more than 32 tokens"),
    ("decode", 4, {"limit": 7.0}, "every condition"),
    ("decode", 4, {"limit": 7.0, "clamp": "after"}, "every condition"),
    ("large", 4, {"limit": torch.full((4,), 7.0)}, "the clamp is a tensor"),
    ("large", 4, {"alpha": 1.702, "beta": 1.0}, "alpha or beta"),
    ("large", 4, {"bias": True}, "the experts have a bias"),
    ("large", 4, {"own_out": True}, "the caller gives the output"),
    ("large", 4, {"quantized": True}, "already quantized"),
    ("large", 4, {"path": "large"}, "was asked for"),
    ("decode", 64, {"path": "decode"}, "was asked for"),
    ("decode", 4, {"out_dtype": torch.float32}, "every condition"),
]


@pytest.mark.parametrize(("path", "m", "changes", "reason"), CALLS, ids=lambda v: None if isinstance(v, dict) else str(v).replace(" ", "_"))  # fmt: skip  # noqa: E501
def test_conditions(path: str, m: int, changes: dict, reason: str, taken):
    """Each condition alone decides; the path sees what the caller gave, all of it."""
    x, batch, experts = call(m, **dict(changes))
    ((took, given),) = taken
    assert took == path
    assert reason in given.choice.reason
    assert given.x is x
    assert given.ids is batch.ids
    assert given.weights is batch.weights
    assert given.experts is experts
    powers = scale_format.default_format().is_power_of_two
    assert (given.power_of_two, given.mid_power_of_two) == (powers, powers)
    assert given.out.shape == x.shape
    assert given.out.dtype is changes.get("out_dtype", torch.bfloat16)
    how = given.how
    limit = changes.get("limit")
    assert how.clamp == ("none" if limit is None else changes.get("clamp", "before"))
    assert (how.limits is limit) if isinstance(limit, torch.Tensor) else how.limits is None
    assert how.limit == (limit if isinstance(limit, float) else 0.0)
    assert (how.alpha, how.beta) == (changes.get("alpha", 1.0), changes.get("beta", 0.0))
    assert (given.x_scale is not None) == ("quantized" in changes)


def test_every_condition_is_tested():
    reasons = {reason for _, _, _, reason in CALLS}
    for condition in dispatch.CONDITIONS:
        if condition.name != "dtype":  # refused, below
            assert any(reason in condition.otherwise for reason in reasons), condition.name


def test_opt_out_is_read_once(monkeypatch, taken):
    dispatch.opted_out.cache_clear()
    monkeypatch.setenv(dispatch.OPT_OUT, "0")
    call(4)
    monkeypatch.setenv(dispatch.OPT_OUT, "1")
    call(4)
    dispatch.opted_out.cache_clear()
    assert [path for path, _ in taken] == ["large", "large"]
    assert taken[0][1].choice.reason == "MOE_PARITY_DECODE=0 turns the decode path off."
    monkeypatch.setenv(dispatch.OPT_OUT, "yes")
    with pytest.raises(ParityError, match="MOE_PARITY_DECODE must be 0 or 1, got 'yes'"):
        call(4)
    dispatch.opted_out.cache_clear()


def test_the_reason_is_logged_once(caplog, taken):
    dispatch.log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="moe_parity"):
        call(4)
        call(4)
        call(33)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "run_moe takes the decode path: every condition of the decode path holds.",
        "run_moe takes the large path: more than 32 tokens.",
    ]
    assert len(taken) == 3


REFUSED = [
    ({"lora": object()}, "LoRA needs the BF16 activation"),
    ({"path": "decode", "alpha": 2.0}, "cannot be forced: alpha or beta"),
    ({"path": "decode", "beta": -1.0}, "cannot be forced: alpha or beta"),
    ({"path": "decode", "bias": True}, "cannot be forced: the experts have a bias"),
    ({"path": "decode", "own_out": True}, "cannot be forced: the caller gives the output"),
    ({"path": "decode", "quantized": True}, "cannot be forced: the input is already quantized"),
    ({"path": "decode", "limit": torch.ones(4)}, "cannot be forced: the clamp is a tensor"),
    ({"path": "fast"}, "run_moe: path must be one of 'decode', 'large', 'prefix_sum', got 'fast'"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_refusals(changes: dict, sentence: str, taken):
    with pytest.raises(ParityError, match=sentence):
        call(4, **dict(changes))
    assert not taken


def test_a_forced_path_is_taken_beside_the_opt_out(monkeypatch, taken):
    """The environment turns the choice off, not what a caller asks for."""
    dispatch.opted_out.cache_clear()
    monkeypatch.setenv(dispatch.OPT_OUT, "0")
    for path in (None, "decode", "large", dispatch.Path.DECODE):
        call(4, path=path)
    dispatch.opted_out.cache_clear()
    assert [path for path, _ in taken] == ["large", "decode", "large", "decode"]
    reasons = [work.choice.reason for _, work in taken]
    assert reasons[0] == "MOE_PARITY_DECODE=0 turns the decode path off."
    assert reasons[1:3] == ["the decode path was asked for.", "the large path was asked for."]


@pytest.mark.parametrize(
    "changes",
    [{"alpha": 2.0}, {"bias": True}, {"own_out": True}, {"quantized": True}, {"m": 33}],
    ids=lambda changes: next(iter(changes)),
)
def test_the_large_path_may_be_forced_whatever_is_asked(changes: dict, taken):
    """What keeps a call from the decode path keeps none from the other one."""
    call(**{"m": 4, "path": "large", **changes})
    ((path, work),) = taken
    assert (path, work.choice.reason) == ("large", "the large path was asked for.")


@pytest.mark.parametrize("which", ["bias13", "bias2"])
def test_one_bias_is_a_bias(which: str, taken):
    """Either alone keeps a call from the decode path."""
    made = layer_inputs(CASE)
    bias = torch.zeros(4, 256 if which == "bias13" else 128)
    experts = weights_of(made.experts, **{which: bias})
    moe.run_moe(made.batch.x, made.batch.ids, None, experts)
    assert taken[0][0] == "large"
    assert taken[0][1].choice.reason == "the experts have a bias."


def test_every_option_reaches_the_stages(monkeypatch):
    """``run_moe`` and ``run_stages`` take the same, and none is lost or swapped on the way."""
    names = list(inspect.signature(moe.run_moe).parameters)
    assert inspect.signature(moe.run_moe).parameters == inspect.signature(moe.run_stages).parameters
    options = {name: object() for name in names}
    seen = {}

    def run_stages(x, ids, weights, experts, **given):
        seen.update(x=x, ids=ids, weights=weights, experts=experts, **given)
        return SimpleNamespace(out="the output")

    monkeypatch.setattr(moe, "run_stages", run_stages)
    assert moe.run_moe(**options) == "the output"
    assert seen == options


@pytest.mark.parametrize(
    ("first", "second", "seen"),
    [
        (False, None, (False, False)), (True, None, (True, True)), (False, True, (False, True)),
        (True, False, (True, False)),
    ],
)  # fmt: skip
def test_the_second_format_is_the_first_unless_it_is_said(first, second, seen, taken):
    call(4, power_of_two=first, mid_power_of_two=second)
    ((_, work),) = taken
    assert (work.power_of_two, work.mid_power_of_two) == seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
def test_other_input_types_are_refused(dtype: torch.dtype, taken):
    made = layer_inputs(CASE)
    with pytest.raises(ParityError, match="x must be bfloat16, or uint8 codes with x_scale"):
        moe.run_moe(made.batch.x.to(dtype), made.batch.ids, None, weights_of(made.experts))
    assert not taken


def test_values_are_checked_at_registration_and_on_demand(taken):
    made = layer_inputs(CASE, spoil=False)
    good = weights_of(made.experts)
    assert moe.register_experts(good) is good
    bad = made.experts.w2_scale.clone()
    bad[1, 0, 0] = float("nan")
    broken = weights_of(made.experts, w2_scale=bad)
    with pytest.raises(ParityError, match=r"w2_scale\[1, 0, 0\] is nan"):
        moe.register_experts(broken)
    moe.run_moe(made.batch.x, made.batch.ids, None, broken)
    with pytest.raises(ParityError, match=r"w2_scale\[1, 0, 0\] is nan"):
        moe.run_moe(made.batch.x, made.batch.ids, None, broken, validate=True)
    with pytest.raises(ParityError, match="must be multiples of 128"):
        moe.register_experts(weights_of(made.experts, w13=torch.zeros(4, 200, 128).byte()))
    assert len(taken) == 1


def test_expert_parallelism_with_an_offset():
    """Foreign ids, -1 and ids past the end are dropped; experts not touched hold NaN throughout."""
    case = Case(
        m=6, e=16, k=4, h=128, i=128, ep_rank=2, ep_size=4, routing=Routing.HOLES
    )  # fmt: skip
    made = layer_inputs(case)
    out = moe.run_moe(made.batch.x, made.batch.ids, made.batch.weights, weights_of(made.experts))
    assert bool(torch.isfinite(out.float()).all())
    local = made.batch.ids.long() - made.experts.first
    none = ((local < 0) | (local >= 4)).all(1)
    assert bool((out[none].view(torch.int16) == 0).all())
    wide = moe.run_moe(made.batch.x, made.batch.ids.long(), made.batch.weights, weights_of(made.experts))  # fmt: skip  # noqa: E501
    assert torch.equal(out.view(torch.int16), wide.view(torch.int16))


def test_docs_table_is_generated():
    """docs/dispatch.md holds the tables that the code makes."""
    page = FilePath(__file__).resolve().parent.parent / "docs" / "dispatch.md"
    if not page.exists():
        pytest.skip("the docs are not installed with the package")
    assert dispatch.table() in page.read_text()
    assert dispatch.prefix_table() in page.read_text()
