"""How long the prefix-sum path takes beside padded ones: captured graphs in turn, cold L2.

On a GPU: ``python -m moe_parity.suites.perf.prefix_arms > timings.jsonl``.  A line is an arm at a
setting with its median, or the ratio of two arms of one run.  All arms quantize the same input, and
their outputs are compared bit for bit before the clock starts.  ``ours_padded`` is the large path,
whose blocks without a pair end at once too; ``ours_every_row`` and ``deepgemm_padded`` visit every
row of the buffer, as m_indices do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.ours import activation, moe, permute, prefix_sum, quant
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout
from moe_parity.references.stages.layer.operands import Experts

ROUNDS, WARM = 100, 5
"""Samples of each arm, and replays before them."""

FLUSHED = 512 << 20
"""Bytes that are written before each sample: ten times the L2 of an H200."""

RATIOS = (
    ("ours_prefix", "ours_padded"), ("ours_prefix", "ours_every_row"),
    ("deepgemm_prefix", "deepgemm_padded"), ("ours_prefix", "deepgemm_prefix"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A shape, its tokens and those that are live, and whether scales are powers of two."""

    experts: int = 32
    topk: int = 8
    hidden: int = 7168
    width: int = 2048
    capacity: int
    live: int
    powers: bool


SETTINGS = tuple(
    Setting(capacity=capacity, live=live, powers=powers)
    for capacity, live in ((512, 16), (4096, 4096))
    for powers in (False, True)
)


