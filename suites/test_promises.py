"""``no_sync`` and ``no_recompile``: what a kernel would wait for or compile, told on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling import recording
from moe_parity.harness.checks.promises import no_recompile, no_sync
from moe_parity.kernels import Call, Kernel, registry
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Check, Contract
from moe_parity.references.stages.layer.inputs import layer_inputs

pytest.importorskip("triton", reason="needs Triton")

import triton
import triton.language as tl

PROMISED = Contract().promising(Check.NO_SYNC, Check.NO_RECOMPILE)
CASE = Case(m=6, h=128)


def any_rows(x_ptr, o_ptr, rows, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    at = row * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(o_ptr + at, tl.load(x_ptr + at, mask=row < rows), mask=row < rows)


def all_rows(x_ptr, o_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    at = row * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(o_ptr + at, tl.load(x_ptr + at, mask=row < ROWS), mask=row < ROWS)


specialised = triton.jit(any_rows)
general = triton.jit(do_not_specialize=["rows"])(any_rows)
constant = triton.jit(all_rows)


def launching(kernel: Any) -> Callable[[Call], Any]:
    """Return a kernel that only launches; what it returns is looked at by no promise."""

    def run(call: Call) -> tuple[Tensor, Tensor]:
        from moe_parity.kernels.virtual_gpu import dispatch

        codes, scales = call.new("codes").zero_(), call.new("scales").zero_()
        x = call.inputs.x
        dispatch(kernel, (x.shape[0],), x, torch.empty_like(x), x.shape[0], COLUMNS=x.shape[1])
        return codes, scales

    return run


def kernel_of(run: Callable[[Call], Any], contract: Contract) -> Kernel:
    registry.register(
        "promised", stage="act_quant", recipes="deepgemm", triton=True, contract=contract
    )(run)
    return registry._KERNELS.pop("promised")


BATCH = "specialises on the batch: argument rows of any_rows has 3 forms"


@pytest.mark.parametrize(
    ("kernel", "words"),
    [(specialised, BATCH), (constant, "compiles all_rows anew for m = 18"), (general, "")],
)
def test_what_is_compiled_while_serving_is_told(kernel: Any, words: str):
    """Sizes 1 to 16 and around powers of two are called before: 18 is the first new one."""
    verdict = no_recompile(kernel_of(launching(kernel), PROMISED), CASE, "cpu")
    assert verdict.failed == bool(words)
    assert words in verdict.message
    assert verdict.cause == ("compiles_anew" if words else "")


def test_what_is_not_promised_is_told_in_a_skip():
    """Somebody's kernel is run at a few sizes: what it keeps may come from its launches."""
    verdict = no_recompile(kernel_of(launching(specialised), Contract()), CASE, "cpu")
    assert verdict.verdict == "skip"
    assert verdict.reason == f"promised: no_recompile is not promised, and does not hold: {BATCH}."


def test_a_copy_from_the_host_is_a_wait():
    def run(call: Call) -> tuple[Tensor, Tensor]:
        codes, scales = call.new("codes").zero_(), call.new("scales").zero_()
        return codes, scales.mul_(torch.tensor([1.0], device=scales.device))

    line = run.__code__.co_firstlineno + 2
    verdict = no_sync(kernel_of(run, PROMISED), CASE, "cpu")
    words = f"copies from the host at line {line} of test_promises.py (torch.tensor)"
    assert words in verdict.message
    assert verdict.cause == "waits_for_gpu"
    assert no_sync(kernel_of(run, Contract()), CASE, "cpu").verdict == "skip"


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool((t > 0).any()),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "masked_select": lambda t: torch.masked_select(t, t > 0),
    "unique": lambda t: t.unique(),
    "equal": lambda t: torch.equal(t, t + 1),
    "repeat": lambda t: t.repeat_interleave(torch.ones(4, dtype=torch.int64)),
    "bincount": lambda t: torch.bincount(t.long()),
}
RUNS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda t: t.view(2, 2)[1:].t(),
    "index": lambda t: t[torch.zeros(2, dtype=torch.int64)],
    "fill": lambda t: t.clone().__setitem__(t > 0, 1.0),
    "where": lambda t: torch.where(t > 0, t, 0),
    "repeat": lambda t: t.repeat_interleave(2),
    "sort": lambda t: t.argsort(stable=True),
    "cast": lambda t: t.to(torch.bfloat16).to(t.device),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_looks_at_values_is_seen(name: str):
    data = torch.arange(4.0)
    with recording.recording(recording.Path(__file__)) as found:
        WAITS[name](data)
    assert found.stops is not None
    assert found.stops.file == "test_promises.py"


@pytest.mark.parametrize("name", RUNS)
def test_what_looks_at_no_value_is_not(name: str):
    data = torch.arange(4.0)
    with recording.recording(recording.Path(__file__)) as found:
        RUNS[name](data)
    assert found.waits == []


def test_a_recording_runs_again_in_the_same_memory():
    """A result keeps its address, an empty tensor what it held, a scalar its value."""
    source, factor = torch.arange(4.0), 3
    with recording.recording(recording.Path(__file__)) as found:
        left = torch.empty(4)
        made = source * factor + torch.ones(4)
        part = made[1:]
        part.add_(1)
    factor = 5
    address = made.data_ptr()
    found.poison(0xFF)
    source.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    found.replay()
    assert made.tolist() == [4.0, 8.0, 11.0, 14.0]
    assert made.data_ptr() == address
    assert bool(left.isnan().all())
    assert factor == 5


def test_memory_that_is_let_go_is_not_kept_alive():
    kept = [torch.ones(4)]
    with recording.recording(recording.Path(__file__)) as found:
        made = kept[0] * 2
    found.let_go(set())
    assert found.freed == 0
    kept[0].fill_(3)
    found.replay()
    assert made.tolist() == [6.0] * 4
    kept.clear()
    assert found.freed == 1


def test_a_contract_says_what_it_promises():
    assert Contract().words == "all checks"
    assert PROMISED.words == "all checks; no_sync; no_recompile"
    assert Contract(pads_zero=True).promising(Check.NO_SYNC).words == (
        "all checks; no_sync; zero padding"
    )
    assert Contract().without(Check.REPLAY).words == "all but replay"
    assert Check.NO_SYNC not in Contract().checks
    with pytest.raises(ParityError):
        Contract().without(Check.EXACT)
    assert dataclasses.replace(PROMISED).checks >= {Check.REPLAY, Check.NO_RECOMPILE}


def test_what_prewarm_compiles_is_all_that_serving_needs():
    """Every batch of up to 70 tokens, on both paths; nothing is run."""
    from moe_parity.kernels.ours import moe
    from moe_parity.kernels.virtual_gpu import dry, record
    from moe_parity.kernels.virtual_gpu.specialize import forms

    case = Case(m=70, e=8, k=3, h=128, i=128, ep_rank=1, ep_size=2)
    made = layer_inputs(case, spoil=False)
    batch, experts = made.batch, made.experts

    def keys(call: Callable[[], Any]) -> set[str]:
        with dry(), record() as tape:
            call()
        return {f"{item.kernel.__name__} {forms(item)}" for item in tape.launches}

    warmed = keys(lambda: moe.prewarm(experts, topk=case.k))
    for m in range(71):
        x, ids, weights = batch.x[:m], batch.ids[:m], batch.weights[:m]
        for path in ("decode", "large"):
            met = keys(lambda: moe.run_moe(x, ids, weights, experts, path=path))  # noqa: B023
            assert met <= warmed, f"{path} at m = {m} compiles {sorted(met - warmed)[:1]}"
