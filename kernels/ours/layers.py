"""Our layer as the harness sees it, once for each path."""

from __future__ import annotations

from torch import Tensor

from moe_parity.kernels.call import Call
from moe_parity.kernels.ours.stages import SERVING, unavailable
from moe_parity.kernels.registry import register
from moe_parity.references.language import Case
from moe_parity.references.stages import LAYER


def _supports(case: Case, path: str) -> str | None:
    if path == "decode" and case.gate.alpha_beta != (1.0, 0.0):
        return "alpha and beta take the large path."
    return None


def run_path(call: Call, path: str, clamp: str = "before") -> dict[str, Tensor]:
    """Run one path and return what every stage left behind."""
    from moe_parity.kernels.ours import moe

    batch, experts, asked = call.inputs.batch, call.inputs.experts, call.inputs.asked
    ran = moe.run_stages(
        batch.x, batch.ids, batch.weights, experts, limit=asked.limit, clamp=clamp,
        alpha=asked.alpha, beta=asked.beta, power_of_two=asked.scale.is_power_of_two,
        mid_power_of_two=asked.mid.is_power_of_two, out_dtype=asked.dtype, path=path,
        x_scale=call.inputs.x_scale,
    )  # fmt: skip
    made = dict(vars(ran))
    if call.inputs.x_scale is not None:
        del made["act_codes"], made["act_scales"]  # what arrived
    return made


def _register(path: str) -> None:
    @register(
        f"ours_{path}", stage=LAYER, recipes="ours", unavailable=unavailable, triton=True,
        supports=lambda case, device: _supports(case, path), note=f"Our layer, the {path} path.",
        contract=SERVING, takes_quantized=path == "large",
    )  # fmt: skip
    def layer(call: Call) -> dict[str, Tensor]:
        return run_path(call, path)


_register("decode")
_register("large")
