"""Batched experts as the harness sees them: what they decline and cost, and what they promise."""

from __future__ import annotations

import dataclasses

import pytest

from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.promises import no_recompile, no_sync
from moe_parity.kernels import find
from moe_parity.references.language import Case, Check, Routing, Values

pytest.importorskip("triton", reason="needs Triton")

SWIGLU, FC1 = find("ours_swiglu_quant_batched"), find("ours_fc1_batched")


@pytest.mark.parametrize(
    ("kernel", "case", "reason"),
    [
        (SWIGLU, Case(m=4), "None"),
        (SWIGLU, Case(m=4, group=64), "None"),
        (SWIGLU, Case(m=4, group=32, i=64), "the group must be 64 or 128, not 32."),
        (SWIGLU, Case(m=253, e=64), "None"),
        (SWIGLU, Case(m=254, e=64), "room for 254 rows in each of 64 experts is more than 16384"),
        (FC1, Case(m=4), "None"),
        (FC1, Case(m=4, h=192), "K = 192 must be a multiple of 128."),
        (FC1, Case(m=127, e=64, k=2, h=128), "room for 254 rows in each of 64 experts is more"),
        (FC1, Case(m=127, e=64, k=2, h=128, ep_size=2), "None"),
    ],
)
def test_what_batched_experts_decline(kernel, case: Case, reason: str):
    assert str(kernel.declines(case, "cpu")).startswith(reason)


def test_a_gpu_has_more_room_for_batched_experts():
    for case in (Case(m=4000, e=32), Case(m=254, e=64)):
        assert SWIGLU.declines(case, "cuda") is None
    assert SWIGLU.declines(Case(m=4096, e=32), "cuda") is not None


def test_what_batched_experts_cost_on_a_cpu():
    """By hand: tiles of 16 rows count four, those of the GEMM once for each block of K."""
    assert SWIGLU.cost(Case(m=40, e=5, i=256)) == 4 * (5 + 2) * 2 + 1
    assert SWIGLU.cost(Case(m=1, e=5, i=128)) == 4 + 1
    # 4 tiles of N, 3 hit experts and no full block, 2 blocks of K; 8 experts' empty tiles
    assert FC1.cost(Case(m=3, e=8, k=1, i=128, h=256)) == 4 * (3 * 2 + 1)


@pytest.mark.parametrize("kernel", [SWIGLU, FC1], ids=lambda k: k.name)
def test_batched_experts_promise_what_a_server_needs(kernel):
    """No look at a value and nothing compiled anew, at any number of rows."""
    case = Case(m=6, e=3, i=128, **({"h": 128} if kernel is FC1 else {}))
    assert {Check.NO_SYNC, Check.NO_RECOMPILE} <= kernel.contract.checks
    for verdict in (no_sync(kernel, case, "cpu"), no_recompile(kernel, case, "cpu")):
        assert verdict.verdict == "pass", verdict.message


@pytest.mark.parametrize("routing", [Routing.HOLES, Routing.NOBODY, Routing.ONE])
def test_batched_rows_of_nobody_lie_nowhere(routing: Routing):
    """Pairs of other ranks, of no expert, and all pairs in one expert's room."""
    case = Case(m=5, e=4, k=2, h=128, i=64, values=Values.NORMAL, routing=routing)
    for part in (case, dataclasses.replace(case, ep_rank=1, ep_size=2)):
        assert not [v.message for v in check(FC1, part, "cpu") if v.failed]
