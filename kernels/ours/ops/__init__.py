"""Every op of ours as a ``torch.library`` custom op, ``torch.ops.moe_parity``.

Importing this package registers them.  Each has a schema that says what it changes and a fake that
refuses what it refuses and gives its shapes, strides and types; FP8 crosses as uint8.  An op's
dispatch costs microseconds, so ``run_moe`` calls the plain functions underneath.
"""

from __future__ import annotations

from moe_parity.kernels.ours import linear
from moe_parity.kernels.ours.op_list import NAMESPACE, OPS, Op
from moe_parity.kernels.ours.ops import activations, gemms, layer, quantizers, routing

__all__ = [
    "NAMESPACE", "OPS", "Op", "activations", "gemms", "layer", "linear", "quantizers", "routing",
]  # fmt: skip
