"""The pass that fuses SwiGLU and its quantization: what it matches, what it carries, its bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from moe_parity.harness.checks.compare import comparable
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout, f32_to_bf16
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages.quant import reference
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe
from moe_parity.references.stages.swiglu.reference import swiglu as swiglu_reference

fusion = pytest.importorskip("moe_parity.kernels.ours.fusion", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")

SWIGLU = torch.ops.moe_parity.swiglu.default
QUANT = torch.ops.moe_parity.act_quant.default
QUANT_OUT = torch.ops.moe_parity.act_quant_out.default
PLAIN = (None, 0, 1, "none", 0.0, None, 1.0, 0.0)
CLAMPED = (None, 0, 1, "before", 1.5, None, 1.25, 0.5)
WIDTH = 256
OPTIONS = [
    (group, scale, layout)
    for group in (64, 128)
    for scale in map(str, ScaleFormat)
    for layout in map(str, ScaleLayout)
]

Outputs = Any
"""Codes and scales, a tensor each; while a graph is traced one object that stands for both."""
Model = Callable[[Tensor], Outputs]


@pytest.fixture
def rows(parity_device: str) -> Tensor:
    """Gates and ups over eight powers of two: no two groups have one scale."""
    made = random_bits.normal(7, "rows", 5, 2 * WIDTH, device=parity_device)
    power = random_bits.integers(7, "power", 5, 2 * WIDTH // 64, below=8, device=parity_device)
    return f32_to_bf16(made * torch.exp2(power.float()).repeat_interleave(64, 1))


def model(group: int = 128, scale: str = "ue8m0", layout: str = "row", how=PLAIN) -> Model:
    return lambda rows: QUANT(SWIGLU(rows, *how), group, scale, layout)


def traced(f: Model) -> fx.GraphModule:
    return fx.symbolic_trace(f)


def calls(module: fx.GraphModule) -> list[str]:
    """Return the names of our ops in a graph, in order."""
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return [str(t).split(".")[1] for t in targets if str(t).startswith("moe_parity.")]


def both(made: Any) -> Outputs:
    """Return codes and scales of an op that is traced: its result is one object then."""
    return made[0], made[1]


def outline(made: Outputs) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.stride(), t.dtype) for t in made]


def differing(got: Outputs, want: Outputs) -> list[str]:
    """Return what two results differ in: how they lie, or their bits."""
    if outline(got) != outline(want):
        return [f"{outline(got)} for {outline(want)}"]
    pairs = enumerate(zip(got, want, strict=True))
    return [f"bits of {n}" for n, (a, b) in pairs if not torch.equal(comparable(a), comparable(b))]


def compiled(f: Model, made: Any) -> Callable[[Tensor], Outputs]:
    torch._dynamo.reset()
    return torch.compile(f, backend=fusion.eager_backend(made), fullgraph=True)


# --- what is fused --------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "scale", "layout"), OPTIONS)
def test_the_fused_op_has_the_group_format_and_layout(
    group: int, scale: str, layout: str, rows: Tensor
):
    """In place of two launches one, and the same bits in the same memory format."""
    f = model(group, scale, layout, CLAMPED)
    module = fusion.fuse(traced(f))
    assert calls(module) == ["swiglu_quant"]
    (node,) = (n for n in module.graph.nodes if n.target is fusion.FUSED)
    assert node.args[1:] == (*CLAMPED, group, scale, layout)
    with virtual_gpu.record() as apart:
        want = f(rows)
    with virtual_gpu.record() as together:
        got = module(rows)
    assert (len(apart.launches), len(together.launches)) == (2, 1)
    assert not differing(got, want)


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
def test_the_fused_graph_has_the_bits_of_the_reference(scale: str, rows: Tensor):
    """By the recipe's definition: neither op is asked."""
    codes, scales = fusion.fuse(traced(model(scale=scale)))(rows)
    y = swiglu_reference(rows, OURS.of("swiglu", SwigluRecipe))
    part = OURS.of("act_quant", QuantRecipe)
    want = reference.act_quant(y, part, group=128, scale=ScaleFormat(scale))
    assert not differing((codes, scales), (want.codes, want.scales))


@pytest.mark.parametrize(
    ("scale", "layout"), [("fp32", "row"), ("ue8m0", "tma"), ("ue8m0packed", "tma")]
)
def test_fusion_under_compile_gives_the_bits_of_eager_mode(scale: str, layout: str, rows: Tensor):
    f, made = model(128, scale, layout), fusion.SwigluQuantFusion()
    run = compiled(f, made)
    assert not differing(run(rows), f(rows))
    assert (made.fused, made.left) == (1, [])
    with virtual_gpu.record() as tape:
        run(rows)
    assert len(tape.launches) == 1


