"""The pass on ``silu(gate) * up`` in torch's own ops: what it matches, what it must not, its bits.

On a CPU torch's own SiLU takes another exponential: there the recipe is what the fused graph is
judged by, on a GPU torch's eager mode itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import ScaleFormat, f32_to_bf16
from moe_parity.references.recipes.pytorch import SILU_AND_MUL
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe
from moe_parity.references.stages.swiglu.reference import swiglu as swiglu_reference

fusion = pytest.importorskip("moe_parity.kernels.ours.fusion", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")

from moe_parity.kernels.ours import torch_product as product  # noqa: E402
from moe_parity.suites.product_graphs import (  # noqa: E402
    FUSED,
    PLAIN,
    SAID,
    a_part_of_a_larger_tensor,
    a_view_is_written_after_silu,
    by_slices,
    product_is_changed,
    rounded_once,
    second_half_first,
    second_half_first_by_slices,
    silu_in_place,
    silu_is_changed,
    up_is_written_after_silu,
)
from moe_parity.suites.test_fusion import (  # noqa: E402
    OPTIONS,
    QUANT,
    WIDTH,
    Model,
    Outputs,
    compiled,
    differing,
    dropping,
)

silu = torch.nn.functional.silu


@pytest.fixture
def rows(parity_device: str) -> Tensor:
    return some_rows(5, parity_device)


def some_rows(count: int, device: str, seed: int = 9) -> Tensor:
    """Gates and ups over eight powers of two: no two groups have one scale."""
    made = random_bits.normal(seed, "rows", count, 2 * WIDTH, device=device)
    power = random_bits.integers(seed, "power", count, 2 * WIDTH // 64, below=8, device=device)
    return f32_to_bf16(made * torch.exp2(power.float() - 4).repeat_interleave(64, 1))


def eager(f: Model, rows: Tensor, *options: Any) -> Outputs:
    """Return what torch's eager mode gives on a GPU: by itself there, by the recipe on a CPU."""
    if rows.is_cuda:
        return f(rows.clone())
    part = SILU_AND_MUL.of("swiglu", SwigluRecipe)
    return QUANT(f32_to_bf16(swiglu_reference(rows, part)), *(options or PLAIN))


