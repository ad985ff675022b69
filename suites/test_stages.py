"""What a stage says about itself: its costs, the rows of a subset, its witnesses, its chip."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_parity.harness.evidence import witness
from moe_parity.kernels import find
from moe_parity.references.chips import special, tensor_core
from moe_parity.references.language import Case, Routing, ScaleFormat, Values
from moe_parity.references.recipes import ALL
from moe_parity.references.recipes.ours import NO_ROUNDING, OURS
from moe_parity.references.recipes.vllm import VLLM_TRITON
from moe_parity.references.stages import STAGES
from moe_parity.references.stages.combine import CombineRecipe, combine
from moe_parity.references.stages.layer.operands import Asked
from moe_parity.references.stages.swiglu import silu
from moe_parity.suites.planted import CASES

# --- costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "case", "cost"),
    [
        # rows in tiles of 32, groups of a row: 2 x 3, then 2 x 6, each worth six blocks of K
        ("act_quant", Case(m=33, h=384), 6 * 2 * 3),
        ("act_quant", Case(m=33, h=384, group=64), 6 * 2 * 6),
        ("weight_quant", Case(i=129, h=257), 6 * 2 * 3),
        # 6 experts walk 2 tiles of 512 pairs; three of these programs take what one of others does
        ("align", Case(m=171, e=6, k=3), 1 + 6 * 2 // 3),
        ("align", Case(m=171, e=6, k=3, ep_size=2), 1 + 3 * 2 // 3),
        ("permute", Case(m=7, e=4, k=3, h=256), 7 * 3),
        ("combine", Case(m=7, e=4, k=3, h=256), 7 * 3),
        # 80 pairs fill at most 4 + 80 / 16 blocks of rows; N = 2 I in tiles of 64, K in blocks
        ("fc1", Case(m=40, e=4, k=2, h=300, i=96), (4 + 5) * 3 * 3),
        ("fc2", Case(m=40, e=4, k=2, h=300, i=96), (4 + 5) * 5 * 1),
        ("fc1", Case(m=2, e=4, k=1, h=128, i=32), 2 * 1 * 1),
        ("swiglu", Case(m=9, i=129), 2 * 2),
        ("swiglu_quant", Case(m=3, i=256), 1 * 2),
        # 40 pairs of this rank: 4 blocks, 2 more of 16; both GEMMs of each
        ("layer", Case(m=40, e=4, k=2, h=256, i=128, ep_size=2), 6 * (4 * 2 + 4 * 1)),
        ("layer", Case(m=1, e=4, k=2, h=256, i=128), 2 * (4 * 2 + 4 * 1)),
    ],
)
def test_a_cost_counts_programs(stage: str, case: Case, cost: int):
    assert STAGES[stage].cost(case) == cost


# --- subsets ------------------------------------------------------------------------------------

WHOLE = {
    **CASES,
    "act_quant": Case(m=7, h=256),
    "weight_quant": Case(i=300, h=200),
    "permute": Case(m=5, e=5, k=3, h=128),
    "fc1": Case(m=5, e=4, k=2, h=128, i=64),
    "fc2": Case(m=5, e=4, k=2, h=64, i=128),
    "swiglu": Case(m=7, e=3, i=128),
    "swiglu_quant": Case(m=7, e=3, i=128),
    "combine": Case(m=5, e=4, k=2, h=64),
    "quant_gemm": Case(m=7, h=256, i=128),
    "layer": Case(m=3, e=4, k=2, h=128, i=128),
}
ROWS = {
    "act_quant": [[1, 3, 5]], "weight_quant": [list(range(128, 256))], "align": [],
    "permute": [[3, 4, 5, 9, 10, 11]], "fc1": [[2, 3, 6, 7]], "fc2": [[2, 3, 6, 7]],
    "swiglu": [[1, 3, 5]], "swiglu_quant": [[1, 3, 5]], "combine": [[1, 3]],
    "quant_gemm": [[1, 3, 5]], "layer": [[0], [2]],
}  # fmt: skip
"""Of the stage's first output (the layer's last): every second row, token or tile, in pairs."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_subset_is_some_rows_of_the_whole(stage: str):
    """They are those it says, and by the reference they have the bits that they have there."""
    owner, case = STAGES[stage], WHOLE[stage]
    recipe = NO_ROUNDING if stage in ("align", "permute") else OURS
    # with the weights in its epilogue FC2 reads all that it is given
    recipe = VLLM_TRITON if stage == "fc2" else recipe
    inputs = owner.inputs(case)
    whole = owner.reference(case, inputs, recipe)
    found = []
    for part in owner.subsets(case, inputs):
        alone = owner.reference(part.case, part.inputs, recipe)
        found.append(list(part.rows.values())[-1 if stage == "layer" else 0].tolist())
        for name, rows in part.rows.items():
            live = owner.live(part.case, part.inputs).get(name, torch.ones(len(rows)).bool())
            kept = alone[name][live].view(torch.uint8)
            assert torch.equal(kept, whole[name][rows][live].view(torch.uint8)), name
    assert found == ROWS[stage]


