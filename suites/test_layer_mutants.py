"""What the layer's checks could have caught: faults put into our kernels' source and glue.

Each mutant is the kernel's own file with one line changed, run on the virtual GPU through the
check that judges the real one.  The record says how many outputs turned red.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.checks.flow import check
from moe_parity.kernels import find
from moe_parity.references.language import Case, InputDtype, Routing, ScaleFormat, Values
from moe_parity.references.stages.quant.inputs import aimed_rows

activation = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")
moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
ops = pytest.importorskip("moe_parity.kernels.ours.quant", reason="needs Triton")
steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")

LAYER = Case(m=5, e=4, k=2, h=256, i=256, values=Values.AIMED)
QUANT = Case(m=aimed_rows(512, 8), h=512, values=Values.AIMED, dtype=InputDtype.FP32)


@dataclass(frozen=True, kw_only=True)
class SourceMutant:
    """One line of a kernel's source, changed."""

    name: str
    old: str
    new: str
    check: str
    """The check that must turn red."""
    decision: str = ""
    """What the check must name, where a recipe has the bits."""
    case: Case = LAYER
    also: tuple[str, str] = ("", "")
    """A second change without which the first would not compile."""


LAYER_SOURCE = (
    SourceMutant(
        name="scale_order",
        old="acc = tl.fma(partial, tl.broadcast_to(scale[None, :], (BLOCK_N, BLOCK)), acc)",
        new="acc = tl.fma(partial * s_a[None, :], tl.zeros((BLOCK_N, BLOCK), tl.float32) + "
        "tl.load(w_scales + block * w_scale_column), acc)",
        check="exact_fc1",
        decision="gemm.scale_order=a_then_b",
    ),
    SourceMutant(
        name="no_fma",
        old="acc = tl.fma(partial, tl.broadcast_to(scale[None, :], (BLOCK_N, BLOCK)), acc)",
        new="acc = acc + partial * scale[None, :]",
        check="exact_fc1",
        decision="gemm.accumulate=mul_add",
    ),
    SourceMutant(
        name="no_rounding_before_quantization",
        old="return (value * up).to(tl.bfloat16)",
        new="return value * up",
        check="exact_swiglu_quant",
        decision="swiglu.product_rounding=none",
    ),
    SourceMutant(
        name="clamp_dropped",
        old='if CLAMP == "before":',
        new='if CLAMP == "never":',
        check="exact_swiglu_quant",
        case=dataclasses.replace(LAYER, clamp=0.5),
    ),
    SourceMutant(
        name="sum_descending",
        old="pair = token * TOPK + slot",
        new="pair = token * TOPK + (TOPK - 1 - slot)",
        check="exact_combine",
        decision="combine.order=descending",
        case=dataclasses.replace(LAYER, k=4),
    ),
    SourceMutant(
        name="sum_without_fma",
        old="added = tl.fma(tl.zeros((BLOCK,), tl.float32) + weight, row, total)",
        new="added = total + weight * row",
        check="exact_combine",
        decision="combine.step=mul_add",
        case=dataclasses.replace(LAYER, k=4),
    ),
    SourceMutant(
        name="last_block_of_k_lost",
        old="for block in range(scales_k):",
        new="for block in range(scales_k - 1):",
        check="exact_fc1",
    ),
)

QUANT_SOURCE = (
    SourceMutant(
        name="slash_for_div_rn",
        old="multiplier = tl.math.div_rn(E4M3_MAX, floored)",
        new="multiplier = E4M3_MAX / floored",
        check="exact",
        case=QUANT,
    ),
    SourceMutant(
        name="times_reciprocal_of_scale",
        old="return tl.where(zero, 1.0, scale), tl.where(zero, 1.0, multiplier)",
        new="return tl.where(zero, 1.0, scale), tl.where(zero, 1.0, tl.math.div_rn(1.0, scale))",
        check="exact",
        decision="quant.apply=mul_recip",
        case=QUANT,
    ),
    SourceMutant(
        name="power_of_two_by_log2",
        old="scale = (exponent << 23).to(tl.float32, bitcast=True)",
        new="scale = tl.exp2(tl.ceil(tl.log2(tl.math.div_rn(floored, E4M3_MAX))))",
        check="exact",
        case=dataclasses.replace(QUANT, scale=ScaleFormat.UE8M0),
    ),
    SourceMutant(
        name="no_floor",
        old="floored = tl.maximum(amax, AMAX_FLOOR)",
        new="floored = amax",
        check="exact",
        decision="quant.floor=none",
        case=QUANT,
    ),
    SourceMutant(
        name="zero_group_not_one",
        old="zero = amax == 0.0",
        new="zero = amax == -1.0",
        check="exact",
        decision="quant.zero_group=as_floored",
        case=QUANT,
    ),
)


def mutated(module, mutant: SourceMutant, folder: Path):
    """Import a copy of a kernel module with the mutant's line changed."""
    source = Path(module.__file__).read_text()
    assert source.count(mutant.old) == 1, f"{mutant.name}: the line has changed, mend the mutant"
    path = folder / f"mutant_{mutant.name}.py"
    path.write_text(source.replace(mutant.old, mutant.new).replace(*mutant.also))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def killed(verdicts, mutant_name: str, check: str, decision: str, recorder: Recorder):
    """Record how many outputs turned red, and demand that the right check did."""
    red = {str(v.check): v for v in verdicts if v.verdict == "fail"}
    dead = check in red and (not decision or decision in red[check].causes)
    differing = red[check].differing if check in red else 0
    fault = f"{mutant_name}: {check} is not red with {decision or 'any decision'}; red: {list(red)}"
    claim(
        recorder, "mutant_killed", "" if dead else fault, kernel="ours", nearest_mutant=mutant_name,
        could_show=differing, cause=decision, mutant_distance=differing,
    )  # fmt: skip


