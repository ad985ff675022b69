"""Our custom ops as torch sees them: torch's own checks, their schemas, what their fakes refuse."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout, f32_to_bf16
from moe_parity.references.errors import ParityError

ops = pytest.importorskip("moe_parity.kernels.ours.ops", reason="needs Triton")
activation = pytest.importorskip("moe_parity.kernels.ours.activation", reason="needs Triton")
moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")

BF16 = torch.bfloat16
ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

Call = tuple[Any, ...]


def real(name: str, *shape: int) -> Tensor:
    flat = random_bits.normal(3, name, math.prod(shape[:-1]), shape[-1])
    return flat.view(shape)


def bf16(name: str, *shape: int) -> Tensor:
    return f32_to_bf16(real(name, *shape))


def codes(name: str, *shape: int) -> Tensor:
    flat = random_bits.integers(3, name, math.prod(shape[:-1]), shape[-1], below=0x50)
    return flat.to(torch.uint8).view(shape)


def scales(name: str, *shape: int) -> Tensor:
    return real(name, *shape).abs() + 0.5


def bytes_of(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


IDS = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
"""Every expert has one pair, so that no block is left unwritten."""

PLAIN = ("none", 0.0, None, 1.0, 0.0)
CLAMPED = ("before", 0.75, None, 1.25, 0.5)


def gemm() -> tuple[Any, ...]:
    slots, block_expert = torch.ops.moe_parity.align(IDS, 0, 4, 16)
    return (
        codes("a", 2, 128), scales("as", 2, 1), codes("w", 4, 64, 128), scales("ws", 4, 1, 1),
        slots, block_expert, 16, 4, 2,
    )  # fmt: skip


def layer(first: int = 0) -> tuple[Any, ...]:
    """Return what ``moe`` is given, up to the experts' first id."""
    return (
        bf16("x", 2, 128), IDS, scales("weights", 2, 2),
        codes("w13", 4, 256, 128), scales("s13", 4, 2, 1), codes("w2", 4, 128, 128),
        scales("s2", 4, 1, 1), real("b13", 4, 256), real("b2", 4, 128), first,
    )  # fmt: skip


def rows() -> Tensor:
    return bf16("rows", 4, 256)


