"""What ``run_moe`` refuses, each argument by its own sentence, before anything is launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch

from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.references.stages.layer.inputs import layer_inputs

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")

# No two sizes are the same, so that no check passes by taking one for another.
M, E, K, H, I = 5, 3, 2, 384, 128  # noqa: E741
BF16, FP32 = torch.bfloat16, torch.float32
Arguments = dict[str, Any]
Change = Callable[[Arguments], dict[str, Any]]


@lru_cache(maxsize=1)
def accepted() -> tuple[tuple[str, Any], ...]:
    made = layer_inputs(Case(m=M, e=E, k=K, h=H, i=I), spoil=False)
    batch = made.batch
    given = {"x": batch.x, "ids": batch.ids, "weights": batch.weights, "experts": made.experts}
    return tuple(given.items())


def arguments() -> Arguments:
    """Return a call that is accepted; nothing writes to its tensors."""
    return dict(accepted())


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with gaps between rows."""
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with columns that are contiguous instead of rows."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def quantized(**changes: Any) -> Change:
    """Make the call one of codes and scales, with one of them changed."""
    codes, scales = torch.zeros(M, H, dtype=torch.uint8), torch.ones(M, H // 128)
    return lambda a: {"x": codes, "x_scale": scales, **changes}


def experts(**changes: Callable[[Any], Any]) -> Change:
    """Change one tensor of the experts; what is absent is made from the experts."""

    def changed(a: Arguments) -> dict[str, Any]:
        old = a["experts"]
        made = {n: f(v if (v := getattr(old, n)) is not None else old) for n, f in changes.items()}
        return {"experts": dataclasses.replace(old, **made)}

    return changed


def biases(width: int) -> Callable[[Any], torch.Tensor]:
    return lambda old: torch.zeros(E, width)


def must_be(name: str, shape: list[int], dtype: str, got: str) -> str:
    return f"run_moe: {name} must be contiguous torch.{dtype} {shape}, got torch.{got}."


def elsewhere(name: str) -> str:
    return f"run_moe: {name} is on meta, the rest on cpu; use one device."


OUT = torch.empty(M, H, dtype=BF16)
REFUSED: dict[str, tuple[Change, str]] = {
    # x
    "x_vector": (lambda a: {"x": a["x"][0]}, "run_moe: x must be [M, H], got shape [384]."),
    "x_scalar": (lambda a: {"x": a["x"][0, 0]}, "run_moe: x must be [M, H], got shape []."),
    "x_batch": (lambda a: {"x": a["x"][None]}, "run_moe: x must be [M, H], got shape [1, 5, 384]."),
    "x_narrow": (
        lambda a: {"x": a["x"][:, :256]},
        "run_moe: x has H = 256, the experts 384.",
    ),
    "x_codes_alone": (
        lambda a: {"x": a["x"].byte()},
        "run_moe: x must be bfloat16, or uint8 codes with x_scale, got torch.uint8.",
    ),
    "x_device": (
        lambda a: {"x": a["x"].to("meta")},
        "run_moe: x is on meta, the experts on cpu; use one device.",
    ),
    # quantized x
    "quantized_bf16": (
        quantized(x=torch.zeros(M, H, dtype=BF16)),
        "run_moe: quantized x must be uint8 with x_scale float32 [5, 3], got torch.bfloat16 and "
        "[5, 3].",
    ),
    "x_scale_groups": (
        quantized(x_scale=torch.ones(M, 2)),
        "run_moe: quantized x must be uint8 with x_scale float32 [5, 3], got torch.uint8 and "
        "[5, 2].",
    ),
    "x_scale_rows": (
        quantized(x_scale=torch.ones(M + 1, 3)),
        "run_moe: quantized x must be uint8 with x_scale float32 [5, 3], got torch.uint8 and "
        "[6, 3].",
    ),
    "x_scale_dtype": (
        quantized(x_scale=torch.ones(M, 3, dtype=BF16)),
        "run_moe: quantized x needs contiguous rows and float32 scales, got strides (384, 1) and "
        "torch.bfloat16.",
    ),
    "codes_in_columns": (
        quantized(x=torch.zeros(H, M, dtype=torch.uint8).t()),
        "run_moe: quantized x needs contiguous rows and float32 scales, got strides (1, 5) and "
        "torch.float32.",
    ),
    "x_scale_device": (quantized(x_scale=torch.ones(M, 3, device="meta")), elsewhere("x_scale")),
    # ids
    "ids_vector": (
        lambda a: {"ids": a["ids"][:, 0]},
        "run_moe: ids must be int32 or int64 [5, k], got torch.int32 [5].",
    ),
    "ids_rows": (
        lambda a: {"ids": a["ids"][:4]},
        "run_moe: ids must be int32 or int64 [5, k], got torch.int32 [4, 2].",
    ),
    "ids_dtype": (
        lambda a: {"ids": a["ids"].short()},
        "run_moe: ids must be int32 or int64 [5, k], got torch.int16 [5, 2].",
    ),
    "ids_in_columns": (
        lambda a: {"ids": transposed(a["ids"])},
        must_be("ids", [5, 2], "int32", "int32 [5, 2] with strides (1, 5)"),
    ),
    "ids_device": (lambda a: {"ids": a["ids"].to("meta")}, elsewhere("ids")),
    # weights
    "weights_shape": (
        lambda a: {"weights": a["weights"][:, :1].contiguous()},
        must_be("weights", [5, 2], "float32", "float32 [5, 1] with strides (1, 1)"),
    ),
    "weights_vector": (
        lambda a: {"weights": a["weights"].flatten()},
        must_be("weights", [5, 2], "float32", "float32 [10] with strides (1,)"),
    ),
    "weights_dtype": (
        lambda a: {"weights": a["weights"].to(BF16)},
        must_be("weights", [5, 2], "float32", "bfloat16 [5, 2] with strides (2, 1)"),
    ),
    "weights_gaps": (
        lambda a: {"weights": strided(a["weights"])},
        must_be("weights", [5, 2], "float32", "float32 [5, 2] with strides (4, 1)"),
    ),
    "weights_device": (lambda a: {"weights": a["weights"].to("meta")}, elsewhere("weights")),
    # limit, clamp, alpha, beta
    "limit_zero": (lambda a: {"limit": 0}, "run_moe: limit must be positive, got 0."),
    "limit_negative": (lambda a: {"limit": -1.0}, "run_moe: limit must be positive, got -1.0."),
    "limit_nan": (
        lambda a: {"limit": float("nan")},
        "run_moe: limit must be positive, got nan.",
    ),
    "limit_word": (lambda a: {"limit": "7"}, "run_moe: limit must be a number, got '7'."),
    "limit_of_another": (
        lambda a: {"limit": torch.ones(E + 1)},
        must_be("limit", [3], "float32", "float32 [4] with strides (1,)"),
    ),
    "limit_of_none": (
        lambda a: {"limit": torch.tensor(7.0)},
        must_be("limit", [3], "float32", "float32 [] with strides ()"),
    ),
    "limit_dtype": (
        lambda a: {"limit": torch.ones(E, dtype=torch.float64)},
        must_be("limit", [3], "float32", "float64 [3] with strides (1,)"),
    ),
    "limit_gaps": (
        lambda a: {"limit": torch.ones(2 * E)[::2]},
        must_be("limit", [3], "float32", "float32 [3] with strides (2,)"),
    ),
    "limit_device": (lambda a: {"limit": torch.ones(E, device="meta")}, elsewhere("limit")),
    "clamp": (
        lambda a: {"clamp": "during", "limit": 1.0},
        "run_moe: clamp must be 'before' or 'after' SiLU, got 'during'.",
    ),
    "clamp_none": (
        lambda a: {"clamp": "none"},
        "run_moe: clamp must be 'before' or 'after' SiLU, got 'none'.",
    ),
    "alpha": (lambda a: {"alpha": "1"}, "run_moe: alpha must be a number, got '1'."),
    "beta": (lambda a: {"beta": None}, "run_moe: beta must be a number, got None."),
    # out
    "out_type": (
        lambda a: {"out_dtype": torch.float64},
        "run_moe: the output is bf16, fp16 or fp32, not torch.float64.",
    ),
    "out_rows": (
        lambda a: {"out": OUT[:4]},
        "run_moe: out must be torch.bfloat16 [5, 384] with contiguous rows, got torch.bfloat16 "
        "[4, 384] with strides (384, 1).",
    ),
    "out_other_type": (
        lambda a: {"out": OUT, "out_dtype": FP32},
        "run_moe: out must be torch.float32 [5, 384] with contiguous rows, got torch.bfloat16 "
        "[5, 384] with strides (384, 1).",
    ),
    "out_in_columns": (
        lambda a: {"out": transposed(OUT)},
        "run_moe: out must be torch.bfloat16 [5, 384] with contiguous rows, got torch.bfloat16 "
        "[5, 384] with strides (1, 5).",
    ),
    "out_one_row": (
        lambda a: {"out": OUT[:1].expand(M, H)},
        "run_moe: rows of out overlap, strides (0, 1); give each its own memory.",
    ),
    "out_rows_overlap": (
        lambda a: {"out": OUT.flatten().as_strided((M, H), (H - 1, 1))},
        "run_moe: rows of out overlap, strides (383, 1); give each its own memory.",
    ),
    "out_device": (lambda a: {"out": OUT.to("meta")}, elsewhere("out")),
    # experts
    "w13_matrix": (
        experts(w13=lambda w: w[0]),
        "experts: w13 must be [E, 2 I, H] and w2 [E, H, I], got [256, 384] and [3, 384, 128].",
    ),
    "w2_matrix": (
        experts(w2=lambda w: w[0]),
        "experts: w13 must be [E, 2 I, H] and w2 [E, H, I], got [3, 256, 384] and [384, 128].",
    ),
    "first": (
        lambda a: {"experts": dataclasses.replace(a["experts"], first=-1)},
        "experts: first must be a global expert id, got -1.",
    ),
    "hidden": (
        experts(w13=lambda w: w[..., :200]),
        "experts: H = 200 and 2 I = 256 must be multiples of 128 and 256 (the scale's block).",
    ),
    "width": (
        experts(w13=lambda w: w[:, :128]),
        "experts: H = 384 and 2 I = 128 must be multiples of 128 and 256 (the scale's block).",
    ),
    "width_odd": (
        experts(w13=lambda w: torch.cat([w, w[:, :1]], 1)),
        "experts: H = 384 and 2 I = 257 must be multiples of 128 and 256 (the scale's block).",
    ),
    "w13_dtype": (
        experts(w13=lambda w: w.view(torch.int8)),
        must_be("w13", [3, 256, 384], "uint8", "int8 [3, 256, 384] with strides (98304, 384, 1)"),
    ),
    "w13_gaps": (
        experts(w13=strided),
        must_be("w13", [3, 256, 384], "uint8", "uint8 [3, 256, 384] with strides (196608, 768, 1)"),
    ),
    "w13_scale_shape": (
        experts(w13_scale=lambda s: s.transpose(1, 2).contiguous()),
        must_be("w13_scale", [3, 2, 3], "float32", "float32 [3, 3, 2] with strides (6, 2, 1)"),
    ),
    "w13_scale_dtype": (
        experts(w13_scale=lambda s: s.double()),
        must_be("w13_scale", [3, 2, 3], "float32", "float64 [3, 2, 3] with strides (6, 3, 1)"),
    ),
    "w13_scale_in_columns": (
        experts(w13_scale=transposed),
        must_be("w13_scale", [3, 2, 3], "float32", "float32 [3, 2, 3] with strides (6, 1, 2)"),
    ),
    "w2_experts": (
        experts(w2=lambda w: w[:2]),
        must_be("w2", [3, 384, 128], "uint8", "uint8 [2, 384, 128] with strides (49152, 128, 1)"),
    ),
    "w2_transposed": (
        experts(w2=lambda w: w.transpose(1, 2).contiguous()),
        must_be("w2", [3, 384, 128], "uint8", "uint8 [3, 128, 384] with strides (49152, 384, 1)"),
    ),
    "w2_in_columns": (
        experts(w2=transposed),
        must_be("w2", [3, 384, 128], "uint8", "uint8 [3, 384, 128] with strides (49152, 1, 384)"),
    ),
    "w2_scale_shape": (
        experts(w2_scale=lambda s: s[:, :1]),
        must_be("w2_scale", [3, 3, 1], "float32", "float32 [3, 1, 1] with strides (3, 1, 1)"),
    ),
    "w2_scale_device": (experts(w2_scale=lambda s: s.to("meta")), elsewhere("w2_scale")),
    "bias13_width": (
        experts(bias13=biases(I)),
        must_be("bias13", [3, 256], "float32", "float32 [3, 128] with strides (128, 1)"),
    ),
    "bias13_dtype": (
        experts(bias13=lambda _: torch.zeros(E, 2 * I, dtype=BF16)),
        must_be("bias13", [3, 256], "float32", "bfloat16 [3, 256] with strides (256, 1)"),
    ),
    "bias2_width": (
        experts(bias2=biases(I)),
        must_be("bias2", [3, 384], "float32", "float32 [3, 128] with strides (128, 1)"),
    ),
    "bias2_gaps": (
        experts(bias2=lambda _: strided(torch.zeros(E, H))),
        must_be("bias2", [3, 384], "float32", "float32 [3, 384] with strides (768, 1)"),
    ),
}


@pytest.fixture
def launched(monkeypatch):
    """Replace the layer by one that runs nothing; return the calls that came through."""
    calls = []

    def fake(work):
        calls.append(work)
        empty = torch.empty(0)
        names = ("act_codes", "act_scales", "fc1", "mid_codes", "mid_scales", "fc2")
        return moe.Trace(**dict.fromkeys(names, empty), out=work.out)

    monkeypatch.setattr(moe, "_layer", fake)
    return calls


@pytest.mark.parametrize("name", REFUSED)
def test_one_wrong_argument_is_refused_by_its_sentence(name: str, launched):
    change, sentence = REFUSED[name]
    given = arguments()
    with pytest.raises(ParityError) as caught:
        moe.run_moe(**{**given, **change(given)})
    assert str(caught.value) == sentence
    assert not launched


def test_what_stands_next_to_a_refusal_is_accepted(launched):
    """The same arguments as they should be: wide ids, gaps in x and out, codes, none at all."""
    given = arguments()
    changes = [
        {},
        {"ids": given["ids"].long()},
        {"weights": None},
        {"x": strided(given["x"])},
        {"x": transposed(given["x"])},
        quantized()(given),
        quantized(x=strided(torch.zeros(M, H, dtype=torch.uint8)))(given),
        quantized(x_scale=transposed(torch.ones(M, 3)))(given),
        {"out": strided(OUT)},
        {"limit": torch.ones(E), "clamp": "after"},
        experts(bias13=biases(2 * I), bias2=biases(H))(given),
        {name: given[name][:0] for name in ("x", "ids", "weights")},
        {"x": given["x"][:1], "ids": given["ids"][:1], "weights": None, "out": OUT[:1]},
        {"x": given["x"][:1], "ids": given["ids"][:1], "weights": None, "out": OUT[0].expand(1, H)},
    ]
    for change in changes:
        moe.run_moe(**{**given, **change})
    assert len(launched) == len(changes)


def test_registration_refuses_what_a_call_refuses():
    """Shapes are looked at where weights are loaded, not at the first token."""
    given = arguments()
    assert moe.register_experts(given["experts"]) is given["experts"]
    for name in ("w13_matrix", "width", "w2_transposed", "bias2_width", "w2_scale_device"):
        change, sentence = REFUSED[name]
        with pytest.raises(ParityError) as caught:
            moe.register_experts(change(given)["experts"])
        assert str(caught.value) == sentence


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_registration_looks_at_every_code_and_scale(name: str):
    """A NaN code, and a scale that is none, in the last place that there is."""
    given = arguments()["experts"]
    codes, scales = (getattr(given, field).clone() for field in (name, f"{name}_scale"))
    codes[-1, -1, -1], scales[-1, -1, -1] = 0xFF, -0.5
    with pytest.raises(ParityError, match=rf"^{name}\[2, .*\] is the NaN 0xff\.$"):
        moe.register_experts(dataclasses.replace(given, **{name: codes}))
    with pytest.raises(ParityError, match=rf"^{name}_scale\[2, .*\] is -0\.5 \(0xbf000000\), "):
        moe.register_experts(dataclasses.replace(given, **{f"{name}_scale": scales}))


def test_scales_of_quantized_input_are_looked_at_on_demand(launched):
    given = arguments()
    scales = torch.ones(M, 3)
    scales[4, 2] = float("inf")
    call = {**given, **quantized(x_scale=scales)(given)}
    moe.run_moe(**call)
    with pytest.raises(ParityError, match=r"^x_scale\[4, 2\] is inf"):
        moe.run_moe(**call, validate=True)
    assert len(launched) == 1
