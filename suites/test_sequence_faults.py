"""What calls after calls catch: kernels that keep something between calls, and what is said of it.

Each is a file of its own, since what it keeps lies in its module: read anew, it has kept nothing.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from moe_parity.harness.cases import sequences as drawing
from moe_parity.harness.cases.sequences import base_of, sequences
from moe_parity.harness.checks.calls import Player
from moe_parity.harness.checks.culprit import fresh_of
from moe_parity.harness.checks.expect import repro
from moe_parity.harness.checks.sequence import sequence, verdicts
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.cli import commands
from moe_parity.kernels import Call, Kernel, load_file, registry
from moe_parity.references.language import Case, Check, Values, parse_id
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import STAGES

HEAD = """
import dataclasses
import torch
from moe_parity.kernels import register
from moe_parity.references.recipes.ours import OURS

KEPT = {}

def right(call, **words):
    case = dataclasses.replace(call.case, **words)
    made = call.stage.reference(case, call.inputs, OURS)
    packed = call.stage.outputs(call.case, call.inputs)
    return {name: call.new(name, tuple(t.shape), packed[name].strides, t.dtype).copy_(t)
            for name, t in made.items()}

def with_inputs(call, **inputs):
    return dataclasses.replace(call, inputs=dataclasses.replace(call.inputs, **inputs))

"""
MINE = """
@register("mine", stage="{stage}", recipes="ours",
          supports=lambda case, device: "no words" if case.scale == "ue8m0packed" else None)
def mine(call):
"""


def kernel_file(folder: Path, stage: str, body: str, head: str = "") -> Path:
    """Write a kernel file whose kernel ``mine`` has this body."""
    lines = "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    path = folder / "mine.py"
    path.write_text(HEAD + head + MINE.format(stage=stage) + lines)
    return path


def again(path: Path) -> Kernel:
    """Return the kernel of a file that is read anew: it has kept nothing."""
    (kernel,) = load_file(path)
    return kernel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Give a folder for a kernel file, whose kernel is forgotten again; sequences are short."""
    monkeypatch.setitem(drawing.MULTIPLY_ADDS, "cpu", 1 << 26)
    yield tmp_path
    registry._KERNELS.pop("mine", None)


def judged(path: Path) -> tuple[Kernel, Case, list[Verdict]]:
    """Hold the kernel of a file to its sequence, and find culprits by reading it anew."""

    def fresh(every: Sequence[Sequence[Case]]) -> list[int]:
        return [Player(again(path), "cpu").play(cases) for cases in every]

    kernel = again(path)
    base = base_of(kernel, "cpu")
    assert base is not None
    chosen = sequences(kernel, base, "cpu")
    return kernel, base, list(sequence(kernel, chosen, "cpu", fresh))


def exact_alone(path: Path, call: str) -> bool:
    """Whether a call, the first of the kernel, has the bits of its recipe."""
    player = Player(again(path), "cpu")
    return player.play([parse_id(call)[1]]) == 0


