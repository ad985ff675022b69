"""Our grouped GEMMs as the harness sees them."""

from __future__ import annotations

from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.ours.stages import ours
from moe_parity.references.language import Case
from moe_parity.references.stages import FC1, FC2
from moe_parity.references.stages.gemm.stage import Fc1, Fc2


def _gemm(call: Call, block: int) -> Tensor:
    from moe_parity.kernels.ours import steps

    inputs, out = call.inputs, call.new("rows")
    # The alignment demands it, and is not what is judged here: codes and scales come as they are.
    ids = inputs.ids.contiguous()
    aligned = steps.align(ids, inputs.first, inputs.w.shape[0], block)
    return steps.grouped_gemm(
        inputs.a, inputs.a_scale, inputs.w, inputs.w_scale, aligned, inputs.expert.numel(),
        inputs.top_k, inputs.bias, out,
    )  # fmt: skip


def _register_gemm(stage: Fc1 | Fc2, path: str, blocks: tuple[int, ...]) -> None:
    """Register the GEMM of a path, which takes the first of the blocks that its tiles can have."""
    note = f"Our grouped GEMM of the {path} path, blocks of {blocks[0]} tokens."
    configs = {f"block{block}": block for block in blocks}

    def supports(case: Case, device: str) -> str | None:
        k = stage.extent(case)[1]
        return f"K = {k} must be a multiple of 128." if k % 128 else None

    @ours(f"ours_{stage.name}_{path}", stage, supports=supports, note=note, configs=configs)
    def gemm(call: Call) -> Tensor:
        return _gemm(call, call.config or blocks[0])


for _stage in (FC1, FC2):
    _register_gemm(_stage, "decode", (16, 32))
    _register_gemm(_stage, "large", (64, 128))
