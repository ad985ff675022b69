"""What the batched functions refuse, each argument by a sentence, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.references.stages.layer.inputs import layer_inputs

batched = pytest.importorskip("moe_parity.kernels.ours.batched", reason="needs Triton")
activation = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")


def counts_of(numbers: tuple[int, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def quantized(**changes: Any) -> Callable[[], Any]:
    rows, counts = torch.zeros((2, 3, 512), dtype=torch.bfloat16), counts_of((1, 2))
    given = {"rows": rows, "counts": counts, "how": activation.Activation(), **changes}
    return lambda: batched.batched_swiglu_quant(**given)


def multiplied(**changes: Any) -> Callable[[], Any]:
    given = {
        "a": torch.zeros(2, 3, 256).byte(), "a_scale": torch.ones(2, 3, 2),
        "w": torch.zeros(2, 130, 256).byte(), "w_scale": torch.ones(2, 2, 2),
        "counts": counts_of((1, 2)), **changes,
    }  # fmt: skip
    return lambda: batched.batched_gemm(**given)


def layer(**changes: Any) -> Callable[[], Any]:
    def call() -> Any:
        experts = layer_inputs(Case(m=8, e=3, k=2, h=256, i=128), spoil=False).experts
        x, counts = torch.zeros((3, 6, 256), dtype=torch.bfloat16), counts_of((6, 0, 4))
        return batched.run_batched(**{"x": x, "counts": counts, "experts": experts, **changes})

    return call


BF16 = torch.bfloat16
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "rows_matrix": (quantized(rows=torch.zeros(3, 512, dtype=BF16)), "contiguous [E, T, columns]"),
    "rows_dtype": (quantized(rows=torch.zeros(2, 3, 512)), "of torch.bfloat16, got torch.float32"),
    "rows_part": (quantized(rows=torch.zeros(2, 4, 512, dtype=BF16)[:, :3]), "(2048, 512, 1)"),
    "rows_odd": (
        quantized(rows=torch.zeros(2, 3, 511, dtype=BF16)),
        "[E, T, 2 I], got [2, 3, 511]",
    ),
    "ragged": (quantized(rows=torch.zeros(2, 3, 320, dtype=BF16)), "160 columns are no positive"),
    "no_columns": (quantized(rows=torch.zeros(2, 3, 0, dtype=BF16)), "0 columns are no positive"),
    "group": (quantized(group=32), "group must be 64 or 128, got 32."),
    "programs": (quantized(programs=0), "programs must be at least 1, got 0."),
    "scale": (quantized(scale="e8m0"), "batched_swiglu_quant: scale must be one of"),
    "layout": (quantized(layout="mn"), "batched_swiglu_quant: layout must be one of"),
    "counts_dtype": (quantized(counts=torch.zeros(2).long()), "counts must be torch.int32 [2]"),
    "counts_shape": (quantized(counts=torch.zeros(3).int()), "got torch.int32 [3]."),
    "counts_gaps": (quantized(counts=torch.zeros(4).int()[::2]), "counts must be contiguous"),
    "counts_device": (quantized(counts=torch.zeros(2, device="meta").int()), "counts is on meta"),
    "limits": (
        quantized(how=activation.Activation(clamp="before", limits=torch.ones(3))),
        "limits must be torch.float32 [2], got torch.float32 [3].",
    ),
    "codes": (
        quantized(codes=torch.zeros(2, 3, 128).byte()),
        "codes must be torch.uint8 [2, 3, 256]",
    ),
    "codes_gaps": (
        quantized(codes=torch.zeros(2, 3, 512).byte()[..., :256]),
        "codes must be conti",
    ),
    "scales": (quantized(scales=torch.ones(2, 3, 1)), "scales must be torch.float32 [2, 3, 2]"),
    "words": (
        quantized(scale="ue8m0packed", scales=torch.ones(2, 3, 2)),
        "scales must be torch.int32 [2, 3, 1]",
    ),
    "scales_overlap": (
        quantized(scales=torch.ones(2, 3, 1).expand(2, 3, 2)),
        "elements of scales overlap, strides (3, 1, 0)",
    ),
    "a_dtype": (multiplied(a=torch.zeros(2, 3, 256)), "of torch.uint8, got torch.float32"),
    "a_scale": (multiplied(a_scale=torch.ones(2, 3, 1)), "a_scale must be torch.float32 [2, 3, 2]"),
    "w_experts": (multiplied(w=torch.zeros(3, 130, 256).byte()), "w must be uint8 [2, N, 256]"),
    "w_k": (multiplied(w=torch.zeros(2, 130, 128).byte()), "w must be uint8 [2, N, 256]"),
    "w_rank": (multiplied(w=torch.zeros(130, 256).byte()), "w must be uint8 [2, N, 256]"),
    "w_dtype": (multiplied(w=torch.zeros(2, 130, 256)), "got torch.float32 [2, 130, 256]."),
    "w_columns": (multiplied(w=torch.zeros(2, 256, 130).byte().mT), "rows of w must be contiguous"),
    "w_device": (multiplied(w=torch.zeros(2, 130, 256, device="meta").byte()), "w is on meta"),
    "w_scale": (multiplied(w_scale=torch.ones(2, 1, 2)), "w_scale must be torch.float32 [2, 2, 2]"),
    "k": (
        multiplied(a=torch.zeros(2, 3, 192).byte(), w=torch.zeros(2, 130, 192).byte()),
        "K = 192 must be a positive multiple of 128.",
    ),
    "bias": (multiplied(bias=torch.zeros(2, 129)), "bias must be torch.float32 [2, 130]"),
    "out": (multiplied(out=torch.zeros(2, 3, 130)), "out must be torch.bfloat16 [2, 3, 130]"),
    "block": (multiplied(block=8), "a block has 16, 32, 64 or 128 rows, not 8."),
    "gemm_counts": (multiplied(counts=torch.zeros(2).long()), "counts must be torch.int32 [2]"),
    "x_codes_alone": (layer(x=torch.zeros(3, 6, 256).byte()), "or uint8 codes with x_scale"),
    "x_bf16_with_scales": (layer(x_scale=torch.ones(3, 6, 2)), "or uint8 codes with x_scale"),
    "x_experts": (layer(x=torch.zeros(2, 6, 256, dtype=BF16)), "[E, T, H] = [3, 6, 256] on cpu"),
    "x_device": (layer(x=torch.zeros(3, 6, 256, dtype=BF16, device="meta")), "on meta."),
    "clamp": (layer(clamp="between"), "clamp must be 'before' or 'after' SiLU, got 'between'."),
    "limit": (layer(limit=-1.0), "run_batched: limit must be positive, got -1.0."),
    "alpha": (layer(alpha="1"), "run_batched: alpha must be a number, got '1'."),
    "beta": (layer(beta=None), "run_batched: beta must be a number, got None."),
    "layer_limits": (layer(limit=torch.ones(2)), "limits must be torch.float32 [3]"),
    "layer_counts": (layer(counts=torch.zeros(2).int()), "run_batched: counts must be torch.int32"),
    "count_above": (
        layer(counts=counts_of((6, 7, 9)), validate=True),
        "counts[1] is 7, and an expert has room for 6 rows",
    ),
    "count_below": (layer(counts=counts_of((0, 0, -1)), validate=True), "counts[2] is -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_batched_input_is_one_sentence(name: str):
    call, sentence = REFUSED[name]
    with virtual_gpu.dry(), pytest.raises(ParityError) as caught:
        call()
    assert sentence in str(caught.value)