LEAKS = {
    "the scale format, by shape": ("act_quant", """
key = call.inputs.x.shape
form = KEPT.setdefault(key, call.case.scale)
return right(call, scale=form)
""", {"scale"}),
    "the dtype, by shape": ("act_quant", """
x = call.inputs.x
dtype = KEPT.setdefault(x.shape, x.dtype)
return right(with_inputs(call, x=x.to(dtype).to(x.dtype)))
""", {"dtype"}),
    "the rows, by address": ("act_quant", """
x = call.inputs.x
held = KEPT.setdefault((x.data_ptr(), x.shape), x.clone())
return right(with_inputs(call, x=held))
""", {"seed"}),
    "the strides, by shape": ("act_quant", """
x = call.inputs.x
stride = KEPT.setdefault((x.shape, x.dtype), x.stride())
size = (len(x) - 1) * stride[0] + (x.shape[1] - 1) * stride[1] if len(x) else 0
fits = x.storage_offset() + size < x.untyped_storage().nbytes() // x.element_size()
return right(with_inputs(call, x=x.as_strided(x.shape, stride) if fits else x))
""", {"hazard"}),
    "the largest value so far": ("act_quant", """
out = right(call)
if len(out["scales"]):
    most = KEPT.get("most", 0.0)
    KEPT["most"] = float(out["scales"].max())
    out["scales"][0, 0] = out["scales"][0, 0].clamp(min=most * 1.5)
return out
""", set()),
    "the limit, by shape": ("swiglu_quant", """
limit = KEPT.setdefault(call.inputs.rows.shape, call.inputs.limit)
return right(with_inputs(call, limit=limit))
""", {"clamp"}),
    "a counter": ("swiglu_quant", """
KEPT["calls"] = KEPT.get("calls", 0) + 1
out = right(call)
if KEPT["calls"] % 2 == 0:
    out["codes"].view(-1)[-1:] ^= 1
return out
""", set()),
    "the largest batch": ("swiglu_quant", """
rows = len(call.inputs.rows)
KEPT["most"] = most = max(rows, KEPT.get("most", 0))
out = right(call)
if most >= 33 > rows:
    out["codes"].view(-1)[:1] ^= 1
return out
""", {"m"}),
    "the weight, by its shape": ("fc1", """
w = KEPT.setdefault(call.inputs.w.shape, (call.inputs.w.clone(), call.inputs.w_scale.clone()))
return right(with_inputs(call, w=w[0], w_scale=w[1]))
""", {"seed", "routing"}),
    "the scales, by the address of the weight": ("fc1", """
given = call.inputs
kept = KEPT.setdefault((given.w.data_ptr(), given.w.shape), given.w_scale.clone())
return right(with_inputs(call, w_scale=kept))
""", {"seed", "routing", "scale"}),
    "the routing, by the number of tokens": ("layer", """
batch = call.inputs.batch
ids = KEPT.setdefault((batch.ids.shape, call.inputs.experts.w13.shape), batch.ids.clone())
return right(with_inputs(call, batch=dataclasses.replace(batch, ids=ids)))
""", {"seed", "routing"}),
    "the second scale format": ("layer", """
mid = KEPT.setdefault(call.inputs.asked.scale, call.inputs.asked.mid)
return right(with_inputs(call, asked=dataclasses.replace(call.inputs.asked, mid=mid)))
""", {"mid_scale"}),
    "an error": ("combine", """
if KEPT.setdefault("k", call.inputs.ids.shape[1]) != call.inputs.ids.shape[1]:
    raise RuntimeError("the workspace has another size")
return right(call)
""", {"k"}),
}  # fmt: skip
"""What is kept -> stage, kernel, and the words in which the two calls that show it may differ."""


@pytest.mark.parametrize("name", LEAKS)
def test_what_a_kernel_keeps_is_named_with_the_call_that_it_comes_from(
    name: str, folder: Path, capsys
):
    stage, body, differ = LEAKS[name]
    path = kernel_file(folder, stage, body)
    kernel, base, (verdict,) = judged(path)
    assert (verdict.check, verdict.verdict) == (Check.SEQUENCE, "fail")
    assert (verdict.cause_kind, verdict.cause) == ("state", "leaks_state"), verdict.message
    first, last = verdict.sequence
    assert f"({last})" in verdict.message.partition(" after call ")[0]
    assert f"({first})" in verdict.message.partition(" after call ")[2]
    assert "alone it is right" in verdict.message
    if differ:
        one, two = (parse_id(call)[1] for call in verdict.sequence)
        told = {word for word in vars(one) if getattr(one, word) != getattr(two, word)}
        assert len(told) == 1
        assert told <= differ, verdict.message
    # the bits of the call alone are right; the printed line is red for it and no other
    assert exact_alone(path, last)
    line = shlex.split(repro(kernel, base, verdict))
    assert commands.main(line[1:]) == commands.FAILED
    printed = capsys.readouterr().out.splitlines()
    assert [entry.split()[0] for entry in printed] == ["pass", "fail", "fail"]


RESULTS = {
    "one workspace for each shape": ("act_quant", """
made = right(call)
case = call.case
held = KEPT.setdefault((case.m, case.h, case.group, case.scale, case.layout), made)
return {name: held[name].copy_(made[name]) for name in made}
""", 2),
    "one of two workspaces in turn": ("swiglu_quant", """
made = right(call)
KEPT["calls"] = KEPT.get("calls", 0) + 1
key = call.case.m, call.case.i, call.case.group, call.case.layout, KEPT["calls"] % 2
held = KEPT.setdefault(key, made)
return {name: held[name].copy_(made[name]) for name in made}
""", 3),
    "a view of a large one": ("combine", """
made = right(call)["out"]
pool = KEPT.setdefault(made.dtype, torch.empty(1 << 20, dtype=made.dtype, device=made.device))
return pool[: made.numel()].view(made.shape).copy_(made)
""", 2),
    "the output of a layer": ("layer", """
made = right(call)["out"]
return KEPT.setdefault(made.shape, torch.empty_like(made)).copy_(made)
""", 2),
}  # fmt: skip
"""Where the result lies -> stage, kernel, and how many calls show it."""


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_in_a_workspace_is_named_with_the_call_that_overwrites_it(
    name: str, folder: Path, capsys
):
    stage, body, count = RESULTS[name]
    path = kernel_file(folder, stage, body)
    kernel, base, (verdict,) = judged(path)
    assert (verdict.cause_kind, verdict.cause) == ("state", "returns_workspace"), verdict.message
    assert len(verdict.sequence) == count
    first, *_, last = verdict.sequence
    assert f"({first}) is changed by call" in verdict.message
    assert f"({last}):" in verdict.message
    assert exact_alone(path, first)
    line = shlex.split(repro(kernel, base, verdict))
    again(path)
    assert commands.main(line[1:]) == commands.FAILED
    assert "returns memory that a later call writes to" in capsys.readouterr().out