CALLS: dict[str, Callable[[], list[Call]]] = {
    "act_quant": lambda: [
        (bf16("x", count, 128), 64, scale, layout)
        for count in (3, 0, 1) for scale in ScaleFormat for layout in ScaleLayout
    ],
    "act_quant_out": lambda: [
        (bf16("x", 3, 128), bytes_of(3, 128), torch.zeros(3, 1), 128, True),
        (bf16("x", 3, 128), bytes_of(3, 128), torch.zeros(3, 1).int(), 128, True),
        (bf16("x", 3, 128), bytes_of(3, 128), torch.zeros(2, 3).t(), 64, False),
    ],
    "weight_quant": lambda: [(bf16("w", 3, 130), False), (real("w", 3, 130).t(), True)],
    "weight_quant_out": lambda: [
        (bf16("w", 3, 130), bytes_of(3, 130), torch.zeros(1, 2), True),
        (real("w", 3, 130), bytes_of(3, 140)[:, :130], torch.zeros(2, 1).t(), False),
    ],
    "requantize_weight": lambda: [(codes("old", 3, 140)[:, :130], scales("olds", 1, 2))],
    "align": lambda: [(IDS, 0, 4, 16), (IDS.long(), 0, 4, 32), (IDS[:0], 0, 4, 16)],
    "grouped_gemm": lambda: [(*gemm(), None), (*gemm(), real("bias", 4, 64))],
    "grouped_gemm_out": lambda: [(*gemm(), None, torch.zeros(4, 64, dtype=BF16))],
    "linear_out": lambda: [
        (codes("a", 3, 256), scales("as", 3, 2), codes("w", 8, 256), scales("ws", 1, 2), bias,
         torch.zeros(3, 8, dtype=BF16))
        for bias in (None, real("bias", 1, 8)[0])
    ],
    "swiglu": lambda: [
        (rows(), None, 0, 1, *PLAIN), (rows(), IDS, 0, 4, *CLAMPED),
        (rows(), IDS, 0, 4, *PLAIN, "torch"),
        (rows(), IDS.flatten(), 0, 4, "after", 0.0, scales("limits", 4), 1.0, 0.0),
    ],
    "swiglu_quant": lambda: [
        *((rows(), None, 0, 1, *PLAIN, group, scale, layout)
          for group in (64, 128) for scale in ScaleFormat for layout in ScaleLayout),
        *((rows()[:count], None, 0, 1, *PLAIN, 64, scale, layout) for count in (0, 1)
          for scale in ScaleFormat for layout in ScaleLayout),
        (rows(), IDS, 0, 4, *CLAMPED, 128, "ue8m0", "row"),
        (rows(), IDS, 0, 4, *PLAIN, 64, "ue8m0", "tma", "torch"),
        (rows(), IDS, 0, 4, "after", 0.0, scales("limits", 4), 1.0, 0.0, 128, "fp32", "row"),
    ],
    "swiglu_quant_out": lambda: [
        (rows(), None, 0, 1, *PLAIN, 128, "ue8m0", "row", bytes_of(4, 128), torch.zeros(4, 1)),
        (rows(), IDS, 0, 4, *CLAMPED, 64, "fp32", "col", bytes_of(4, 128), torch.zeros(2, 4).t()),
    ],
    "combine": lambda: [
        (bf16("rows", 4, 128), None, IDS, 0, 4, BF16),
        (bf16("rows", 2, 2, 128), scales("w", 2, 2), IDS, 0, 4, torch.float32),
    ],
    "combine_out": lambda: [
        (bf16("rows", 4, 128), None, IDS, 0, 4, torch.zeros(2, 140, dtype=BF16)[:, :128]),
    ],
    "moe": lambda: [
        (*layer(), None, 0.75, None, "after", 1.25, 0.5, True, False, None, torch.float16),
        (bf16("x", 2, 128), *layer()[1:7], None, None, 0, None, None, scales("l", 4), "before",
         1.0, 0.0, False, None, "large", BF16),
        (codes("x", 2, 128), *layer()[1:10], scales("xs", 2, 1), None, None, "before", 1.0, 0.0,
         False, None, None, BF16),
    ],
    "moe_out": lambda: [
        (*layer(), None, None, None, "before", 1.0, 0.0, False, None, None,
         torch.zeros(2, 140, dtype=BF16)[:, :128]),
    ],
}  # fmt: skip
"""Calls of every op; an op that is missing here turns the next test red."""


def registered() -> set[str]:
    """Return the ops that torch knows in our namespace."""
    every = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1] for name in every if name.startswith(f"{ops.NAMESPACE}::")}


def overload(name: str) -> torch._ops.OpOverload:
    found: torch._ops.OpOverload = getattr(torch.ops.moe_parity, name).default
    return found


def test_every_op_is_in_the_list_and_is_called_here():
    """What torch knows, what the docs list and what is checked below are the same ops."""
    names = [op.name for op in ops.OPS]
    assert sorted(names) == sorted(registered()) == sorted(CALLS)


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.name)
def test_torch_finds_schema_fake_and_traced_calls_right(op):
    """All four checks of torch: the arguments that change, autograd, the fake, a compiled call.

    They take a second for each call: the first two, all others below.
    """
    for args in CALLS[op.name]()[:2]:
        assert torch.library.opcheck(overload(op.name), args, test_utils=ALL) == dict.fromkeys(
            ALL, "SUCCESS"
        )


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.name)
def test_an_op_says_which_arguments_it_changes(op):
    arguments = overload(op.name)._schema.arguments
    written = tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write)
    assert written == op.changes
    assert bool(written) == op.name.endswith("_out")


def outline(made: Any) -> list[tuple[Any, ...]]:
    made = [made] if isinstance(made, Tensor) else made or []
    return [(tuple(t.shape), t.stride(), t.dtype) for t in made]


def fakes(mode: FakeTensorMode, args: Call) -> Call:
    return tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)


@pytest.mark.parametrize("name", CALLS)
def test_a_fake_has_the_strides_of_the_real_one(name: str):
    """Opcheck compares strides only where a dimension has more than one element."""
    for args in CALLS[name]():
        with FakeTensorMode() as mode:
            made = overload(name)(*fakes(mode, args))
        assert outline(made) == outline(overload(name)(*args))


def other(value: Any) -> Iterator[Any]:
    """Yield an argument's relatives that no op can take in its place."""
    if isinstance(value, Tensor):
        yield value.double()
        yield value[None]
        yield value.to("meta") if value.device.type == "cpu" else value
    elif isinstance(value, str):
        yield "sideways"