@pytest.mark.parametrize("mutant", LAYER_SOURCE, ids=lambda m: m.name)
def test_layer_source(mutant: SourceMutant, tmp_path, monkeypatch, parity_recorder: Recorder):
    for owner, name in ((steps, "layer_kernels"), (activation, "activation_kernels")):
        source = getattr(owner, name)
        if mutant.old in Path(source.__file__).read_text():
            monkeypatch.setattr(owner, name, mutated(source, mutant, tmp_path))
    verdicts = list(check(find("ours_decode"), mutant.case, "cpu"))
    killed(verdicts, mutant.name, mutant.check, mutant.decision, parity_recorder)


@pytest.mark.parametrize("mutant", QUANT_SOURCE, ids=lambda m: m.name)
def test_quant_source(mutant: SourceMutant, tmp_path, monkeypatch, parity_recorder: Recorder):
    monkeypatch.setattr(ops, "kernels", mutated(ops.kernels, mutant, tmp_path))
    verdicts = [next(check(find("ours_act_quant"), mutant.case, "cpu"))]
    killed(verdicts, mutant.name, mutant.check, mutant.decision, parity_recorder)


def _other_unit(monkeypatch):
    """32 rows of weights a tile: Triton compiles the dot to mma.sync."""
    plain = steps.dispatch

    def dispatch(kernel, grid, *args, **options):
        if "BLOCK_N" in options:
            grid = (grid[0], grid[1] * options["BLOCK_N"] // 32)
            options = options | {"BLOCK_N": 32}
        return plain(kernel, grid, *args, **options)

    monkeypatch.setattr(steps, "dispatch", dispatch)


def _damaged_slots(change: Callable[[torch.Tensor, int], None]):
    def damage(monkeypatch):
        plain = steps.align

        def align(ids, first, experts, block):
            aligned = plain(ids, first, experts, block)
            change(aligned.slots, ids.numel())
            return aligned

        monkeypatch.setattr(steps, "align", align)

    return damage


def _lose(slots: torch.Tensor, pairs: int) -> None:
    slots[0] = pairs


def _double(slots: torch.Tensor, pairs: int) -> None:
    slots[1] = slots[0]


def _unwritten_row(monkeypatch):
    plain = steps.combine

    def combine(rows, weights, ids, first, experts, out):
        k = ids.shape[1]
        plain(rows[:-k], weights[:-1], ids[:-1].contiguous(), first, experts, out[:-1])

    monkeypatch.setattr(steps, "combine", combine)


def _weights_in_the_epilogue(monkeypatch):
    plain = steps.combine

    def combine(rows, weights, ids, first, experts, out):
        weighted = (rows.float() * weights.flatten()[:, None]).to(torch.bfloat16)
        plain(weighted, None, ids, first, experts, out)

    monkeypatch.setattr(steps, "combine", combine)


def _clamp_after_silu(monkeypatch):
    plain = activation.swiglu_quant

    def swiglu_quant(rows, ids, first, experts, how, **words):
        how = dataclasses.replace(how, clamp="after")
        return plain(rows, ids, first, experts, how, **words)

    monkeypatch.setattr(activation, "swiglu_quant", swiglu_quant)


def _foreign_ids_with_weight_zero(monkeypatch):
    """Clamp foreign ids onto an own expert with weight zero, as a first version might."""
    plain = moe._layer

    def layer(work):
        ids, experts = work.ids, work.experts
        local = ids - experts.first
        owned = (ids >= 0) & (local >= 0) & (local < experts.count)
        clamped = (local.clamp(0, experts.count - 1) + experts.first).to(ids.dtype)
        weights = torch.where(owned, work.weights, torch.zeros_like(work.weights))
        return plain(dataclasses.replace(work, ids=clamped, weights=weights))

    monkeypatch.setattr(moe, "_layer", layer)


FOREIGN = Case(m=3, e=32, k=3, h=128, i=128, ep_rank=1, ep_size=4, routing=Routing.HOLES)
GLUE = {
    "mma_sync": (_other_unit, LAYER, "exact_fc1", "gemm.unit=mma_f16"),
    "lost_pair": (_damaged_slots(_lose), LAYER, "exact", "unwritten_read"),
    "doubled_pair": (_damaged_slots(_double), LAYER, "exact", "unwritten_read"),
    "unwritten_row": (_unwritten_row, LAYER, "exact_combine", ""),
    "weights_in_the_epilogue": (_weights_in_the_epilogue, LAYER, "exact_combine", ""),
    "clamp_after_silu": (
        _clamp_after_silu,
        dataclasses.replace(LAYER, clamp=0.5),
        "exact_swiglu_quant",
        "swiglu.clamp_order=after",
    ),
    "foreign_ids_with_weight_zero": (_foreign_ids_with_weight_zero, FOREIGN, "exact_layer", ""),
}


@pytest.mark.parametrize("name", GLUE)
def test_glue(name: str, monkeypatch, parity_recorder: Recorder):
    damage, case, expected, decision = GLUE[name]
    damage(monkeypatch)
    verdicts = list(check(find("ours_decode"), case, "cpu"))
    killed(verdicts, name, expected, decision, parity_recorder)