def test_a_process_of_its_own_finds_the_culprit(folder: Path):
    """The same answer where this process has called the kernel before, and is no good any more."""
    path = kernel_file(folder, *LEAKS["the rows, by address"][:2])
    kernel = again(path)
    base = Case(m=4)
    other, wide = dataclasses.replace(base, seed=1), dataclasses.replace(base, h=256)
    every = [[other], [base, wide, other], [wide, other], [base, other]]
    Player(kernel, "cpu").call(base)
    assert fresh_of(kernel, "cpu")(every) == [0, 3, 0, 2]


def test_a_case_that_comes_again_has_the_bits_of_its_first_call(folder: Path):
    """Also where a kernel may follow one recipe or another: not one now and the other one then."""
    divides = next(r for label, r in STAGES["act_quant"].neighbours(OURS) if "mul_recip" in label)
    calls: list[Call] = []

    def alternates(call: Call) -> dict[str, Tensor]:
        calls.append(call)
        recipe = (OURS, divides)[len(calls) % 2]
        made = call.stage.reference(call.case, call.inputs, recipe)
        return {name: call.new(name).copy_(value) for name, value in made.items()}

    registry.register("mine", stage="act_quant", recipes=lambda *_: (OURS, divides))(alternates)
    kernel = registry._KERNELS.pop("mine")
    case = Case(m=24, h=512, values=Values.AIMED)
    player = Player(kernel, "cpu")
    assert player.play([case, case]) == 2
    assert player.calls[1].moved
    assert not player.calls[1].wrong
    (verdict,) = verdicts(kernel, player, None)
    assert (verdict.cause, verdict.sequence) == ("leaks_state", (f"mine-{case.id}@0",) * 2)
    assert "as in its first call" in verdict.message


def test_a_call_that_is_wrong_alone_is_charged_to_no_other(folder: Path):
    """The cause is that of its own bits."""
    path = kernel_file(
        folder,
        "act_quant",
        """
out = right(call)
if call.case.layout == "col":
    out["codes"].zero_()
return out
""",
    )
    (verdict,) = judged(path)[2]
    assert (verdict.verdict, verdict.cause_kind) == ("fail", "pattern")
    assert len(verdict.sequence) == 1
    assert "-col-" in verdict.sequence[0]
    assert "after call" not in verdict.message


def test_a_kernel_that_raises_is_red_with_its_line(folder: Path):
    body = "if call.case.m == 33:\n    raise ValueError('no tile')\nreturn right(call)"
    (verdict,) = judged(kernel_file(folder, "act_quant", body))[2]
    assert (verdict.cause_kind, verdict.cause) == ("call", "ValueError")
    assert "no tile (mine.py, line " in verdict.message


def test_what_a_kernel_refuses_is_left_out_unless_it_has_taken_it(folder: Path):
    """A ParityError is a refusal; of a case that was taken before it is red."""
    head = "from moe_parity.references.errors import ParityError\n"
    body = "if {}:\n    raise ParityError('not that.')\nreturn right(call)"
    always = kernel_file(folder, "act_quant", body.format("call.case.m == 33"), head)
    (verdict,) = judged(always)[2]
    assert verdict.verdict == "pass"
    later = body.format("KEPT.setdefault('m', call.case.h) != call.case.h or KEPT.get('full')")
    later = f"KEPT['n'] = KEPT.get('n', 0) + 1\nKEPT['full'] = KEPT['n'] > 8\n{later}"
    (verdict,) = judged(kernel_file(folder, "act_quant", later, head))[2]
    assert (verdict.verdict, verdict.cause_kind) == ("fail", "state"), verdict.message
    assert "ParityError: not that." in verdict.message
    assert len(verdict.sequence) == 9


@pytest.mark.parametrize("stage", ["act_quant", "swiglu_quant", "combine"])
def test_a_kernel_that_keeps_nothing_is_green(stage: str, folder: Path):
    (verdict,) = judged(kernel_file(folder, stage, "return right(call)"))[2]
    assert verdict.verdict == "pass", verdict.message
    assert verdict.compared > 1000
