"""The ops of ours by name, for the docs and the tests; ``moe_parity.kernels.ours.ops`` has them.

They are listed apart, since docs are also made where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMESPACE = "moe_parity"


@dataclass(frozen=True, kw_only=True)
class Op:
    """What the docs say of an op; a test holds it against the op's own schema."""

    name: str
    does: str
    changes: tuple[str, ...] = ()
    """The arguments that it writes."""


OPS = (
    Op(name="act_quant", does="codes and scales of activations, in any format and layout"),
    Op(
        name="act_quant_out",
        does="the same, into outputs of the caller",
        changes=("codes", "scales"),
    ),
    Op(name="weight_quant", does="codes and tile scales of a weight"),
    Op(
        name="weight_quant_out",
        does="the same, into outputs of the caller",
        changes=("codes", "scales"),
    ),
    Op(name="requantize_weight", does="codes and scales again, with powers of two as scales"),
    Op(name="align", does="pairs sorted into blocks of one expert each"),
    Op(name="grouped_gemm", does="each pair's row times its expert's weight"),
    Op(name="grouped_gemm_out", does="the same, into an output of the caller", changes=("out",)),
    Op(
        name="linear_out",
        does="a dense linear of quantized operands, into an output of the caller",
        changes=("out",),
    ),
    Op(name="swiglu", does="the gated activation, BF16"),
    Op(name="swiglu_quant", does="`act_quant` of `swiglu` in one launch, same bits"),
    Op(
        name="swiglu_quant_out",
        does="the same, into outputs of the caller",
        changes=("codes", "scales"),
    ),
    Op(name="combine", does="the top-k sum of a token's rows"),
    Op(name="combine_out", does="the same, into an output of the caller", changes=("out",)),
    Op(name="moe", does="the layer, `run_moe`"),
    Op(name="moe_out", does="the same, into an output of the caller", changes=("out",)),
)
"""Every op of the namespace; an op that is not here turns ``suites/test_ops.py`` red."""
