"""Our layer as the harness sees it, once for each path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.ours.stages import SERVING, unavailable
from moe_parity.kernels.registry import register
from moe_parity.references.language import Case
from moe_parity.references.stages import LAYER
from moe_parity.references.stages.layer.operands import Trace


def _supports(case: Case, path: str) -> str | None:
    if path == "decode" and case.gate.alpha_beta != (1.0, 0.0):
        return "alpha and beta take the large path."
    return None


def run_path(
    call: Call,
    path: str | None,
    clamp: str = "before",
    down: str = "route_major",
    in_order: Callable[[Any], Trace] | None = None,
) -> dict[str, Tensor]:
    """Run a path, None for the one that is chosen; return every stage, put ``in_order``."""
    from moe_parity.kernels.ours import moe

    batch, experts, asked = call.inputs.batch, call.inputs.experts, call.inputs.asked
    ran = moe.run_stages(
        batch.x, batch.ids, batch.weights, experts, limit=asked.limit, clamp=clamp,
        alpha=asked.alpha, beta=asked.beta, power_of_two=asked.scale.is_power_of_two,
        mid_power_of_two=asked.mid.is_power_of_two, out_dtype=asked.dtype, path=path,
        down=down, x_scale=call.inputs.x_scale,
    )  # fmt: skip
    made = dict(vars(ran if in_order is None else in_order(ran)))
    if call.inputs.x_scale is not None:
        del made["act_codes"], made["act_scales"]  # what arrived
    return made


STORED: dict[str, tuple[str | None]] = {"decode": ("decode",), "dispatched": (None,)}
"""What an invariance map asks the decode path for besides: the path that ``run_moe`` chooses."""


def _register(path: str) -> None:
    @register(
        f"ours_{path}", stage=LAYER, recipes="ours", unavailable=unavailable, triton=True,
        supports=lambda case, device: _supports(case, path), note=f"Our layer, the {path} path.",
        contract=SERVING, takes_quantized=path == "large",
        stored=STORED if path == "decode" else None,
    )  # fmt: skip
    def layer(call: Call) -> dict[str, Tensor]:
        return run_path(call, call.config[0] if call.config else path)


@register(
    "ours_sorted", stage=LAYER, recipes="ours", unavailable=unavailable, triton=True,
    supports=lambda case, device: _supports(case, "large"), contract=SERVING,
    note="Our layer, the large path with a down projection on sorted rows.",
    cost=lambda case: 2 * LAYER.cost(case),
)  # fmt: skip
def sorted_layer(call: Call) -> dict[str, Tensor]:
    """Run the large path on sorted rows; what lies between the GEMMs is put in pair order."""
    from moe_parity.kernels.ours import moe, sorted_rows, steps
    from moe_parity.kernels.ours.dispatch import Path

    ran = run_path(call, "large", down="sorted")
    ids, experts = call.inputs.batch.ids, call.inputs.experts
    aligned = steps.align(ids, experts.first, experts.count, moe.BLOCK[Path.LARGE])
    codes, scales = sorted_rows.in_pair_order(
        ran["mid_codes"], ran["mid_scales"], aligned, ids.numel()
    )
    return {**ran, "mid_codes": codes, "mid_scales": scales}


def _prefix_cost(case: Case) -> int:
    """Count what the other paths cost, and tiles of padding, which end at once, as thirds."""
    pairs = case.m * case.k
    tiles = 8 * min(pairs, case.local_experts) + pairs // 16
    return 2 * LAYER.cost(case) + tiles * (-(-2 * case.i // 64) + -(-case.h // 64)) // 3


@register(
    "ours_prefix_sum", stage=LAYER, recipes="ours", unavailable=unavailable, triton=True,
    supports=lambda case, device: None, contract=SERVING, takes_quantized=True,
    note="Our layer, the prefix-sum path: rows by expert, live rows alone.",
    cost=_prefix_cost,
)  # fmt: skip
def prefix_sum_layer(call: Call) -> dict[str, Tensor]:
    """Run the prefix-sum path; what lies by expert is put in pair order."""
    from moe_parity.kernels.ours import prefix_sum

    return run_path(call, "prefix_sum", in_order=prefix_sum.in_pair_order)


_register("decode")
_register("large")
