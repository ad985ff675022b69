"""Hazards of the prefix-sum path: each fault put into our kernels is caught, with its sentence.

Where a GPU shows another cause than the virtual one, or none, ``on_gpu`` says so, and
docs/dispatch.md why.  The clean cases are drawn once and go through the checks that catch the
faults: each hazard is counted by the cases of its own check.  A case of ``check`` is a call and
its second one, one of ``replay`` a replay on changed inputs, one of ``invariance`` a batch, one of
``sequence`` a call among ten, one of ``no_sync`` a call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from moe_parity.harness.checks.calls import Player
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.invariance import batches, invariance
from moe_parity.harness.checks.promises import no_sync
from moe_parity.harness.checks.replay import changes, replay
from moe_parity.harness.checks.sequence import sequence
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.session.skips import skip_test
from moe_parity.kernels import Kernel, find
from moe_parity.kernels.ours import activation, moe, permute, prefix_sum, quant
from moe_parity.kernels.virtual_gpu import record
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.language import Case, Check, Routing, ScaleFormat, Skip, Values, Why
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.suites import prefix_faults as faults
from moe_parity.suites.prefix_faults import Planting
from moe_parity.suites.prefix_hazards import (
    CASES,
    CODES,
    COPIES,
    FC1,
    FC2,
    JUDGED,
    LAYER,
    SUM,
    table,
)  # fmt: skip
from moe_parity.suites.prefixed import as_bits, expected, poison, untouched

HAZARDS = table()


def others(case: Case) -> list[Case]:
    """Return a case, one of its shapes, and one of others."""
    other = dataclasses.replace(case, seed=1, values=Values.NORMAL)
    return [case, other, dataclasses.replace(case, m=case.m + 1)]


def looked(
    look: str, kernel: Kernel, case: Case, device: str, kept: dict[Any, Any]
) -> Iterator[Verdict]:
    def fresh(every: Sequence[Sequence[Case]]) -> list[int]:
        numbers = []
        for cases in every:
            kept.clear()
            numbers.append(Player(kernel, device).play(cases))
        return numbers

    if look == "check":
        yield from check(kernel, case, device)
    elif look == "sequence":
        yield from sequence(kernel, others(case), device, fresh=fresh)
    elif look == "invariance":
        yield from invariance(kernel, case, device, fresh=fresh)
    else:
        yield (replay if look == "replay" else no_sync)(kernel, case, device)


@pytest.mark.parametrize("name", HAZARDS)
def test_a_prefix_hazard_is_red_and_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parity_device: str
):
    hazard = HAZARDS[name]
    if parity_device not in hazard.devices:
        skip_test(
            Skip(Why.UNSUPPORTED, f"{name}: docs/dispatch.md says why a GPU does not show it.")
        )
    planting = Planting(patch=monkeypatch, folder=tmp_path)
    hazard.plant(planting)
    kernel = dataclasses.replace(
        find(hazard.kernel), contract=hazard.contract, source=Path(faults.__file__)
    )
    if hazard.configs is not None:
        kernel = dataclasses.replace(kernel, configs=hazard.configs)
    case = hazard.case or CASES[hazard.kernel]
    every = list(looked(hazard.look, kernel, case, parity_device, planting.kept))
    red = next((v for v in every if v.failed), None)
    assert red is not None, [v.reason for v in every]
    if parity_device == "cuda" and hazard.on_gpu:
        assert red.cause in (hazard.cause, *hazard.on_gpu), red.message
        return
    assert (str(red.check), red.cause) == (hazard.check, hazard.cause), red.message
    assert hazard.words in red.message or parity_device == "cuda"


def test_the_output_over_an_intermediate_is_no_hazard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parity_device: str
):
    """What is written over has been read for the last time, where nobody returns it."""
    faults.overlaid(Planting(patch=monkeypatch, folder=tmp_path))
    right = find(LAYER)
    kernel = dataclasses.replace(
        right, contract=JUDGED, run=lambda call: {"out": right.run(call)["out"]}
    )
    for look in ("check", "replay"):
        every = list(looked(look, kernel, CASES[LAYER], parity_device, {}))
        assert any(v.compared for v in every)
        wrong = [v.message for v in every if v.failed]
        assert not wrong, wrong


# --- clean cases ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Always:
    """The same configurations whatever is asked."""

    chosen: dict[str, Any]

    def __call__(self, case: Case, device: str) -> dict[str, Any]:
        return self.chosen


def clean(name: str, count: int) -> Iterator[tuple[Kernel, Case]]:
    """Draw cases of a kernel: sizes, routings, ends, ranks, formats, alignments."""
    kernel = dataclasses.replace(find(name), contract=JUDGED.promising(Check.NO_SYNC))
    stage = kernel.stage

    def pick(n: int, what: str, below: int) -> int:
        return int(random_bits.integers(n, f"hazard/{name}/{what}", 1, 1, below=below))

    for n in range(count):
        ranks = 2 if pick(n, "ranks", 4) == 0 else 1
        words: dict[str, Any] = {
            "m": 1 + pick(n, "m", 6), "e": ranks * (1 + pick(n, "e", 4 // ranks)),
            "k": 1 + pick(n, "k", 2), "h": 128, "i": 64 if name == FC1 else 128, "seed": n,
            "routing": list(Routing)[pick(n, "routing", len(Routing))], "ep_size": ranks,
            "ep_rank": pick(n, "rank", ranks),
            "values": (Values.NORMAL, Values.AIMED)[pick(n, "values", 2)],
            "scale": (ScaleFormat.FP32, ScaleFormat.UE8M0)[pick(n, "scale", 2)],
        }  # fmt: skip
        known = {*stage.sizes, *stage.reads, "seed"}
        if "routing" in known:
            known |= {"ep_size", "ep_rank"}
        case = Case(**{word: value for word, value in words.items() if word in known})
        aligned = list(kernel.configs(case, "cpu").items()) or [("", None)]
        chosen = dict([aligned[pick(n, "alignment", len(aligned))]])
        if kernel.declines(case, "cpu") is None:
            yield aligned_as(kernel, chosen) if aligned[0][0] else kernel, case


def aligned_as(kernel: Kernel, chosen: dict[str, Any]) -> Kernel:
    """Return a kernel of one alignment."""
    return dataclasses.replace(kernel, configs=lambda case, device: chosen)


STAGES = COPIES, FC1, FC2, CODES, SUM
"""The layer is dear: the checks of every kernel hold it to the same."""
TOGETHER = 10
"""Calls of a sequence: each result is looked at again after every later one."""


def test_clean_prefix_kernels_are_accused_of_no_hazard(parity_device: str):
    wanted = 500 if parity_device == "cuda" else 50
    counted = dict.fromkeys(("check", "sequence", "replay", "invariance", "no_sync"), 0)
    for name in STAGES:
        drawn = list(clean(name, 2 * wanted // len(STAGES)))
        for kernel, case in drawn:
            for look, cases in counted.items():
                share = wanted // len(STAGES) * (1 + STAGES.index(name))
                if cases >= share or look == "sequence":
                    continue
                every = list(looked(look, kernel, case, parity_device, {}))
                wrong = [v for v in every if v.failed]
                assert not wrong, (name, case.id, wrong[0].message)
                if all(v.verdict == "skip" for v in every):
                    continue
                counted[look] += weight(look, kernel, case, parity_device)
        for start in range(0, wanted // len(STAGES), TOGETHER):
            cases = [case for _, case in drawn[start : start + TOGETHER]]
            played = [v for v in sequence(find(name), cases, parity_device) if v.failed]
            assert not played, (name, played[0].message)
            counted["sequence"] += len(cases)
    assert min(counted.values()) >= wanted, counted


def weight(look: str, kernel: Kernel, case: Case, device: str) -> int:
    """Return how many cases a look at one is: see above."""
    made = kernel.stage.inputs(case, device)
    if look == "replay":
        return sum(1 for _ in changes(kernel, case, device, made))
    if look == "invariance":
        return sum(1 for _ in batches(kernel, case, made)) if kernel.stage.units(made) > 1 else 0
    return 1


# --- one graph for every routing ------------------------------------------------------------------

EXPERTS, TOKENS = 3, 8
ROUTED = {
    "the first two experts": [[0, 1]] * TOKENS,
    "one live row": [[-1, -1]] * 5 + [[-1, 2]] + [[7, -1]] * 2,
    "no live row": [[-1, EXPERTS]] * TOKENS,
    "every row live, a tile that is full": [[1, 1]] * TOKENS,
    "every expert": [[0, 2], [1, 0], [2, 1], [0, 0]] * 2,
    "a tile and a row, and none": [[2, 2]] * TOKENS,
    "the first two experts again": [[0, 1]] * TOKENS,
}


def captured(call: Callable[[], object], device: str) -> Callable[[], object]:
    """Return what replays a call: a CUDA graph, or the tape that stands for one."""
    if device != "cuda":
        with record() as tape:
            call()
        return tape.replay
    call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def test_one_captured_prefix_call_takes_routing_ends_and_counts_as_they_are(parity_device: str):
    """Before each replay all memory but the inputs is poisoned; dead rows hold it afterwards."""
    case = Case(m=TOKENS, e=EXPERTS, k=2, h=128, i=128)
    made = layer_inputs(case, parity_device, spoil=False)
    codes, scales = quant.act_quant(made.batch.x)
    ids, weights = torch.full_like(made.batch.ids, -1), made.batch.weights
    space = prefix_sum.Workspace.empty(ids.numel(), made.experts, alignment=16)
    out = torch.empty((TOKENS, 128), dtype=torch.bfloat16, device=parity_device)
    rows: dict[str, Tensor] = {
        "codes": space.rows.codes, "scales": space.rows.scales, "fc1": space.fc1,
        "mid_codes": space.mid_codes, "mid_scales": space.mid_scales, "fc2": space.fc2,
    }  # fmt: skip
    again = captured(
        lambda: prefix_sum.run(
            codes, scales, ids, weights, made.experts, activation.Activation(), out, alignment=16,
            workspace=space,
        ),
        parity_device,
    )  # fmt: skip
    height = permute.row_bound(ids.numel(), EXPERTS, 16)
    for name, chosen in ROUTED.items():
        for tensor in (*rows.values(), space.rows.ends, space.rows.place, out):
            poison(tensor)
        ids.copy_(torch.tensor(chosen))
        again()
        want = expected(ids.flatten().tolist(), 0, EXPERTS, 16)
        found = space.rows.ends.tolist(), space.rows.place.tolist()
        assert found == (want.ends, want.place), name
        live = want.live(height, parity_device)
        for which, tensor in rows.items():
            assert untouched(tensor, live), f"{name}: dead rows of {which}"
        eager = moe.run_moe(
            codes, ids, weights, made.experts, x_scale=scales, path="large", out_dtype=out.dtype,
            power_of_two=False,
        )  # fmt: skip
        assert torch.equal(as_bits(out), as_bits(eager)), name
        assert bool(out.any()) == bool(live.any())
