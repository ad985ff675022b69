"""vLLM's Triton kernels that move rows: ep_scatter, and ep_gather with the top-k sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, Fate, Produced, demand_near, demand_rows
from moe_parity.kernels.registry import register
from moe_parity.kernels.vendors.deepgemm.api import rows_of
from moe_parity.kernels.vendors.signatures import Wanted
from moe_parity.kernels.vendors.vllm import package
from moe_parity.kernels.vendors.vllm.files import ALIGNMENT, GATHER, functions, needs, used
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.language import Case, Hazard, InputDtype
from moe_parity.references.stages import PERMUTE
from moe_parity.references.stages.align import RoutedRows
from moe_parity.references.stages.routing import Placement, place

_PLACED = (
    "recv_x", "recv_x_scale", "recv_topk", "num_recv_tokens_per_expert", "expert_map",
    "expert_start_loc", "output_tensor", "output_tensor_scale", "m_indices", "output_index",
)  # fmt: skip
_SCATTER = Wanted(GATHER, "ep_scatter", _PLACED, ("align_m",))
_PSUM_SCATTER = Wanted(GATHER, "ep_scatter", _PLACED, ("align_m", "use_psum_layout"))
_GATHER = Wanted(
    GATHER, "ep_gather",
    ("input_tensor", "recv_topk_ids", "recv_topk_weight", "input_index", "expert_map",
     "output_tensor"),
)  # fmt: skip


def _supports_scatter(case: Case, device: str) -> str | None:
    if case.scale.is_packed or case.h % BLOCK:
        return "rows of whole groups of 128 with fp32 scales."
    if case.has_odd_ids:
        return "vLLM's ids are those of experts."
    if case.hazard is Hazard.TRANSPOSED:
        return "the kernel is handed the stride of columns and never uses it."
    return None if case.m else "an empty grid, which CUDA refuses."


def _scatter(call: Call, *, psum: bool) -> Callable[[], Produced]:
    inputs: RoutedRows = call.inputs
    for name in ("codes", "scales", "ids"):
        # The launcher hands stride(1) over, and the kernel does not look at it.
        demand_rows(getattr(inputs, name), f"vLLM's ep_scatter reads {name} by row: it")
        # token_id * stride, both int32
        demand_near(getattr(inputs, name), f"vLLM's ep_scatter counts in 32 bits in {name}: it")
    device, width = inputs.codes.device, inputs.codes.shape[1]
    local = inputs.expert
    placed = place(local, inputs.experts, ALIGNMENT)
    counts = placed.counts
    groups = width // BLOCK
    codes = call.new("codes", (rows_of(placed), width), (width, 1), torch.uint8)
    scales = call.new("scales", (rows_of(placed), groups), (groups, 1), torch.float32)
    index = call.new("index", (local.numel(), 1), (1, 1), torch.int32)
    if psum:
        layout = call.new("layout", (inputs.experts, 1), (1, 1), torch.int32).view(-1)
    else:
        layout = torch.full((rows_of(placed),), -1, dtype=torch.int32, device=device)
    options = {"use_psum_layout": True} if psum else {}
    functions(GATHER, "ep_scatter").ep_scatter(
        inputs.codes.view(torch.float8_e4m3fn), inputs.scales, inputs.ids, counts,
        inputs.expert_map, torch.empty_like(placed.starts), codes.view(torch.float8_e4m3fn),
        scales, layout, index.view(inputs.ids.shape), align_m=ALIGNMENT, **options,
    )  # fmt: skip

    def looked_at() -> Produced:
        return _scattered(inputs, placed, codes, scales, index, layout, psum=psum)

    return looked_at


def _scattered(
    inputs: RoutedRows,
    placed: Placement,
    codes: Tensor,
    scales: Tensor,
    index: Tensor,
    layout: Tensor,
    *,
    psum: bool,
) -> Produced:
    """Return the rows where the kernel says they are, with the fates of its buffers."""
    local, device = inputs.expert, codes.device
    live = local >= 0
    at = torch.where(live, index.view(-1).long(), 0)
    fates = torch.full((rows_of(placed),), Fate.UNTOUCHED, dtype=torch.int8, device=device)
    fates[placed.slot[live]] = Fate.LIVE
    if psum:
        found = layout - placed.starts
    else:
        found = torch.bincount(layout[layout >= 0], minlength=inputs.experts)
    # A row outside its expert's range would be read as another's: make it show.
    owner = torch.bucketize(at, placed.starts.long(), right=True) - 1
    lost = live & (at >= placed.ends.long()[owner])
    rows = torch.where((live & ~lost)[:, None], codes[at], torch.zeros_like(codes[at]))
    return Produced(
        outputs={
            "codes": rows,
            "scales": torch.where(live[:, None], scales[at], torch.zeros_like(scales[at])),
            "counts": found.int(),
        },
        fates={
            "codes": fates, "scales": fates,
            "index": torch.where(live, int(Fate.LIVE), int(Fate.UNTOUCHED)).to(torch.int8),
        }
        | ({"layout": torch.full((inputs.experts,), Fate.LIVE, dtype=torch.int8)} if psum else {}),
    )  # fmt: skip


def _experts_too(case: Case) -> int:
    """Count the programs of the tokens, and small ones of the experts, whose rows are padded."""
    return PERMUTE.cost(case) + case.local_experts // 4


def _register_scatter(name: str, *, psum: bool) -> None:
    wanted = _PSUM_SCATTER if psum else _SCATTER

    @register(
        name, stage="permute", recipes="no_rounding", supports=_supports_scatter,
        unavailable=needs(wanted), files=used(wanted), triton=True,
        versions=package.versions, cost=_experts_too,
        note=f"vLLM ep_scatter, {'prefix sums' if psum else 'm_indices'}.",
    )  # fmt: skip
    def scatter(call: Call) -> Callable[[], Produced]:
        return _scatter(call, psum=psum)


_register_scatter("vllm_ep_scatter", psum=False)
_register_scatter("vllm_ep_scatter_psum", psum=True)


def _supports_gather(case: Case, device: str) -> str | None:
    if case.has_odd_ids:
        return "vLLM's ids are those of experts."
    if case.dtype is not InputDtype.BF16:
        return "the adapter has BF16 rows, and the kernel the same type on both sides."
    if package.divides() and case.h % 1024 and case.h & (case.h - 1):
        return f"0.26.0 does not compile for H = {case.h}: its block is no power of two."
    return None if case.m else "an empty grid, which CUDA refuses."


def _programs(case: Case) -> int:
    """Count tokens times the largest power of two that divides the width, up to 1024 columns."""
    return case.m * -(-case.h // min(case.h & -case.h, 1024)) * max(case.k // 4, 1)


@register(
    "vllm_ep_gather",
    stage="combine",
    recipes="vllm_deepgemm",
    supports=_supports_gather,
    unavailable=needs(_GATHER),
    files=used(_GATHER),
    triton=True,
    versions=package.versions,
    cost=_programs,
)
def vllm_ep_gather(call: Call) -> Tensor:
    """Call vLLM's ep_gather: the top-k sum of rows in an expert-sorted buffer."""
    inputs = call.inputs
    for name in ("ids", "weights"):
        demand_rows(getattr(inputs, name), f"vLLM's ep_gather reads {name} by row: it")
    tokens, k, width = inputs.rows.shape
    turned = torch.arange(tokens * k, device=inputs.rows.device).flip(0)
    buffer = inputs.rows.reshape(tokens * k, width)[turned]
    out = call.new("out")
    functions(GATHER, "ep_gather").ep_gather(
        buffer, inputs.ids, inputs.weights, turned.int().view(tokens, k), inputs.expert_map, out
    )
    return out
