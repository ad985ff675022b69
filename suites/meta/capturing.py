"""A layer's inputs by the names of a captured file."""

from __future__ import annotations

from torch import Tensor

from moe_parity.references.language import Case
from moe_parity.references.stages import LAYER

CASE = Case(m=12, e=8, k=2, h=256, i=256)


def tensors_of(case: Case) -> dict[str, Tensor]:
    """Return the inputs of a layer by the names of a file."""
    inputs = LAYER.inputs(case)
    held = {**vars(inputs.batch), **vars(inputs.experts)}
    return {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}


TENSORS = tensors_of(CASE)