def test_fusion_runs_in_inductor(rows: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As its pass after the gradients; an op alone needs no compiler on a CPU.

    A graph that an earlier run left in Inductor's cache is fused already: here the cache is empty.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    f, made = model(128, "ue8m0", "col"), fusion.SwigluQuantFusion()
    torch._dynamo.reset()
    run = torch.compile(f, options={"post_grad_custom_post_pass": made})
    got = run(rows)
    assert made.fused == 1
    assert not differing(got, f(rows))


def test_inductor_knows_the_fusion_by_what_it_is():
    """Its cache would give back graphs of another pass otherwise."""
    one, other = fusion.SwigluQuantFusion(), fusion.SwigluQuantFusion()
    assert one.uuid() == other.uuid()
    assert isinstance(one.uuid(), bytes)


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
def test_fusion_in_a_cuda_graph_gives_the_bits_of_eager_mode(scale: str, parity_gpu: str):
    """Captured once, replayed on other rows; Inductor's graph beside ours."""
    f, made = model(128, scale, "tma"), fusion.SwigluQuantFusion()
    torch._dynamo.reset()
    first, other = (
        f32_to_bf16(random_bits.normal(seed, "rows", 33, 2 * WIDTH, device=parity_gpu))
        for seed in (1, 2)
    )
    for run in (
        compiled(f, made),
        torch.compile(f, options={"post_grad_custom_post_pass": made}),
    ):
        held = first.clone()
        run(held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(held)
        for given in (other, first):
            held.copy_(given)
            graph.replay()
            torch.cuda.synchronize()
            assert not differing(out, f(given))
    assert made.fused == 2


def two_layers(rows: Tensor) -> Outputs:
    left = QUANT(SWIGLU(rows, *PLAIN), 128, "fp32", "col")
    right = QUANT(SWIGLU(rows + 1, *CLAMPED), 64, "ue8m0", "row")
    return (*both(left), *both(right))


def swapped_before(rows: Tensor) -> Outputs:
    up_first = torch.cat((rows[:, WIDTH:], rows[:, :WIDTH]), 1)
    return QUANT(SWIGLU(up_first, *PLAIN), 128, "fp32", "row")


def by_name(rows: Tensor) -> Outputs:
    y = SWIGLU(
        rows, ids=None, first=0, experts=1, clamp="after", limit=2.0, limits=None, alpha=1.0,
        beta=0.25,
    )  # fmt: skip
    return QUANT(x=y, layout="tma", scale="ue8m0", group=64)


def as_packets(rows: Tensor) -> Outputs:
    """As a user writes it, and as it stands in Dynamo's graph."""
    ours = torch.ops.moe_parity
    return ours.act_quant(ours.swiglu(rows, *PLAIN), 128, "ue8m0", "row")


@pytest.mark.parametrize(
    ("f", "count"), [(two_layers, 2), (swapped_before, 1), (by_name, 1), (as_packets, 1)]
)
def test_fusion_keeps_each_layers_options_apart(f: Model, count: int, rows: Tensor):
    module = traced(f)
    made = fusion.SwigluQuantFusion()
    made(module.graph)
    module.recompile()
    assert (made.fused, calls(module)) == (count, ["swiglu_quant"] * count)
    assert not differing(module(rows), f(rows))


def test_fusion_reads_rows_that_are_written_afterwards_before(rows: Tensor):
    """The fused op stands where SwiGLU stood: what changes in between changes nothing."""

    def f(rows: Tensor) -> Outputs:
        y = SWIGLU(rows, *PLAIN)
        rows.mul_(3)
        return QUANT(y, 128, "fp32", "row")

    module = fusion.fuse(traced(f))
    assert calls(module) == ["swiglu_quant"]
    want = f(rows.clone())
    assert not differing(module(rows.clone()), want)
    assert not differing(compiled(f, fusion.SwigluQuantFusion())(rows.clone()), want)


# --- what is not ----------------------------------------------------------------------------------


def used_twice(rows: Tensor) -> Outputs:
    """LoRA adds to the BF16 activation."""
    y = SWIGLU(rows, *PLAIN)
    return (*both(QUANT(y, 128, "fp32", "row")), y)


def quantized_twice(rows: Tensor) -> Outputs:
    y = SWIGLU(rows, *PLAIN)
    return (*both(QUANT(y, 128, "fp32", "row")), *both(QUANT(y, 64, "ue8m0", "row")))


def rows_of_other_ranks(rows: Tensor) -> Outputs:
    ids = torch.zeros(5, dtype=torch.int32, device=rows.device)
    return QUANT(SWIGLU(rows, ids, *PLAIN[1:]), 128, "fp32", "row")


def changed_in_place(rows: Tensor) -> Outputs:
    y = SWIGLU(rows, *PLAIN)
    y.mul_(0.75)
    return QUANT(y, 128, "fp32", "row")


def changed_through_a_view(rows: Tensor) -> Outputs:
    y = SWIGLU(rows, *PLAIN)
    y[1:].mul_(0.75)
    return QUANT(y, 128, "fp32", "row")


def clamped_between(rows: Tensor) -> Outputs:
    return QUANT(SWIGLU(rows, *PLAIN).clamp(-1.0, 1.0), 128, "fp32", "row")


def cast_between(rows: Tensor) -> Outputs:
    return QUANT(SWIGLU(rows, *PLAIN).half(), 128, "fp32", "row")


def half_a_row(rows: Tensor) -> Outputs:
    return QUANT(SWIGLU(rows, *PLAIN)[:, :128], 128, "fp32", "row")


def another_tensor(rows: Tensor) -> Outputs:
    y = SWIGLU(rows, *PLAIN)
    return (*both(QUANT(rows[:, :WIDTH], 128, "fp32", "row")), y)


def into_outputs(rows: Tensor) -> Outputs:
    y = SWIGLU(rows, *PLAIN)
    codes = torch.zeros(5, WIDTH, dtype=torch.uint8, device=rows.device)
    scales = torch.zeros(5, 2, device=rows.device)
    QUANT_OUT(y, codes, scales, 128, False)
    return codes, scales


def silu_and_mul(rows: Tensor) -> Outputs:
    """With shapes it is fused: ``test_torch_product``."""
    y = torch.nn.functional.silu(rows[:, :WIDTH]) * rows[:, WIDTH:]
    return QUANT(y, 128, "fp32", "row")


SAID = {
    used_twice: ["the BF16 activation is used elsewhere too."],
    quantized_twice: ["the BF16 activation is used elsewhere too."] * 2,
    rows_of_other_ranks: [
        "rows of other ranks would be quantized by one and left alone by the other."
    ],
    changed_through_a_view: ["the BF16 activation is used elsewhere too."],
    changed_in_place: ["the BF16 activation is used elsewhere too."],
    silu_and_mul: ["the graph does not say which shapes its tensors have."],
}
"""What is said of SwiGLUs that are quantized as they are and yet not fused, in Dynamo's graph."""


@pytest.mark.parametrize(
    "f",
    [
        used_twice, quantized_twice, rows_of_other_ranks, changed_in_place, changed_through_a_view,
        clamped_between, cast_between, half_a_row, another_tensor, into_outputs, silu_and_mul,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_fusion_leaves_a_graph_alone(f: Model, rows: Tensor):
    """The same ops as before, the same bits, and where it is a near miss a reason."""
    module = traced(f)
    before, made = calls(module), fusion.SwigluQuantFusion()
    made(module.graph)
    module.recompile()
    assert (made.fused, calls(module)) == (0, before)
    assert [reason.split("is not fused: ")[1] for reason in made.left] == SAID.get(f, [])
    assert not differing(module(rows), f(rows))


@pytest.mark.parametrize("f", [used_twice, changed_in_place, changed_through_a_view, into_outputs])
def test_fusion_leaves_a_functional_graph_alone(f: Model, rows: Tensor):
    """Where in-place changes have become values of their own."""
    made = fusion.SwigluQuantFusion()
    assert not differing(compiled(f, made)(rows), f(rows))
    assert made.fused == 0


# --- planted faults -------------------------------------------------------------------------------


def dropping(graph: fx.Graph, name: str, default: Any, *, cpu: bool = False) -> None:
    """Fuse, and do not hand on one of the options."""
    fusion.SwigluQuantFusion(cpu=cpu)(graph)
    for node in graph.find_nodes(op="call_function", target=fusion.FUSED):
        at = [argument.name for argument in fusion.FUSED._schema.arguments].index(name)
        node.args = (*node.args[:at], default, *node.args[at + 1 :])


@pytest.mark.parametrize(
    ("name", "default"),
    [("scale", "fp32"), ("layout", "row"), ("group", 128), ("clamp", "none"), ("beta", 0.0)],
)
def test_a_fusion_that_drops_an_option_is_red(name: str, default: Any, rows: Tensor):
    """Format, layout, group, clamp, beta: each shows in bits or in how scales lie."""
    f = model(64, "ue8m0", "col", CLAMPED)
    module = traced(f)
    dropping(module.graph, name, default)
    module.recompile()
    assert differing(module(rows), f(rows))


def test_a_fusion_that_stands_where_the_quantizer_stood_is_red(
    rows: Tensor, monkeypatch: pytest.MonkeyPatch
):
    """It would read rows that were written in between."""

    def f(rows: Tensor) -> Outputs:
        y = SWIGLU(rows, *PLAIN)
        rows.mul_(3)
        return QUANT(y, 128, "fp32", "row")

    module = fusion.fuse(traced(f))
    (one,) = module.graph.find_nodes(op="call_function", target=fusion.FUSED)
    (scaled,) = module.graph.find_nodes(op="call_method", target="mul_")
    scaled.append(one)
    module.recompile()
    assert differing(module(rows.clone()), f(rows.clone()))
