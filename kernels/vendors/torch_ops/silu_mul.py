"""torch's own ``silu(gate) * up``, BF16: two elementwise kernels of a GPU.

On a CPU torch's SiLU is vectorized with another exponential, whose bits nothing here states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.registry import register
from moe_parity.references.language import Case, Gate, Skip, Why
from moe_parity.references.recipes.pytorch import SILU_AND_MUL
from moe_parity.references.stages.swiglu.stage import GateUpRows


def unavailable() -> Skip | None:
    """Return None where there is an NVIDIA GPU, else why not."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return Skip(Why.NEEDS_GPU, "the recipe is that of torch's kernels for a CUDA GPU.")
    return None


def versions() -> dict[str, str]:
    """Return the version of torch."""
    return {"torch": str(torch.__version__)}


def silu_mul(rows: Tensor) -> Tensor:
    """Return bf16 [P, I] of bf16 rows [P, 2 * I], the gate first."""
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _supports(case: Case, device: str) -> str | None:
    if case.clamp is not None or case.gate is not Gate.SILU:
        return "torch's SiLU has no limit, no alpha and no beta."
    return None


@register(
    "torch_silu_mul", stage="swiglu", recipes=SILU_AND_MUL, supports=_supports,
    unavailable=unavailable, needs_gpu=True, versions=versions,
)  # fmt: skip
def torch_silu_mul(call: Call) -> Tensor:
    """torch.nn.functional.silu(gate) * up, two kernels."""
    inputs: GateUpRows = call.inputs
    return silu_mul(inputs.rows)
