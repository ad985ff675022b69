"""What a caller of ``run_moe`` may ask besides, on both paths, at a size beyond every tile.

On a GPU 600 experts and 1,600 pairs, more than the 512 of either that one program takes; on a CPU
what the virtual GPU does in a second.  Values are aimed: sums cancel, so that a rounding shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Routing, Values
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.references.stages.layer.operands import LayerInputs
from moe_parity.references.stages.layer.reference import layer
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import act_quant

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")

FEW = Case(m=3, e=4, k=2, h=256, i=256, values=Values.AIMED, routing=Routing.HOLES)
MANY = Case(m=200, e=600, k=8, h=1024, i=256, values=Values.AIMED, routing=Routing.HOLES)
Asked = tuple[LayerInputs, dict[str, Any]]
"""The layer whose reference is the answer, and what is passed besides."""


def gaps(tensor: Tensor, fill: float) -> Tensor:
    """Return the same values with eight columns of something else between rows."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + 8)
    wide = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def batch(made: LayerInputs, **changes: Any) -> LayerInputs:
    return dataclasses.replace(made, batch=dataclasses.replace(made.batch, **changes))


def asked(made: LayerInputs, **changes: Any) -> LayerInputs:
    return dataclasses.replace(made, asked=dataclasses.replace(made.asked, **changes))


def wide_ids(made: LayerInputs) -> Asked:
    """Ids past 32 bits are nobody's, not those of their lower half."""
    ids = made.batch.ids.long()
    return batch(made, ids=torch.where(ids < 0, 1 << 32, ids)), {}


def output_with_gaps(made: LayerInputs) -> Asked:
    return made, {"out": gaps(torch.zeros_like(made.batch.x), 3.0)}


def biases(made: LayerInputs) -> Asked:
    count, width, inner = made.experts.w13.shape[0], made.experts.w2.shape[1], made.experts.w13
    device = str(inner.device)
    experts = dataclasses.replace(
        made.experts,
        bias13=random_bits.normal(1, "bias13", count, inner.shape[1], device=device),
        bias2=random_bits.normal(1, "bias2", count, width, device=device),
    )
    return dataclasses.replace(made, experts=experts), {}


def quantized_with_gaps(made: LayerInputs) -> Asked:
    act = act_quant(made.batch.x, OURS.of("act_quant", QuantRecipe))
    scales = gaps(act.scales, float("nan"))
    return made, {"x": gaps(act.codes, 0x7F), "x_scale": scales}


def limits(made: LayerInputs) -> Asked:
    same = torch.full((made.experts.count,), 0.5, device=made.batch.x.device)
    return asked(made, limit=0.5), {"limit": same}


def fp16(made: LayerInputs) -> Asked:
    return asked(made, dtype=torch.float16), {"out_dtype": torch.float16}


def fp32(made: LayerInputs) -> Asked:
    return asked(made, dtype=torch.float32), {"out_dtype": torch.float32}


def alpha_beta(made: LayerInputs) -> Asked:
    how = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
    return asked(made, **how), how


def zero_weights(made: LayerInputs) -> Asked:
    """Half of the weights are zeros of either sign: their rows count, as NaN or as zeros."""
    weights = made.batch.weights.clone()
    weights[:, ::2] = 0.0
    weights[::2, ::2] = -0.0
    return batch(made, weights=weights), {}


def no_weights(made: LayerInputs) -> Asked:
    return batch(made, weights=None), {}


OPTIONS: dict[str, Callable[[LayerInputs], Asked]] = {
    change.__name__: change
    for change in (
        wide_ids, output_with_gaps, biases, quantized_with_gaps, limits, fp16, fp32, alpha_beta,
        zero_weights, no_weights,
    )
}  # fmt: skip
LARGE_ONLY = {"output_with_gaps", "biases", "quantized_with_gaps", "limits", "alpha_beta"}
"""What the dispatch table keeps from the decode path."""


@pytest.mark.parametrize("path", ["decode", "large"])
@pytest.mark.parametrize("option", OPTIONS)
def test_option(option: str, path: str, parity_device: str, parity_recorder: Recorder):
    """Every bit of the layer's output is that of the reference; what lies in gaps stays."""
    case = FEW if parity_device == "cpu" else MANY
    want, passed = OPTIONS[option](layer_inputs(case, parity_device, spoil=False))
    given, about = want.batch, {"kernel": f"run_moe_{path}", "stage": "layer"}
    x = passed.pop("x", given.x)

    def call() -> Tensor:
        out: Tensor = moe.run_moe(
            x, given.ids, given.weights, want.experts, path=path, power_of_two=False, **passed
        )
        return out

    if path == "decode" and option in LARGE_ONLY:
        with pytest.raises(ParityError, match="decode path"):
            call()
        return
    got, answer = comparable(call()), comparable(layer(want, OURS).out)
    wrong = int((got != answer).sum())
    out = passed.get("out")
    assert out is None or bool((out.as_strided((8,), (1,), out.shape[1]) == 3.0).all())
    claim(
        parity_recorder, f"option_{option}", f"{wrong} outputs differ." if wrong else "",
        compared=answer.numel(), differing=wrong, shape=case.id, device=parity_device, **about,
    )  # fmt: skip