def weights(setting: Setting, device: str) -> Experts:
    """Return experts with codes of any finite value."""
    e, h, i = setting.experts, setting.hidden, setting.width
    made = torch.Generator(device).manual_seed(1)

    def codes(*shape: int) -> Tensor:
        drawn = torch.randint(0, 240, shape, dtype=torch.uint8, device=device, generator=made)
        return drawn.where(drawn & 0x7F != 0x7F, 0)

    def scales(*shape: int) -> Tensor:
        return 2.0**-12 * (1 + torch.rand(shape, device=device, generator=made))

    return Experts(
        w13=codes(e, 2 * i, h), w13_scale=scales(e, 2 * i // 128, h // 128),
        w2=codes(e, h, i), w2_scale=scales(e, h // 128, i // 128),
    )  # fmt: skip


class Arms:
    """The ways through the layer at a setting, each a call that takes the same input."""

    def __init__(self, setting: Setting, device: str, experts: Experts | None = None) -> None:
        """Draw the input."""
        self.setting, self.device = setting, device
        self.experts = weights(setting, device) if experts is None else experts
        made = torch.Generator(device).manual_seed(2)
        tokens, e, k = setting.capacity, setting.experts, setting.topk
        x = torch.randn((tokens, setting.hidden), device=device, generator=made)
        ids = torch.rand((tokens, e), device=device, generator=made).argsort(1)[:, :k].int()
        token = torch.arange(tokens, device=device)
        self.x = x.bfloat16()
        self.ids = ids.masked_fill((token % (tokens // setting.live) != 0)[:, None], -1)
        self.weights = torch.rand((tokens, k), device=device, generator=made)
        self.scale = ScaleFormat.UE8M0 if setting.powers else ScaleFormat.FP32
        self.out = torch.empty_like(self.x)
        laid = permute.permute(*quant.act_quant(self.x, scale=self.scale), self.ids, 0, e)
        rows = torch.arange(laid.codes.shape[0], device=device)
        room = -(-laid.ends // laid.alignment) * laid.alignment
        owner = torch.bucketize(rows, room.long(), right=True)
        self.indices = torch.where(owner < e, owner, -1).int()
        self.every_end = torch.cat([room[:-1], room.new_full((1,), len(rows))]).int()

    def names(self) -> list[str]:
        """Return the arms that run here."""
        from moe_parity.kernels.vendors.deepgemm import api

        own = ["ours_padded", "ours_prefix", "ours_every_row"]
        return own if api.unavailable() else [*own, "deepgemm_padded", "deepgemm_prefix"]

    def call(self, name: str) -> Tensor:
        """Run an arm once; return a copy of what it gives."""
        self.run(name)
        return self.out.clone()

    def run(self, name: str) -> None:
        """Run an arm into ``out``."""
        powers = self.setting.powers
        options: dict[str, Any] = {"power_of_two": powers, "out": self.out}
        if name in ("ours_padded", "ours_prefix", "deepgemm_prefix"):
            options["path"] = "large" if name == "ours_padded" else "prefix_sum"
            if name == "deepgemm_prefix":
                options["gemm"] = "deepgemm"
            moe.run_moe(self.x, self.ids, self.weights, self.experts, **options)
        else:
            self._padded(_every_row(self.every_end) if name == "ours_every_row" else _padded(self))

    def _padded(self, multiply: Callable[..., Tensor]) -> None:
        """Run a layer that visits every row of the buffer, live or not."""
        experts = self.experts
        codes, scales = quant.act_quant(self.x, scale=self.scale)
        rows = permute.permute(codes, scales, self.ids, 0, experts.count)
        fc1 = multiply(rows.codes, rows.scales, experts.w13, experts.w13_scale)
        mid, mid_scales = activation.swiglu_quant(
            fc1, None, 0, experts.count, activation.Activation(), scale=self.scale,
            layout=ScaleLayout.TMA,
        )  # fmt: skip
        fc2 = multiply(mid, mid_scales, experts.w2, experts.w2_scale)
        prefix_sum.prefix_combine(fc2, rows.place, self.weights, self.out)


def _every_row(ends: Tensor) -> Callable[..., Tensor]:
    def multiply(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        return prefix_sum.prefix_gemm(a, a_scale, w, w_scale, ends)

    return multiply


def _padded(arms: Arms) -> Callable[..., Tensor]:
    """Return DeepGEMM's m_indices GEMM; the indices are made before the clock starts."""
    from moe_parity.kernels.vendors.deepgemm import api

    def multiply(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        out = torch.empty((a.shape[0], w.shape[1]), dtype=torch.bfloat16, device=a.device)
        api.grouped(a, a_scale, w, w_scale, out, arms.indices, psum=False)
        return out

    return multiply


def captured(arms: Arms, name: str) -> Any:
    """Return an arm as a CUDA graph, compiled and warm."""
    for _ in range(2):
        arms.run(name)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arms.run(name)
    return graph


def timed(arms: Arms) -> dict[str, list[float]]:
    """Return the microseconds of each replay, arm after arm in turn, the L2 flushed before each."""
    graphs = {name: captured(arms, name) for name in arms.names()}
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=arms.device)
    found: dict[str, list[float]] = {name: [] for name in graphs}
    events = []
    for number in range(WARM + ROUNDS):
        turn = list(graphs) if number % 2 else list(graphs)[::-1]
        for name in turn:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flushed.zero_()
            start.record()
            graphs[name].replay()
            end.record()
            if number >= WARM:
                events.append((name, start, end))
        torch.cuda.synchronize()
    for name, start, end in events:
        found[name].append(1000 * start.elapsed_time(end))
    return found


def lines() -> Iterator[dict[str, Any]]:
    """Yield what is printed, a setting after the other."""
    experts: Experts | None = None
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for setting in SETTINGS:
        arms = Arms(setting, "cuda", experts)
        experts = arms.experts
        outs = {name: arms.call(name) for name in arms.names()}
        first = outs["ours_padded"].view(torch.int16)
        differing = {name: int((o.view(torch.int16) != first).sum()) for name, o in outs.items()}
        found = timed(arms)
        middle = {}
        for name, times in found.items():
            ordered = sorted(times)
            middle[name] = ordered[len(ordered) // 2]
            yield {
                "arm": name, **asdict(setting), "p50_us": round(middle[name], 2),
                "p10_us": round(ordered[len(ordered) // 10], 2),
                "p90_us": round(ordered[9 * len(ordered) // 10], 2), "samples": len(ordered),
                "differing": differing[name], **about,
            }  # fmt: skip
        for one, other in RATIOS:
            if one in middle and other in middle:
                yield {
                    "ratio": f"{one} / {other}", **asdict(setting),
                    "value": round(middle[one] / middle[other], 4), **about,
                }  # fmt: skip


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("The timings need a GPU.")
    for line in lines():
        print(json.dumps(line), flush=True)