def test_two_tokens_of_a_layer_are_two_subsets():
    case = dataclasses.replace(WHOLE["layer"], m=2)
    parts = STAGES["layer"].subsets(case, STAGES["layer"].inputs(case))
    assert [part.rows["out"].tolist() for part in parts] == [[0], [1]]


@pytest.mark.parametrize("stage", STAGES)
def test_one_row_has_no_subset(stage: str):
    one = dataclasses.replace(WHOLE[stage], **({"i": 64} if stage == "weight_quant" else {"m": 1}))
    assert not list(STAGES[stage].subsets(one, STAGES[stage].inputs(one)))


# --- rows of nobody -------------------------------------------------------------------------------


def test_a_sum_leaves_out_what_is_nobodys():
    """Rows that are not owned hold NaN; the sum is that of the others, in order of k."""
    case = Case(m=40, e=4, k=3, h=64, routing=Routing.HOLES, ep_size=2, ep_rank=1)
    inputs = STAGES["combine"].inputs(case)
    out = STAGES["combine"].reference(case, inputs, OURS)["out"]
    owned = (inputs.ids >= 2) & (inputs.ids < 4)
    assert 0 < int(owned.sum()) < owned.numel()
    assert torch.equal(torch.isnan(inputs.rows).all(2), ~owned)
    # Rows of +0 that count leave a sum as it is, to the bit.
    rows = torch.where(owned[..., None], inputs.rows, torch.zeros_like(inputs.rows))
    part, every = OURS.of("combine", CombineRecipe), torch.ones_like(owned)
    want = combine(rows, inputs.weights, every, part, torch.bfloat16)
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))


def test_what_a_caller_leaves_out():
    """Plain SiLU without a limit, fp32 scales, the first rank."""
    asked = Asked()
    assert (asked.limit, asked.alpha, asked.beta) == (None, 1.0, 0.0)
    assert asked.scale is asked.mid is ScaleFormat.FP32


# --- witnesses ----------------------------------------------------------------------------------

SHIPPED = Path(witness.__file__).parents[2] / "suites" / "witnesses"
KEPT = [path for path in SHIPPED.rglob("*.safetensors") if path.parent.name != "witnesses"]
KEPT += [
    path for path in SHIPPED.glob("*.safetensors") if not path.name.startswith(("model", "dot"))
]


def test_every_witness_is_of_a_case_that_would_be_recorded_again():
    """One that its stage names and its kernel takes; each that some such kernel takes has one."""
    known = sorted({path.name.partition("-")[0] for path in KEPT})
    assert len(known) > 20
    covered: dict[str, set[str]] = {}
    takes: dict[str, set[str]] = {}
    for name in known:
        kernel = find(name)
        kept = {path.stem.partition("-")[2] for path in KEPT if path.name.startswith(f"{name}-")}
        cases = kernel.stage.witness_cases()
        taken = {c.id: c.seed for c in cases if kernel.declines(c, "cuda") is None}
        assert kept <= set(taken), name
        for path in KEPT:
            if path.name.startswith(f"{name}-"):
                seen = witness.read(path)[0]
                assert seen.seed == taken[path.stem.partition("-")[2]], path.name
        covered.setdefault(kernel.stage.name, set()).update(kept)
        takes.setdefault(kernel.stage.name, set()).update(taken)
    covered["fc2"] |= covered["fc1"]  # no kernel of fc2 is dense
    for stage, kept in covered.items():
        named = {case.id for case in STAGES[stage].witness_cases()}
        # no op that quantizes inside takes UE8M0
        assert kept == (takes[stage] if stage == "quant_gemm" else named), stage


# --- chips --------------------------------------------------------------------------------------

UNITS = ((special, "mufu_ex2"), (special, "mufu_rcp"), (tensor_core, "dot"))


@pytest.mark.parametrize("stage", STAGES)
def test_what_says_that_it_needs_a_chip_asks_one(stage: str, monkeypatch: pytest.MonkeyPatch):
    """Every recipe and every neighbour of ours: on a chip where the reference uses its units."""
    asked: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            asked.append(name)
            return function(*args, **options)

        return call

    for module, name in UNITS:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    owner = STAGES[stage]
    small = dataclasses.replace(WHOLE[stage], values=Values.NORMAL)
    power = dataclasses.replace(small, scale=ScaleFormat.UE8M0)
    both = [case for case in (small, power) if owner.refusal(case) is None]
    made = [(case, owner.inputs(case)) for case in both]
    recipes = {r.name: r for r in ALL.values() if owner.described_by(r)}
    recipes |= dict(owner.neighbours(OURS))
    for name, recipe in recipes.items():
        asked.clear()
        silu._of_bf16.cache_clear()  # a table that stands asks nothing more
        for case, inputs in made:
            owner.reference(case, inputs, recipe)
        assert recipe.on_chip(owner.acting) == bool(asked), f"{name}: {set(asked)}"