def in_dynamos_graph(f: Model, made: Any) -> Model:
    """Return a function compiled by the pass on Dynamo's graph, where writes are in place."""

    def run(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        made(module.graph)
        module.graph.lint()
        module.recompile()
        return module.forward

    torch._dynamo.reset()
    return torch.compile(f, backend=run, fullgraph=True)


GRAPHS = {"dynamo": in_dynamos_graph, "functional": compiled}


# --- what is fused --------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("f", FUSED, ids=lambda f: f.__name__)
def test_torchs_product_is_fused_with_the_bits_of_eager_mode(f: Model, graph: str, rows: Tensor):
    made = fusion.SwigluQuantFusion(cpu=True)
    run = GRAPHS[graph](f, made)
    with virtual_gpu.record() as tape:
        got = run(rows.clone())
    assert (made.fused, made.left) == (1, [])
    if not rows.is_cuda:
        assert len(tape.launches) == 1
    given = rows[2:] if f is a_part_of_a_larger_tensor else rows
    assert not differing(got, f(rows.clone()) if rows.is_cuda else eager(f, given))


@pytest.mark.parametrize(("group", "scale", "layout"), OPTIONS)
def test_torchs_product_keeps_group_format_and_layout(
    group: int, scale: str, layout: str, rows: Tensor
):
    def f(rows: Tensor) -> Outputs:
        gate, up = rows.chunk(2, -1)
        return QUANT(silu(gate) * up, group, scale, layout)

    made = fusion.SwigluQuantFusion(cpu=True)
    got = in_dynamos_graph(f, made)(rows)
    assert made.fused == 1
    assert not differing(got, eager(f, rows, group, scale, layout))


def test_inductor_fuses_torchs_product_before_the_gradients(
    rows: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And, with the pass after them besides, what is left is nothing."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = fusion.SwigluQuantFusion(cpu=True)
    torch._dynamo.reset()
    options = {"pre_grad_custom_pass": made, "post_grad_custom_post_pass": made}
    got = torch.compile(by_slices, options=options)(rows)
    assert (made.fused, made.left) == (1, [])
    assert not differing(got, eager(by_slices, rows))


def test_inductors_graph_after_the_gradients_is_left_alone_with_a_reason(
    rows: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """SiLU is taken apart there.  Nothing is generated: the graph is looked at alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = fusion.SwigluQuantFusion(cpu=True)

    class LookedAt(Exception):
        pass

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            made(graph)
            raise LookedAt

        def uuid(self) -> bytes:
            return b"looks and ends"

    torch._dynamo.reset()
    with pytest.raises(Exception, match="LookedAt"):
        torch.compile(by_slices, options={"post_grad_custom_post_pass": Pass()})(rows)
    assert made.fused == 0
    assert [said.split("is not fused: ")[1] for said in made.left] == [product.TAKEN_APART]


def test_on_a_cpu_torchs_product_is_left_alone_unless_asked_for(rows: Tensor):
    """Nothing holds a CPU's bits to a GPU's; on a GPU it is fused."""
    made = fusion.SwigluQuantFusion()
    got = in_dynamos_graph(by_slices, made)(rows)
    assert made.fused == (1 if rows.is_cuda else 0)
    if not rows.is_cuda:
        assert [said.split("is not fused: ")[1] for said in made.left] == [product.ON_A_CPU]
    assert not differing(got, by_slices(rows))


def test_inductor_knows_the_pass_that_takes_a_cpu_from_the_other():
    assert fusion.SwigluQuantFusion(cpu=True).uuid() != fusion.SwigluQuantFusion().uuid()


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
def test_torchs_product_in_a_cuda_graph_has_the_bits_of_eager_mode(scale: str, parity_gpu: str):
    """Captured once, replayed on other rows; Dynamo's, the functional and Inductor's graph."""

    def f(rows: Tensor) -> Outputs:
        return QUANT(silu(rows[:, :WIDTH]) * rows[:, WIDTH:], 128, scale, "tma")

    made = fusion.SwigluQuantFusion()
    first, other = (some_rows(33, parity_gpu, seed) for seed in (1, 2))
    inductor = {"pre_grad_custom_pass": made}
    for make in (
        lambda: in_dynamos_graph(f, made),
        lambda: compiled(f, made),
        lambda: torch.compile(f, options=inductor),
    ):
        torch._dynamo.reset()
        run, held = make(), first.clone()
        run(held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(held)
        for given in (other, first):
            held.copy_(given)
            graph.replay()
            torch.cuda.synchronize()
            assert not differing(out, f(given))
    assert made.fused == 3


# --- what is not ----------------------------------------------------------------------------------


@pytest.mark.parametrize("f", SAID, ids=lambda f: f.__name__)
def test_torchs_product_is_left_alone(f: Model, rows: Tensor):
    """The bits stay, and where it is a near miss there is a reason."""
    made = fusion.SwigluQuantFusion(cpu=True)
    got = in_dynamos_graph(f, made)(rows.clone())
    assert made.fused == 0
    assert [said.split("is not fused: ")[1] for said in made.left] == SAID[f]
    assert not differing(got, f(rows.clone()))


@pytest.mark.parametrize(
    "f",
    [
        product_is_changed, silu_is_changed, silu_in_place, up_is_written_after_silu,
        a_view_is_written_after_silu, rounded_once, second_half_first,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_torchs_product_is_left_alone_in_a_functional_graph(f: Model, rows: Tensor):
    """Where in-place changes have become values of their own."""
    made = fusion.SwigluQuantFusion(cpu=True)
    assert not differing(compiled(f, made)(rows.clone()), f(rows.clone()))
    assert made.fused == 0


def test_halves_are_known_by_their_memory():
    """A copy may have a half's shape, strides and offset, and a view may have another sign."""
    rows = some_rows(1, "cpu")
    gate, up = rows.chunk(2, 1)
    assert product._are_halves(rows, gate, up)
    copy = torch.empty_strided(gate.shape, gate.stride(), dtype=gate.dtype).copy_(gate)
    two = some_rows(2, "cpu")
    odd, lines = two[:, 1:].contiguous(), two.view(4, WIDTH)
    for wrong in (
        (rows, copy, up), (rows, gate, torch._neg_view(up)), (rows, gate, gate), (rows, up, gate),
        (rows[0], gate[0], up[0]), (odd, odd[:, :255], odd[:, 255:510]),
        (rows, gate[:, :128], up[:, :128]), (two, lines[:2], lines[1:3]),
    ):  # fmt: skip
        assert not product._are_halves(*wrong)


# --- planted faults -------------------------------------------------------------------------------


def wrongly(f: Model, rows: Tensor, name: str, default: Any) -> Outputs:
    """Fuse, and do not hand on one of the options."""
    return in_dynamos_graph(f, lambda graph: dropping(graph, name, default, cpu=True))(rows)


@pytest.mark.parametrize(
    ("name", "default"),
    [("scale", "fp32"), ("layout", "row"), ("group", 128), ("form", "ours")],
)
def test_a_fusion_of_torchs_product_that_drops_an_option_is_red(
    name: str, default: Any, rows: Tensor
):
    def f(rows: Tensor) -> Outputs:
        gate, up = rows.chunk(2, -1)
        return QUANT(silu(gate) * up, 64, "ue8m0", "col")

    want = eager(f, rows, 64, "ue8m0", "col")
    assert differing(wrongly(f, rows, name, default), want)


def test_one_rounding_shows_in_many_codes(rows: Tensor):
    """Both formats: it is not only that a test is red, but that many outputs make it so."""
    for scale in (ScaleFormat.FP32, ScaleFormat.UE8M0):

        def f(rows: Tensor, scale: str = str(scale)) -> Outputs:
            gate, up = rows.chunk(2, -1)
            return QUANT(silu(gate) * up, 128, scale, "row")

        want = eager(f, rows, 128, str(scale), "row")
        got = wrongly(f, rows, "form", "ours")
        assert int((got[0] != want[0]).sum()) > 20


def test_a_fusion_that_takes_any_two_parts_for_halves_is_red(
    rows: Tensor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(product, "_are_halves", lambda *_: True)
    made = fusion.SwigluQuantFusion(cpu=True)
    got = in_dynamos_graph(second_half_first_by_slices, made)(rows)
    assert made.fused == 1
    want = second_half_first_by_slices(rows)
    if not rows.is_cuda:
        want = eager(by_slices, torch.cat((rows[:, WIDTH:], rows[:, :WIDTH]), 1))
    assert differing(got, want)


def test_a_fusion_that_does_not_look_for_writes_is_red(
    rows: Tensor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(product, "_only_reads", lambda _: True)
    made = fusion.SwigluQuantFusion(cpu=True)
    got = in_dynamos_graph(up_is_written_after_silu, made)(rows.clone())
    assert made.fused == 1
    want = up_is_written_after_silu(rows.clone())
    if not rows.is_cuda:
        want = eager(by_slices, torch.cat((rows[:, :WIDTH], rows[:, WIDTH:] * 3), 1))
    assert differing(got, want)
