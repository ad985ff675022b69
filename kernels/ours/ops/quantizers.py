"""The quantizers that return what they make; those that are given it are in ``quant``."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.kernels.ours import quant


@torch.library.custom_op("moe_parity::act_quant", mutates_args=())
def act_quant(x: Tensor, group: int, scale: str, layout: str) -> tuple[Tensor, Tensor]:
    """Quantize activations [M, K]: codes uint8 and scales.  See ``quant.act_quant``."""
    return quant.act_quant(x, group=group, scale=scale, layout=layout)


@torch.library.custom_op("moe_parity::weight_quant", mutates_args=())
def weight_quant(w: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K]: codes uint8 and fp32 scales.  See ``quant.weight_quant``."""
    return quant.weight_quant(w, power_of_two=power_of_two)


# The functions are made of outputs and of an op with a fake of its own, which refuses: on fake
# tensors they are the fake.


@act_quant.register_fake
def _(x: Tensor, group: int, scale: str, layout: str) -> tuple[Tensor, Tensor]:
    return quant.act_quant(x, group=group, scale=scale, layout=layout)


@weight_quant.register_fake
def _(w: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    return quant.weight_quant(w, power_of_two=power_of_two)
