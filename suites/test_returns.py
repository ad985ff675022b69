"""What a kernel may return, and what it may say about memory that it takes beside its outputs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling.poison import GUARD
from moe_parity.harness.checks.flow import check
from moe_parity.kernels import Call, Fate, Produced, registry
from moe_parity.references.arithmetic.formats import pack_ue8m0, ue8m0_encode
from moe_parity.references.errors import ParityError
from moe_parity.references.language import (
    Case,
    Contract,
    Hazard,
    ScaleFormat,
    ScaleLayout,
    Values,
)
from moe_parity.references.recipes.deepgemm import DEEPGEMM_GEMM
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import STAGES
from moe_parity.suites.planted import CASES, Run, kernel_of, red, right

# --- what a kernel may return -------------------------------------------------------------------


def in_order(call: Call) -> tuple[Tensor, ...]:
    return tuple(right(call).values())


def alone(call: Call) -> Tensor:
    return right(call)["out"]


def test_outputs_come_as_a_mapping_in_order_or_alone():
    for stage in STAGES:
        assert not red(kernel_of(stage, in_order), CASES[stage]), stage
    for stage in ("combine", "layer"):
        assert not red(kernel_of(stage, alone), CASES[stage]), stage


def test_a_layer_that_returns_its_output_alone_is_judged_as_a_whole():
    """The neighbours are searched on the whole, and the part is named."""
    label = "combine.order=descending"
    recipe = dict(STAGES["layer"].neighbours(OURS))[label]

    def wrong(call: Call) -> Tensor:
        return call.stage.reference(call.case, call.inputs, recipe)["out"]

    case = dataclasses.replace(CASES["layer"], k=4)
    (verdict,) = [v for v in check(kernel_of("layer", wrong), case, "cpu") if v.failed]
    assert verdict.check == "exact_layer"
    assert label in verdict.causes


BAD: tuple[tuple[Callable[[dict[str, Tensor]], Any], str], ...] = (
    (lambda out: None, "returned NoneType, expected act_quant's outputs (codes, scales)"),
    (lambda out: out["codes"], "returned 1 values, and act_quant has 2 outputs: codes, scales"),
    (lambda out: {"codes": out["codes"]}, "lacks scales"),
    (lambda out: out | {"more": out["codes"]}, "has more"),
    (lambda out: out | {"codes": 3}, "codes is a int, expected a tensor"),
    (lambda out: out | {"codes": out["codes"].int()}, "codes as torch.int32 [24, 512], expected"),
    (lambda out: out | {"scales": out["scales"][1:]}, "expected torch.float32 [24, 4]"),
    (
        lambda out: out | {"scales": out["scales"].t().contiguous().t()},
        "with strides (1, 24), expected (4, 1)",
    ),
)


@pytest.mark.parametrize(
    ("change", "words"), BAD, ids=lambda v: "" if callable(v) else v[:12].strip()
)
def test_a_bad_result_is_one_sentence(change: Callable[..., Any], words: str):
    kernel = kernel_of("act_quant", lambda call: change(right(call)))
    assert words in red(kernel, CASES["act_quant"])["exact"]


def breaks(call: Call) -> Any:
    raise RuntimeError(f"CUDA error: an illegal memory access in {call.stage}")


def test_an_exception_names_the_kernels_own_line():
    line = breaks.__code__.co_firstlineno + 1
    message = red(kernel_of("fc1", breaks), CASES["fc1"])["exact"]
    assert f"(test_returns.py, line {line})" in message
    assert "fc1 of faulty fails on fp32-aimed-m24-e4-k2-h512: RuntimeError: CUDA error" in message


# --- fates --------------------------------------------------------------------------------------


def _padded(call: Call, extra: int = 3) -> tuple[Tensor, Tensor]:
    made = call.stage.reference(call.case, call.inputs, DEEPGEMM_GEMM)["rows"]
    count, width = made.shape
    out = call.new("out", (count + extra, width), dtype=made.dtype)
    out[:count] = made
    return made, out


def _fates(count: int, extra: int, fate: Fate) -> dict[str, Tensor]:
    fates = torch.full((count + extra,), Fate.LIVE, dtype=torch.int8)
    fates[count:] = fate
    return {"out": fates}


def touches(call: Call) -> Produced:
    made, out = _padded(call)
    out[-2, 5] = 1.0
    return Produced(outputs={"rows": made}, fates=_fates(len(made), 3, Fate.UNTOUCHED))


def junk_for_zero(call: Call) -> Produced:
    made, out = _padded(call)
    out[len(made) :] = -0.0
    return Produced(outputs={"rows": made}, fates=_fates(len(made), 3, Fate.ZERO))


def leaves_a_live_row(call: Call) -> Produced:
    made, _ = _padded(call)
    return Produced(outputs={"rows": made}, fates=_fates(len(made), 3, Fate.LIVE))


def miscounts(call: Call) -> Produced:
    made, _ = _padded(call)
    return Produced(outputs={"rows": made}, fates=_fates(len(made), 1, Fate.JUNK))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (touches, "writes out[49, 5], declared untouched"),
        (junk_for_zero, "does not zero out[48, 0], declared zero"),
        (leaves_a_live_row, "leaves out[48, 0] unwritten, which is live"),
        (miscounts, "declares 49 fates for 51 rows of out"),
    ],
)
def test_declared_fates_are_kept(fault: Run, words: str):
    kernel = kernel_of("fc1", fault, DEEPGEMM_GEMM)
    assert words in red(kernel, CASES["fc1"])["write_set"]


def test_rows_that_nobody_owns_are_free():
    """Written or not, with anything: they are neither compared nor demanded."""
    case = Case(m=24, e=4, k=2, h=512, i=128, ep_rank=1, ep_size=2, values=Values.AIMED)

    def junk(call: Call) -> Tensor:
        rows = right(call)["rows"]
        rows[call.inputs.expert < 0] = float("nan")
        return rows

    def untouched(call: Call) -> Tensor:
        out, live = call.new("rows"), call.inputs.expert >= 0
        out[live] = call.stage.reference(call.case, call.inputs, OURS)["rows"][live]
        return out

    assert bool((STAGES["fc1"].inputs(case).expert < 0).any())
    for run in (junk, untouched):
        assert not red(kernel_of("fc1", run), case)


def test_a_recipe_that_cannot_be_made_is_one_sentence():
    """A kernel whose recipe depends on the case may fail there too."""

    def of_case(case: Case, device: str) -> Any:
        raise KeyError(f"no recipe for {case.scale} on {device}")

    registry.register("faulty", stage="fc1", recipes=of_case)(right)
    kernel = registry._KERNELS.pop("faulty")
    message = red(kernel, CASES["fc1"])["exact"]
    assert "KeyError: 'no recipe for fp32 on cpu' (test_returns.py, line" in message


# --- what a kernel may do besides ---------------------------------------------------------------


def test_memory_of_its_own_is_compared_as_it_was():
    """Other bits from a second call into it are seen, and a row called alone spoils nothing."""
    kept: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    calls = []

    def right_once(call: Call) -> dict[str, Tensor]:
        calls.append(1)
        made = call.stage.reference(call.case, call.inputs, OURS)
        for name, value in made.items():
            mine = kept.setdefault((name, tuple(value.shape)), torch.empty_like(value))
            mine.copy_(value if len(calls) == 1 else torch.zeros_like(value))
        return {name: kept[name, tuple(value.shape)] for name, value in made.items()}

    assert "gives other bits" in red(kernel_of("combine", right_once), CASES["combine"])["rerun"]
    pool = torch.empty(64, 256, dtype=torch.bfloat16)

    def slice_of_a_pool(call: Call) -> Tensor:
        made = call.stage.reference(call.case, call.inputs, OURS)["out"]
        return pool[: made.shape[0]].copy_(made)

    assert not red(kernel_of("combine", slice_of_a_pool), CASES["combine"])


def test_what_is_done_to_the_tensors_of_the_call_no_judge_sees():
    def disowns(call: Call) -> Tensor:
        call.inputs.expert.data = torch.full_like(call.inputs.expert, -1)
        return call.new("rows")

    found = red(kernel_of("fc1", disowns), CASES["fc1"])
    assert "leaves token 0, k 0, column 0 (expert 0) of rows unwritten" in found["exact"]
    assert "unwritten, which is live" in found["write_set"]


@pytest.mark.parametrize(
    ("gaps", "last", "green"),
    [(0, None, True), (0, 0, True), (None, None, False), (0, 1, False), (1, None, False)],
    ids=["zeros", "zeros-to-the-end", "left", "junk-at-the-end", "junk"],
)
def test_padding_that_must_be_zero(gaps: float | None, last: float | None, green: bool):
    """33 rows in columns of 36: three words between columns, and three after the last one."""

    def pads(call: Call) -> dict[str, Tensor]:
        made = call.stage.reference(call.case, call.inputs, OURS)
        out = {name: call.new(name).copy_(made[name]) for name in ("codes", "scales")}
        (rows, columns), step = out["scales"].shape, out["scales"].stride(1)
        whole = out["scales"].as_strided((columns, step), (step, 1))
        if gaps is not None:
            whole[:-1, rows:] = gaps
        if last is not None:
            whole[-1, rows:] = last
        return out

    case = dataclasses.replace(CASES["act_quant"], m=33, layout=ScaleLayout.TMA)
    kernel = dataclasses.replace(kernel_of("act_quant", pads), contract=Contract(pads_zero=True))
    found = red(kernel, case)
    assert set(found) == (set() if green else {"write_set"})


@pytest.mark.parametrize(("junk", "green"), [(0, True), (1, False)])
def test_a_group_that_does_not_exist_packs_a_zero(junk: int, green: bool):
    """Three groups of a row fill three of the four bytes of a word."""

    def packs(call: Call) -> dict[str, Tensor]:
        made = call.stage.reference(call.case, call.inputs, OURS)
        words = pack_ue8m0(ue8m0_encode(made["scales"]))
        words[-1, -1] |= junk << 24
        return {"codes": made["codes"], "scales": call.new("scales").copy_(words)}

    case = Case(m=5, h=384, scale=ScaleFormat.UE8M0_PACKED)
    found = red(kernel_of("act_quant", packs), case)
    if green:
        assert not found
    else:
        assert "packs exponents of groups that do not exist" in found["exact"]


def test_a_packed_word_that_is_left_is_called_unwritten():
    """Not one that packs groups which do not exist, as the poison in it seems to."""

    def leaves(call: Call) -> dict[str, Tensor]:
        made = call.stage.reference(call.case, call.inputs, OURS)
        words, scales = pack_ue8m0(ue8m0_encode(made["scales"])), call.new("scales")
        scales[:-1] = words[:-1]
        return {"codes": call.new("codes").copy_(made["codes"]), "scales": scales}

    case = Case(m=5, h=384, scale=ScaleFormat.UE8M0_PACKED)
    verdicts = [v for v in check(kernel_of("act_quant", leaves), case, "cpu") if v.failed]
    assert {v.cause for v in verdicts} == {"unwritten"}
    assert "write_set" in {v.check for v in verdicts}


def test_fates_of_memory_with_three_axes():
    """A fate for each row: all dimensions but the last."""

    def cubes(call: Call) -> Produced:
        made = call.stage.reference(call.case, call.inputs, DEEPGEMM_GEMM)["rows"]
        cube = call.new("cube", (call.case.m, 2, made.shape[1]), dtype=made.dtype)
        rows = cube.view(made.shape).copy_(made)
        fates = torch.full((call.case.m, 2), int(Fate.LIVE), dtype=torch.int8)
        return Produced(outputs={"rows": rows}, fates={"cube": fates})

    assert not red(kernel_of("fc1", cubes, DEEPGEMM_GEMM), CASES["fc1"])


@pytest.mark.parametrize("layout", ScaleLayout)
@pytest.mark.parametrize("offset", [-1, 1, GUARD])
def test_the_guards_reach_as_far_as_they_say(layout: ScaleLayout, offset: int):
    """The byte before the output, the first after it and its layout's padding, the last guarded."""

    def beside(call: Call) -> dict[str, Tensor]:
        out = {n: call.new(n).copy_(v) for n, v in right(call).items()}
        scales = out["scales"]
        end = sum((n - 1) * s for n, s in zip(scales.shape, scales.stride(), strict=True)) + 1
        memory = torch.empty(0, dtype=torch.uint8).set_(scales.untyped_storage())
        start = scales.storage_offset() * 4
        after = start + 4 * (end + -end % max(scales.stride()))
        memory[start - 1 if offset < 0 else after + offset - 1] = 1
        return out

    case = dataclasses.replace(CASES["act_quant"], m=33, layout=layout)
    assert "writes beside scales" in red(kernel_of("act_quant", beside), case)["write_set"]


