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
from moe_parity.suites.test_fusion import (  # noqa: E402
    OPTIONS,
    QUANT,
    SWIGLU,
    WIDTH,
    Model,
    Outputs,
    both,
    compiled,
    differing,
    dropping,
)

silu = torch.nn.functional.silu
PLAIN = (128, "fp32", "row")


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


def by_slices(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :WIDTH]) * rows[:, WIDTH:], *PLAIN)


def up_first(rows: Tensor) -> Outputs:
    return QUANT(rows[..., WIDTH:] * silu(rows[..., :WIDTH]), *PLAIN)


def by_chunk(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, -1)
    return QUANT(torch.mul(silu(gate), up), *PLAIN)


def by_split(rows: Tensor) -> Outputs:
    gate, up = torch.split(rows, WIDTH, dim=-1)
    return QUANT(up.mul(silu(gate, inplace=False)), *PLAIN)


def by_tensor_split(rows: Tensor) -> Outputs:
    gate, up = torch.tensor_split(rows, 2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def by_sections(rows: Tensor) -> Outputs:
    gate, up = rows.split([WIDTH, WIDTH], 1)
    return QUANT(silu(gate) * up, *PLAIN)


def as_aten_ops(rows: Tensor) -> Outputs:
    aten = torch.ops.aten
    gate, up = aten.slice(rows, 1, 0, WIDTH), aten.slice(rows, 1, WIDTH)
    return torch.ops.moe_parity.act_quant(aten.mul(aten.silu(gate), up), *PLAIN)


def a_part_of_a_larger_tensor(rows: Tensor) -> Outputs:
    """Rows that are whole do not start where their memory does."""
    gate, up = rows[2:].chunk(2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def written_afterwards(rows: Tensor) -> Outputs:
    """Put the fused op where the product stood, and it reads what that read."""
    y = silu(rows[:, :WIDTH]) * rows[:, WIDTH:]
    rows.mul_(3)
    return QUANT(y, *PLAIN)


def our_op_in_torchs_form(rows: Tensor) -> Outputs:
    return QUANT(SWIGLU(rows, None, 0, 1, "none", 0.0, None, 1.0, 0.0, "torch"), *PLAIN)


FUSED = [
    by_slices, up_first, by_chunk, by_split, by_tensor_split, by_sections, as_aten_ops,
    a_part_of_a_larger_tensor, written_afterwards, our_op_in_torchs_form,
]  # fmt: skip


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


def second_half_first(rows: Tensor) -> Outputs:
    up, gate = rows.chunk(2, -1)
    return QUANT(silu(gate) * up, *PLAIN)


def short_slices(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :128]) * rows[:, WIDTH : WIDTH + 128], *PLAIN)


def neighbours(rows: Tensor) -> Outputs:
    """Cut the shape of halves in another place."""
    return QUANT(silu(rows[:, 128 : WIDTH + 128]) * rows[:, WIDTH:], *PLAIN)


def every_other_column(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, ::2]) * rows[:, 1::2], *PLAIN)


def every_other_row(rows: Tensor) -> Outputs:
    gate, up = rows[::2].chunk(2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def halves_of_the_rows(rows: Tensor) -> Outputs:
    gate, up = rows[:4].chunk(2, 0)
    return QUANT(silu(gate) * up, *PLAIN)


def columns_that_are_rows(rows: Tensor) -> Outputs:
    gate, up = rows.t().contiguous().t().chunk(2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def rows_with_gaps(rows: Tensor) -> Outputs:
    gate, up = torch.cat((rows, rows), 1)[:, : 2 * WIDTH].chunk(2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def three_dimensions(rows: Tensor) -> Outputs:
    pairs = rows.view(5, 2, WIDTH)
    return QUANT(silu(pairs[:, 0]) * pairs[:, 1], *PLAIN)


def batched_rows(rows: Tensor) -> Outputs:
    """Quantized through a view."""
    gate, up = rows.view(1, 5, 2 * WIDTH).chunk(2, -1)
    return QUANT((silu(gate) * up).view(5, WIDTH), *PLAIN)


def a_copy_of_the_gate(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, list(range(WIDTH))]) * rows[:, WIDTH:], *PLAIN)


def one_column_of_up(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :WIDTH]) * rows[:, WIDTH : WIDTH + 1], *PLAIN)


def up_of_another_tensor(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :WIDTH]) * (rows + 1)[:, WIDTH:], *PLAIN)


def gate_and_gate(rows: Tensor) -> Outputs:
    gate = rows[:, :WIDTH]
    return QUANT(silu(gate) * gate, *PLAIN)


def clamped_gate(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :WIDTH].clamp(max=1.0)) * rows[:, WIDTH:], *PLAIN)