@pytest.mark.parametrize("name", CALLS)
def test_what_the_real_op_refuses_its_fake_refuses_too(name: str):
    """Each tensor in turn with another type, rank and device, each word with an unknown one."""
    args = CALLS[name]()[0]
    refused = 0
    for at, value in enumerate(args):
        for wrong in other(value):
            call = (*args[:at], wrong, *args[at + 1 :])
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = sentence(name, fakes(mode, call))
            on_meta = isinstance(wrong, Tensor) and wrong.device.type == "meta"
            assert fake is not None or (on_meta and at == 0), (name, at, wrong)
            if not on_meta:
                assert sentence(name, call) == fake
            refused += 1
    assert refused


def sentence(name: str, args: Call) -> str | None:
    """Return what an op says as it refuses a call, None where it takes it."""
    try:
        overload(name)(*args)
    except ParityError as error:
        return str(error)
    return None


SHARED = {
    "grouped_gemm_out": ("grouped_gemm: a and out share memory", 0),
    "swiglu_quant_out": ("swiglu_quant: rows and codes share memory", 0),
    "combine_out": ("combine: rows and out share memory", 0),
    "moe_out": ("moe: x and out share memory", 0),
}


@pytest.mark.parametrize("name", SHARED)
def test_an_output_lies_in_memory_of_its_own(name: str):
    """Programs run in any order: one would read what another has overwritten."""
    words, at = SHARED[name]
    op, args = overload(name), list(CALLS[name]()[0])
    last = op._schema.arguments[-1].name
    out = len(args) - (1 if last == "out" else 2)
    source = args[at].reshape(-1).view(torch.uint8)
    needed = args[out].numel() * args[out].element_size()
    memory = torch.zeros(max(needed, source.numel()), dtype=torch.uint8)
    memory[: source.numel()] = source
    args[at] = memory[: source.numel()].view(args[at].dtype).view(args[at].shape)
    args[out] = memory[:needed].view(args[out].dtype).view(args[out].shape)
    with pytest.raises(ParityError, match=f"^{re.escape(words)}; give "):
        op(*args)


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("swiglu", lambda: (bf16("r", 2, 255), None, 0, 1, *PLAIN), "rows must have 2 * I col"),
        ("swiglu", lambda: (rows().t(), None, 0, 1, *PLAIN), "rows must be contiguous, strides"),
        ("swiglu", lambda: (rows(), IDS[0], 0, 4, *PLAIN), "ids must name 4 experts, a row each"),
        ("swiglu", lambda: (rows(), None, 0, 1, "before", 0.0, None, 1.0, 0.0), "limit must be p"),
        (
            "swiglu",
            lambda: (rows(), None, 0, 1, "after", 0.0, scales("l", 1), 1.0, 0.0),
            "limits of experts need ids and a clamp",
        ),
        ("swiglu", lambda: (rows(), IDS, -1, 4, *PLAIN), "first must be a global expert id"),
        (
            "swiglu_quant",
            lambda: (rows(), None, 0, 1, *PLAIN, 32, "fp32", "row"),
            "group must be 64 or 128, got 32",
        ),
        (
            "swiglu_quant",
            lambda: (bf16("r", 2, 384), None, 0, 1, *PLAIN, 128, "fp32", "row"),
            "I = 192 is not a multiple of group 128",
        ),
        (
            "swiglu_quant_out",
            lambda: (rows(), None, 0, 1, *PLAIN, 64, "fp32", "row", bytes_of(4, 128),
                     torch.zeros(2, 4).t()),
            "scales in layout 'row' have strides (2, 1), got (1, 4)",
        ),
        ("align", lambda: (IDS, 0, 4, 24), "block must be a power of two, got 24"),
        ("align", lambda: (IDS, 0, 0, 16), "first must be a global expert id and experts pos"),
        ("grouped_gemm", lambda: (*gemm()[:7], 9, 2, None), "9 pairs read 5 rows of a, got 2"),
        ("grouped_gemm", lambda: (*gemm()[:8], 0, None), "shared must be positive and block one"),
        ("combine_out", lambda: (bf16("rows", 4, 128), None, IDS, 0, 4,
                                 torch.zeros(128, 2, dtype=BF16).t()),
         "rows of out must be contiguous, strides (1, 2)"),
        ("combine", lambda: (bf16("rows", 4, 128), None, IDS, 0, 4, torch.float64),
         "the output is bf16, fp16 or fp32, not torch.float64"),
    ],
)  # fmt: skip
def test_what_is_refused_is_said(name: str, args: Callable[[], Call], words: str):
    """By the op and by its fake, in the same words."""
    said = name.removesuffix("_out")
    call = args()
    with pytest.raises(ParityError, match=f"^{said}: {re.escape(words)}"):
        overload(name)(*call)
    with (
        FakeTensorMode() as mode,
        pytest.raises(ParityError, match=f"^{said}: {re.escape(words)}"),
    ):
        overload(name)(*fakes(mode, call))