def _registered(**options: Any) -> Any:
    registry.register("faulty", **{"stage": "combine", "recipes": OURS} | options)(right)
    return registry._KERNELS.pop("faulty")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"supports": lambda case, device: case.nope}, "AttributeError: 'Case' object has no"),
        (
            {"supports": lambda case, device: True},
            "a reason is a sentence, or None for none",
        ),
        ({"recipes": lambda case, device: ()}, "its function of recipes returned () for fp32"),
        ({"recipes": lambda case, device: OURS}, "expected a tuple of recipes, at least one"),
        ({"recipes": lambda case, device: (DEEPGEMM_GEMM,)}, "says nothing about combine"),
    ],
)
def test_a_function_that_answers_wrongly_is_red(options: dict[str, Any], words: str):
    """It drops no case in silence."""
    kernel = _registered(**options)
    assert kernel.declines(CASES["combine"], "cpu") is None
    assert words in red(kernel, CASES["combine"])["exact"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 42}, "stage must be a stage or its name, got 42"),
        ({"contract": "exact"}, "contract must be a Contract, got 'exact'"),
        ({"supports": "fp32 only."}, "supports must be a function, got 'fp32 only.'"),
    ],
)
def test_a_wrong_argument_is_refused(options: dict[str, Any], words: str):
    with pytest.raises(ParityError, match=re.escape(words)):
        _registered(**options)


def test_a_name_that_the_stage_does_not_have_is_no_refusal_of_input():
    kernel = kernel_of("combine", lambda call: call.new("ouput"))
    case = dataclasses.replace(CASES["combine"], hazard=Hazard.STRIDED)
    assert "combine has no output 'ouput'" in red(kernel, case)["exact"]


def test_an_exit_is_red():
    def leaves(call: Call) -> Tensor:
        raise SystemExit(0)

    assert "SystemExit" in red(kernel_of("combine", leaves), CASES["combine"])["exact"]


def test_longer_memory_without_fates_and_a_counter_are_free():
    def padded(call: Call) -> Tensor:
        made = call.stage.reference(call.case, call.inputs, OURS)["rows"]
        call.new("counter", (), dtype=torch.int32).zero_()
        rows = call.new("rows", (made.shape[0] + 16, made.shape[1]))
        rows[: made.shape[0]] = made
        return rows[: made.shape[0]]

    assert not red(kernel_of("fc1", padded), CASES["fc1"])


def test_the_source_is_the_users_file_under_other_decorators():
    kernel = kernel_of("combine", torch.no_grad()(lambda call: right(call)))
    assert kernel.source.name == "test_returns.py"