def clamped_product(rows: Tensor) -> Outputs:
    return QUANT((silu(rows[:, :WIDTH]) * rows[:, WIDTH:]).clamp(-1.0, 1.0), *PLAIN)


def in_half(rows: Tensor) -> Outputs:
    gate, up = rows.half().chunk(2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def rounded_once(rows: Tensor) -> Outputs:
    """In fp32 up to the product: other bits than torch's form has."""
    gate, up = rows.chunk(2, 1)
    return QUANT(silu(gate.float()) * up.float(), *PLAIN)


def another_activation(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    return QUANT(torch.nn.functional.gelu(gate) * up, *PLAIN)


def silu_is_needed(rows: Tensor) -> Outputs:
    s = silu(rows[:, :WIDTH])
    return (*both(QUANT(s * rows[:, WIDTH:], *PLAIN)), s)


def product_is_needed(rows: Tensor) -> Outputs:
    """LoRA adds to the BF16 activation."""
    y = silu(rows[:, :WIDTH]) * rows[:, WIDTH:]
    return (*both(QUANT(y, *PLAIN)), y)


def product_is_quantized_twice(rows: Tensor) -> Outputs:
    y = silu(rows[:, :WIDTH]) * rows[:, WIDTH:]
    return (*both(QUANT(y, *PLAIN)), *both(QUANT(y, 64, "ue8m0", "row")))


def product_is_changed(rows: Tensor) -> Outputs:
    y = silu(rows[:, :WIDTH]) * rows[:, WIDTH:]
    y.mul_(0.75)
    return QUANT(y, *PLAIN)


def silu_is_changed(rows: Tensor) -> Outputs:
    s = silu(rows[:, :WIDTH])
    s.mul_(0.75)
    return QUANT(s * rows[:, WIDTH:], *PLAIN)


def silu_in_place(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :WIDTH], inplace=True) * rows[:, WIDTH:], *PLAIN)


def up_is_written_after_silu(rows: Tensor) -> Outputs:
    """Neither place is right for one op: SiLU reads before, the product after."""
    s = silu(rows[:, :WIDTH])
    rows.mul_(3)
    return QUANT(s * rows[:, WIDTH:], *PLAIN)


def a_view_is_written_after_silu(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    s = silu(gate)
    rows[1:, WIDTH:].fill_(0.5)
    return QUANT(s * up, *PLAIN)


def up_is_assigned_after_silu(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    s = silu(gate)
    rows[1:, WIDTH:] = 0.5
    return QUANT(s * up, *PLAIN)


def up_is_written_by_an_op_after_silu(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    s = silu(gate)
    torch.ops.aten.mul_.Tensor(up, 3)
    return QUANT(s * up, *PLAIN)


def up_is_an_output_after_silu(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    s = silu(gate)
    torch.mul(rows, 3, out=rows)
    return QUANT(s * up, *PLAIN)


def up_is_written_by_silu_after_silu(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    s = silu(gate)
    silu(up, inplace=True)
    return QUANT(s * up, *PLAIN)


SAID: dict[Model, list[str]] = {
    second_half_first: [product.HALVES],
    short_slices: [product.HALVES],
    neighbours: [product.HALVES],
    every_other_column: [product.HALVES],
    every_other_row: [product.HALVES],
    halves_of_the_rows: [product.HALVES],
    columns_that_are_rows: [product.HALVES],
    rows_with_gaps: [product.HALVES],
    three_dimensions: [product.HALVES],
    batched_rows: [],
    a_copy_of_the_gate: [product.HALVES],
    one_column_of_up: [product.HALVES],
    up_of_another_tensor: [product.HALVES],
    gate_and_gate: [product.HALVES],
    clamped_gate: [product.HALVES],
    clamped_product: [],
    in_half: [product.DTYPE],
    rounded_once: [product.DTYPE],
    another_activation: [],
    silu_is_needed: [product.ELSEWHERE],
    product_is_needed: [product.ELSEWHERE],
    product_is_quantized_twice: [product.ELSEWHERE] * 2,
    product_is_changed: [product.ELSEWHERE],
    silu_is_changed: [product.ELSEWHERE],
    silu_in_place: [product.IN_PLACE],
    up_is_written_after_silu: [product.WRITTEN],
    a_view_is_written_after_silu: [product.WRITTEN],
    up_is_assigned_after_silu: [product.WRITTEN],
    up_is_written_by_an_op_after_silu: [product.WRITTEN],
    up_is_an_output_after_silu: [product.WRITTEN],
    up_is_written_by_silu_after_silu: [product.WRITTEN],
}
"""What is said of each in Dynamo's graph; nothing where the product is not what is quantized."""


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


def second_half_first_by_slices(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, WIDTH:]) * rows[:, :WIDTH], *PLAIN)


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
