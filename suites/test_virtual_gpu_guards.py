"""What the virtual GPU guards: it refuses what it cannot model, and no access leaves its tensor.

Programs may run in any order, a tape replays what a graph would, and Triton is left as it was.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton, which exists for Linux only")
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from moe_parity.kernels import virtual_gpu as vg
from moe_parity.references.arithmetic.rounding import fma_rn


@triton.jit
def refused(x_ptr, o_ptr, OP: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 64))
    if OP == "sqrt":
        r = tl.sqrt(x)
    elif OP == "rsqrt":
        r = tl.rsqrt(x)
    elif OP == "log":
        r = tl.log(x)
    elif OP == "erf":
        r = tl.erf(x)
    elif OP == "sin":
        r = tl.sin(x)
    elif OP == "frem":
        r = x % 3.0
    elif OP == "tanh":
        r = libdevice.tanh(x)
    elif OP == "inline assembly":
        r = tl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    elif OP == "rounded toward zero":
        r = x.to(tl.bfloat16, fp_downcast_rounding="rtz").to(tl.float32)
    elif OP == "constants":
        r = x + tl.full((64,), 1.0, tl.float32) / 3.0
    elif OP == "tl.sum":
        r = x + tl.sum(x, axis=0)
    elif OP == "scan":
        r = tl.cumsum(x, axis=0)
    elif OP == "tl.atomic_fadd":
        r = tl.atomic_add(o_ptr + tl.arange(0, 64), x)
    elif OP == "can_reorder":
        r = tl.reshape(tl.reshape(x, (8, 8), can_reorder=True), (64,))
    elif OP == "float64":
        r = x.to(tl.float64).to(tl.float32)
    else:
        tl.static_assert(OP == "argmax")
        r = x + tl.argmax(x, axis=0)
    tl.store(o_ptr + tl.arange(0, 64), r)


@triton.jit
def shifted_copy(x_ptr, o_ptr, n, load_shift, store_shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i + load_shift, mask=i < n, other=7)
    tl.store(o_ptr + i + store_shift, x, mask=i < n)


@triton.jit
def last(o_ptr):
    tl.atomic_xchg(o_ptr, tl.program_id(0))


@triton.jit
def count(ids_ptr, counts_ptr, slots_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + i)
    tl.store(slots_ptr + i, tl.atomic_add(counts_ptr + ids, 1))


@triton.jit
def scaled_add(x_ptr, o_ptr, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(o_ptr + i) + tl.load(x_ptr + i) * scale)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        "sqrt", "rsqrt", "log", "erf", "sin", "frem", "tanh", "inline assembly",
        "rounded toward zero", "constants", "tl.sum", "scan", "tl.atomic_fadd", "can_reorder",
    ],
    ids=lambda op: op.replace(" ", "-"),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*can_reorder")
def test_an_operation_without_a_model_raises_and_names_itself(op: str) -> None:
    x, o = torch.ones(64), torch.zeros(64)
    with pytest.raises(vg.UnmodelledOperation) as error:
        vg.launch(refused, (1,), x, o, OP=op)
    message = str(error.value)
    assert op in message
    assert message.startswith("refused (line ")
    assert "program (0, 0, 0)" in message
    assert (o == 0).all()


def test_float64_has_no_model() -> None:
    with pytest.raises(vg.UnmodelledOperation, match="cast of fp32 compiles to `cvt"):
        vg.launch(refused, (1,), torch.ones(64), torch.zeros(64), OP="float64")


def test_an_argmax_is_refused_only_where_a_nan_makes_it_ambiguous() -> None:
    x, o = torch.arange(64.0), torch.zeros(64)
    vg.launch(refused, (1,), x, o, OP="argmax")
    assert (o == x + 63).all()
    x[3] = torch.nan
    with pytest.raises(vg.UnmodelledOperation, match="NaN"):
        vg.launch(refused, (1,), x, o, OP="argmax")


def test_the_absence_of_contraction_is_read_from_the_ptx() -> None:
    x, o = torch.ones(256), torch.zeros(256)
    vg.launch(scaled_add, (1,), x, o, 0.5, BLOCK=256, enable_fp_fusion=True)
    assert (o == 0.5).all()
    assert not any("fma" in op for op in vg.opcodes(scaled_add, x, o, 0.5, BLOCK=256))
    fused = vg.opcodes(scaled_add, x, o, 0.5, BLOCK=256, enable_fp_fusion=True)
    assert any("fma" in op for op in fused)


def test_arguments_that_are_no_kernel_or_no_value_are_refused() -> None:
    with pytest.raises(TypeError, match=r"launch takes a @triton\.jit function, got function"):
        vg.launch(test_float64_has_no_model, (1,))
    with pytest.raises(TypeError, match="argument o_ptr is a str"):
        vg.launch(last, (1,), "tensor")
    with pytest.raises(ValueError, match="a grid is one to three sizes"):
        vg.launch(last, (1, 1, 1, 1), torch.zeros(1, dtype=torch.int32))


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "store", "message"),
    [
        (
            1,
            0,
            r"a load of 4 bytes .* lane \[99\] is 0 bytes past the end of x_ptr \(int32 \[100\]\)",
        ),
        (-2, 0, r"program \(0, 0, 0\): a load .* lane \[0\] is 8 bytes before the start of x_ptr"),
        (0, 9, r"a store of 4 bytes .* lane \[91\] is 0 bytes past the end of o_ptr"),
    ],
    ids=["load-past-end", "load-before-start", "store-past-end"],
)
def test_an_access_outside_its_tensor_is_named(load: int, store: int, message: str) -> None:
    # Neighbours in one allocation: running off the end of x lands in o.
    pool = torch.zeros(400, dtype=torch.int32)
    x, o = pool[100:200], pool[200:300]
    with pytest.raises(vg.OutOfBounds, match=message):
        vg.launch(shifted_copy, (1,), x, o, 100, load, store, BLOCK=128)
    assert (pool == 0).all()


def test_lanes_that_are_masked_off_may_point_anywhere() -> None:
    x, o = torch.arange(100, dtype=torch.int32), torch.full((100,), -1, dtype=torch.int32)
    report = vg.launch(shifted_copy, (2,), x, o, 100, 0, 0, BLOCK=64)
    assert torch.equal(o, x)
    assert report.bytes_loaded == report.bytes_stored == 400
    vg.launch(shifted_copy, (1,), x, o, 0, 10**6, 10**6, BLOCK=64)


def test_a_strided_view_covers_its_extent() -> None:
    pool = torch.arange(64, dtype=torch.int32)
    o = torch.zeros(15, dtype=torch.int32)
    vg.launch(shifted_copy, (1,), pool[::2][:8], o, 15, 0, 0, BLOCK=16)
    assert torch.equal(o, pool[:15])
    with pytest.raises(vg.OutOfBounds):
        vg.launch(
            shifted_copy,
            (1,),
            pool[::2][:8],
            torch.zeros(16, dtype=torch.int32),
            16,
            0,
            0,
            BLOCK=16,
        )


# --- order, replay, state ------------------------------------------------------------------------


def test_order_shows_in_the_last_exchange_and_nowhere_else() -> None:
    x = torch.arange(1024, dtype=torch.int32)
    results = []
    for seed in (None, 1, 2):
        o, winner = torch.zeros_like(x), torch.zeros(1, dtype=torch.int32)
        vg.launch(shifted_copy, (16,), x, o, 1024, 0, 0, BLOCK=64, order_seed=seed)
        vg.launch(last, (16,), winner, order_seed=seed)
        assert torch.equal(o, x)
        results.append(winner.item())
    assert results[0] == 15
    assert len(set(results)) > 1


def test_an_atomic_counts_in_every_order_but_hands_out_other_slots() -> None:
    ids = (torch.arange(64) % 3).int()
    seen = []
    for seed in (None, 5):
        counts, slots = torch.zeros(3, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        vg.launch(count, (2,), ids, counts, slots, BLOCK=32, order_seed=seed)
        assert counts.tolist() == [22, 21, 21]
        for expert in range(3):
            assert sorted(slots[ids == expert].tolist()) == list(range(counts[expert]))
        seen.append(slots.tolist())
    assert seen[0] != seen[1]


def test_a_tape_replays_frozen_scalars_on_changed_tensors() -> None:
    x, o = torch.ones(64), torch.zeros(64)
    scale = 2.0
    with vg.record() as tape:
        vg.dispatch(scaled_add, lambda meta: (64 // meta["BLOCK"],), x, o, scale, BLOCK=32)
        vg.dispatch(scaled_add, (1,), x, o, scale / 2, BLOCK=64)
    assert [item.grid for item in tape.launches] == [(2,), (1,)]
    assert tape.reports[0] is not None
    assert tape.reports[0].programs == 2
    assert (o == 3).all()
    scale = 100.0
    x.fill_(10)
    tape.replay()
    assert (o == 33).all()
    assert len(tape.launches) == 2


def test_shuffled_changes_the_order_of_dispatched_launches() -> None:
    winner = torch.zeros(1, dtype=torch.int32)
    seen = set()
    for seed in range(4):
        with vg.shuffled(seed):
            vg.dispatch(last, (16,), winner)
            seen.add(winner.item())
    assert len(seen) > 1


def test_triton_is_as_before_after_a_launch_that_failed() -> None:
    before = {
        name: getattr(tl, name) for name in ("load", "sum", "range", "reduce", "static_assert")
    }
    members = dict(vars(tl.tensor)), dict(vars(tl.dtype)), type(last).__call__
    with pytest.raises(vg.UnmodelledOperation):
        vg.launch(refused, (1,), torch.ones(64), torch.zeros(64), OP="sqrt")
    assert {name: getattr(tl, name) for name in before} == before
    assert (dict(vars(tl.tensor)), dict(vars(tl.dtype)), type(last).__call__) == members
    assert "_virtual_gpu" not in globals()
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        last(1.0)
    assert "atom.global" in vg.ptx(last, torch.zeros(1, dtype=torch.int32))


@triton.jit
def contracted(x_ptr, o_ptr, OP: tl.constexpr):
    i = tl.arange(0, 64)
    x = tl.load(x_ptr + i)
    r = x * x
    if OP == "two products":
        r = x * x + x * 3.0
    elif OP == "difference":
        r = x * x - x
    elif OP == "reshaped":
        r = tl.reshape(tl.reshape(x * x, (8, 8)) + 1.0, (64,))
    elif OP == "loop":
        for _n in range(2):
            r = r + x
    elif OP == "twice":
        y = x * x
        r = (y + 1.0) * (y + 2.0)
    elif OP == "chain":
        r = tl.zeros((64,), tl.float32)
        for n in range(3):
            r += x * (x + n) * 0.7
    tl.store(o_ptr + i, r)


@pytest.mark.parametrize("op", ["two products", "difference", "reshaped", "loop"])
def test_uncertain_contractions_raise(op: str):
    x = torch.randn(64)
    with pytest.raises(vg.UnmodelledOperation, match="product"):
        vg.launch(contracted, (1,), x, torch.empty(64), OP=op, enable_fp_fusion=True)
    vg.launch(contracted, (1,), x, torch.empty(64), OP=op)


@pytest.mark.parametrize(("op", "count"), [("twice", 2), ("chain", 3)])
def test_contractions_are_those_of_the_compiled_kernel(op: str, count: int):
    """A product used twice is contracted twice; in a loop, once an iteration."""
    x = torch.randn(64)
    out, apart = torch.empty(64), torch.empty(64)
    vg.launch(contracted, (1,), x, out, OP=op, enable_fp_fusion=True)
    vg.launch(contracted, (1,), x, apart, OP=op)
    if op == "twice":
        want = fma_rn(x, x, torch.ones(64)) * fma_rn(x, x, torch.full((64,), 2.0))
    else:
        want = torch.zeros(64)
        for n in range(3):
            want = fma_rn(x * (x + n), torch.full((64,), 0.7), want)
    assert torch.equal(out, want)
    assert not torch.equal(out, apart)
    found = vg.opcodes(contracted, x, out, OP=op, enable_fp_fusion=True)
    # 64 elements on 128 threads: an operation is one instruction, loops are unrolled or not.
    assert found.get("fma.rn.f32", 0) in (count, 1)
    assert "fma.rn.f32" not in vg.opcodes(contracted, x, out, OP=op)