def test_limit_and_limits_are_one_or_the_other():
    args = (*layer(), None, 1.0, scales("l", 4), "before", 1.0, 0.0, False, None, None, BF16)
    with pytest.raises(ParityError, match=r"^moe: give limit or limits, not both\.$"):
        torch.ops.moe_parity.moe(*args)


def test_the_layer_compiles_once_for_both_paths():
    """32 and 33 tokens take different paths; the graph has one op for both."""
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    given = layer()
    rest = (None, None, None, "before", 1.0, 0.0, False, None, None, BF16)

    @torch.compile(backend=backend, dynamic=True, fullgraph=True)
    def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        made: Tensor = torch.ops.moe_parity.moe(x, ids, weights, *given[3:7], None, None, 0, *rest)
        return made * 2

    for tokens in (3, 32, 33):
        x, ids = bf16("x", tokens, 128), IDS[:1].expand(tokens, 2).contiguous()
        weights = scales("w", tokens, 2)
        experts = moe.Experts(w13=given[3], w13_scale=given[4], w2=given[5], w2_scale=given[6])
        want = moe.run_moe(x, ids, weights, experts, power_of_two=False)
        assert torch.equal(model(x, ids, weights), want * 2)
    assert len(graphs) == 1


@pytest.mark.parametrize("mid", [None, False, True])
@pytest.mark.parametrize("first", [False, True])
def test_the_layer_hands_on_every_option(first: bool, mid: bool | None):
    """Limits, biases, alpha and beta, and all pairs of formats, as ``run_moe`` takes them."""
    x, ids, weights, w13, s13, w2, s2, b13, b2, start = layer()
    experts = moe.Experts(
        w13=w13, w13_scale=s13, w2=w2, w2_scale=s2, bias13=b13, bias2=b2, first=start
    )
    want = moe.run_moe(
        x, ids, weights, experts, limit=0.75, clamp="after", alpha=1.25, beta=0.5,
        power_of_two=first, mid_power_of_two=mid, out_dtype=torch.float32,
    )  # fmt: skip
    options = (None, 0.75, None, "after", 1.25, 0.5, first, mid, None)
    assert torch.equal(torch.ops.moe_parity.moe(*layer(), *options, torch.float32), want)
    out = torch.zeros(2, 128)
    torch.ops.moe_parity.moe_out(*layer(), *options, out)
    assert torch.equal(out, want)
    other = moe.run_moe(
        x, ids, weights, experts, limit=0.75, clamp="after", alpha=1.25, beta=0.5,
        power_of_two=first, mid_power_of_two=not (first if mid is None else mid),
        out_dtype=torch.float32,
    )  # fmt: skip
    assert not torch.equal(other, want)


GIVEN: dict[str, Callable[[], Call]] = {
    "grouped_gemm": lambda: (*gemm(), real("bias", 4, 64)),
    "swiglu_quant": lambda: (rows(), IDS, 0, 4, *CLAMPED, 64, "ue8m0packed", "tma"),
    "combine": lambda: (bf16("rows", 4, 128), scales("w", 2, 2), IDS, 0, 4, torch.float16),
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_output_of_the_caller_holds_what_the_op_returns(name: str):
    args = GIVEN[name]()
    made = overload(name)(*args)
    made = (made,) if isinstance(made, Tensor) else made
    outs = tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).fill_(9) for t in made)
    kept = args[:-1] if name == "combine" else args  # its last word is the type of the output
    overload(f"{name}_out")(*kept, *outs)
    assert all(torch.equal(out, t) for out, t in zip(outs, made, strict=True))
