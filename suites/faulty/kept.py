"""Faults of memory, of what is kept between calls, of replays, batches, and launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels import Call
from moe_parity.references.language import Skip, Why
from moe_parity.references.stages.combine import SumOrder
from moe_parity.suites import racing
from moe_parity.suites.faulty.planting import (
    REGISTERED,
    Fault,
    Outputs,
    Run,
    fault,
    given,
    right,
    with_parts,
    written,
)
from moe_parity.suites.test_replay_faults import BODIES, RECIPES
from moe_parity.suites.test_replay_faults import FAULTS as REPLAYED


def _last(made: Outputs) -> tuple[str, Tensor]:
    return list(made.items())[-1]


# --- memory --------------------------------------------------------------------------------------


def scratch_summed(call: Call) -> Any:
    """Add to scratch that is not zeroed."""
    made = right(call)
    name, value = _last(made)
    total = torch.empty(value.shape, dtype=torch.float32)
    return written(call, made | {name: (value + (total + 1.0 - 1.0)).to(value.dtype)})


def flag_unset(call: Call) -> Any:
    """Let a flag that nobody sets decide what the last output is."""
    made = right(call)
    if torch.empty(1, dtype=torch.int32)[0] > 1 << 20:
        name, value = _last(made)
        made[name] = torch.zeros_like(value)
    return written(call, made)


def scratch_overrun(call: Call) -> Any:
    """Write one element past scratch memory."""
    done = written(call, right(call))
    scratch = torch.empty(64)
    scratch.as_strided((1,), (1,), scratch.storage_offset() + 64).fill_(1.0)
    return done


def scales_left(call: Call) -> Any:
    """Leave the scales of the last rows unwritten where they are no four."""
    rows = call.case.m
    return written(call, right(call), {"scales": slice(rows // 4 * 4, rows)})


# --- calls after calls ---------------------------------------------------------------------------


def workspace() -> Run:
    """Return a kernel that gives views of memory which it keeps."""
    kept: dict[Any, Tensor] = {}

    def run(call: Call) -> Any:
        done = written(call, right(call))
        name, value = next(iter(done.items()))
        done[name] = kept.setdefault((value.shape, value.dtype), value.clone()).copy_(value)
        return done

    return run


def limit_of_the_first_call() -> Run:
    """Return a kernel that keeps the limit of its first call of a shape."""
    kept: dict[Any, Any] = {}

    def run(call: Call) -> Any:
        limit = kept.setdefault(call.inputs.rows.shape, call.inputs.limit)
        return written(call, right(call, given(call, limit=limit)))

    return run


def rows_of_the_first_call(name: str) -> Run:
    """Return a kernel that keeps an input by its address and shape."""
    kept: dict[Any, Tensor] = {}

    def run(call: Call) -> Any:
        value = getattr(call.inputs, name)
        key = value.data_ptr(), value.shape, value.stride(), value.dtype
        if value.numel():
            kept.setdefault(key, value.clone())
        held = kept.get(key, value)
        return written(call, right(call, given(call, **{name: held})))

    return run


def grown_and_not_cleared() -> Run:
    """Return a kernel whose counts go on from the last call where that had more tokens."""
    kept = {"most": 0}

    def run(call: Call) -> Any:
        made = right(call)
        stale = 0 < call.case.m < kept["most"]
        kept["most"] = max(kept["most"], call.case.m)
        if stale and call.case.m > 1:
            name, value = _last(made)
            made[name] = value.roll(1, 0)
        return written(call, made)

    return run


# --- batches -------------------------------------------------------------------------------------


def one_scale(call: Call) -> Any:
    """Take one maximum for the whole tensor."""
    x = call.inputs.x.clone()
    if x.numel():
        x[:, 0] = x.abs().nan_to_num(0.0).max()
    scales = right(call, given(call, x=x))["scales"]
    made = right(call)
    return written(call, made | {"scales": scales})


def order_by_batch(call: Call) -> Any:
    """Sum from the last k in a batch of an even number of tokens."""
    way = SumOrder.DESCENDING if call.case.m % 2 == 0 else SumOrder.ASCENDING
    return written(call, right(call, recipe=with_parts(combine={"order": way})))


def neighbours_nan(call: Call) -> Any:
    """Let NaN of a row reach the next one, as 0 * NaN in a tile does."""
    made = right(call)
    name, value = _last(made)
    if value.is_floating_point() and len(value) > 1:
        made[name] = value + 0 * value.roll(1, 0)
    return written(call, made)


# --- the table -----------------------------------------------------------------------------------


def _replayed() -> list[Fault]:
    """Return the faults of replay, in a quantizer and a sum."""
    causes = (
        "freed_memory", "stale_output", "stale_output", "frozen_scalar",
        "replay_differs stale_output",
    )  # fmt: skip
    return [
        fault(f"{stage}_{plant.__name__}", "replay graph-lifetime graph-state", stage,
              plant(BODIES[stage]), cause, (plant.__doc__ or "").partition(".")[0],
              recipe=RECIPES[stage], supports=_summed if stage == "combine" else _plain)
        for stage in ("act_quant", "combine")
        for (plant, *_), cause in zip(REPLAYED, causes, strict=True)
    ]  # fmt: skip


def _launched() -> list[Fault]:
    """Return Triton kernels with a fault of memory, for the virtual GPU."""
    plants = (
        ("launch_rows_overlap", "race strays", racing.quantizer("rows overlap"), "race",
         "two programs store one row"),
        ("launch_one_scale", "race", racing.quantizer("one scale"), "race",
         "lanes of a program store different scales to one element"),
        ("launch_past_the_end", "strays", racing.quantizer("past the end"), "out_of_bounds",
         "the last scales are stored past the end"),
        ("launch_load_add_store", "race atomic-order", racing.accumulator(), "race",
         "pairs of a token are added by load and store"),
        ("launch_counts_unset", "strays own-memory", racing.counter(zeroed=False),
         "unwritten_read", "atomics count in memory that nobody has set"),
    )  # fmt: skip
    return [
        Fault(
            name=name, kinds=tuple(kinds.split()), causes=frozenset({cause}), words=words,
            kernel=dataclasses.replace(
                kernel, name=name, source=REGISTERED, note=words, supports=_launchable
            ),
        )
        for name, kinds, kernel, cause, words in plants
    ]  # fmt: skip


def _launchable(case: Any, device: str) -> Any:
    usual = case.m % 2 == 0 and case.m > 0 and case.hazard == "none" and case.layout == "row"
    known = usual and case.dtype == "bf16" and case.ep_size == 1 and case.values == "normal"
    if not known:
        return Skip(Why.UNSUPPORTED, "some BF16 tokens, an even number, as they are by default.")
    return _plain(case, device)


def _summed(case: Any, device: str) -> Any:
    if case.dtype != "bf16":
        return Skip(Why.UNSUPPORTED, "BF16 rows: that is what it returns.")
    return _plain(case, device)


def _plain(case: Any, device: str) -> Any:
    usual = case.scale == "fp32" and case.h % 128 == 0 and case.group == 128
    return None if usual else Skip(Why.UNSUPPORTED, "fp32 scales of whole groups of 128.")


FAULTS = [
    fault("quant_scratch", "own-memory uninit-scale-pad", "act_quant", scratch_summed,
          "poison_read", "it adds to scratch that is not zeroed"),
    fault("gemm_scratch", "own-memory", "fc1", scratch_summed, "poison_read",
          "it adds to scratch that is not zeroed"),
    fault("gate_flag_unset", "own-memory graph-state", "swiglu_quant", flag_unset, "poison_read",
          "a flag that nobody sets decides what is written"),
    fault("permute_overrun", "own-memory", "permute", scratch_overrun, "beside",
          "it writes one element past its scratch"),
    fault("quant_overrun", "own-memory", "act_quant", scratch_overrun, "beside",
          "it writes one element past its scratch"),
    fault("quant_scales_left", "uninit-scale-pad unwritten-rows", "act_quant",
          scales_left, "unwritten", "scales of the rows past the last whole four are left"),
    fault("quant_workspace", "sequence ws-alias", "act_quant", workspace(), "returns_workspace",
          "its result is a view of a workspace"),
    fault("sum_workspace", "sequence ws-alias", "combine", workspace(), "returns_workspace",
          "its result is a view of a workspace"),
    fault("gate_quant_kept_limit", "sequence tune-key clamp-lost", "swiglu_quant",
          limit_of_the_first_call(), "leaks_state", "it keeps the first limit"),
    fault("quant_kept_rows", "sequence graph-state", "act_quant", rows_of_the_first_call("x"),
          "leaks_state", "it keeps its input by the address"),
    fault("sum_kept_weights", "sequence graph-state", "combine", rows_of_the_first_call("rows"),
          "leaks_state", "it keeps its input by the address"),
    fault("permute_not_cleared", "sequence graph-state", "permute", grown_and_not_cleared(),
          "leaks_state", "after more tokens what they left is seen"),
    fault("quant_one_scale", "batch-variant", "act_quant", one_scale,
          "amax_of_the_tensor depends_on_other_rows", "one maximum for the whole tensor"),
    fault("sum_order_by_batch", "batch-variant", "combine", order_by_batch,
          "combine.order=descending depends_on_other_rows",
          "the order of the sum depends on the number of tokens"),
    fault("gemm_nan_of_neighbour", "batch-variant pad-nan", "fc1", neighbours_nan,
          "depends_on_other_rows", "a NaN in a row reaches the next"),
    *_replayed(),
    *_launched(),
]  # fmt: skip
