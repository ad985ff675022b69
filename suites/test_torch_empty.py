"""What torch.empty and its kin give during a call: what torch gives, with poison and guards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.calling import own
from moe_parity.harness.calling.own import OwnMemory
from moe_parity.harness.calling.poison import GUARD, POISONS, ZEROS

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex64, torch.bool, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
)  # fmt: skip
WAYS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "empty": lambda t: torch.empty(3, 5, dtype=t),
    "channels_last": lambda t: torch.empty(2, 3, 4, 5, dtype=t, memory_format=torch.channels_last),
    "scalar": lambda t: torch.empty((), dtype=t),
    "no_byte": lambda t: torch.empty(4, 0, dtype=t),
    "empty_like": lambda t: torch.empty_like(torch.zeros(4, 3, dtype=t).t()),
    "new_empty": lambda t: torch.zeros(1, dtype=t).new_empty(2, 3),
    "empty_strided": lambda t: torch.empty_strided((3, 4), (1, 7), dtype=t),
    "new_empty_strided": lambda t: torch.zeros(1, dtype=t).new_empty_strided((3, 4), (8, 2)),
    "empty_permuted": lambda t: torch.empty_permuted((2, 3, 4), (2, 0, 1), dtype=t),
    "resize_": lambda t: torch.empty(0, dtype=t).resize_(3, 4),
    "new": lambda t: torch.zeros(1, dtype=t).new(5),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_what_torch_gives_with_poison_in_it(way: str):
    for dtype in DTYPES:
        plain = WAYS[way](dtype)
        held = []
        for poison in (*POISONS, ZEROS):
            with OwnMemory(poison) as memory:
                got = WAYS[way](dtype)
            assert (got.shape, got.stride(), got.dtype, got.device, got.requires_grad) == (
                plain.shape, plain.stride(), plain.dtype, plain.device, plain.requires_grad,
            )  # fmt: skip
            assert not got.numel() or got.data_ptr() % 64 == 0
            assert memory.taken == int(plain.numel() > 0)
            held.append(got.reshape(-1)[:1])
        if not plain.numel():
            continue
        nan, number, zero = held
        assert not bool((zero != 0).any()) or dtype is torch.float8_e8m0fnu
        if dtype is torch.bool:
            assert (bool(nan), bool(number)) == (True, False)
        elif dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            assert bool(nan.to(wide).isnan())
            assert bool(number.to(wide).isfinite())
            assert dtype.is_complex or float(number.to(wide)) > 0
        else:
            assert int(nan) in (-1, torch.iinfo(dtype).max)
            assert int(number) > torch.iinfo(dtype).max // 6  # an index that is out of range


def test_old_constructors_and_gradients():
    with OwnMemory(POISONS[0]) as memory:
        assert torch.Tensor(2).isnan().all()
        assert torch.FloatTensor(2, 3).isnan().all()
        assert torch.empty(2, requires_grad=True).requires_grad
        with torch.inference_mode():
            assert torch.empty(2).is_inference()
    assert memory.taken == 4


def test_two_allocations_hold_different_bytes():
    """So that a copy is not taken for memory that was left."""
    with OwnMemory(POISONS[1]):
        values = {int(torch.empty(1, dtype=torch.uint8)) for _ in range(5)}
    assert len(values) == 5
    assert not values & {0, *POISONS}


def test_memory_that_an_operation_of_the_kernels_takes_is_poisoned_too():
    library = torch.library.Library("parity_own", "FRAGMENT")
    library.define("take(Tensor x) -> Tensor")
    library.impl("take", torch.empty_like, "CPU")
    library.define("sized(int n) -> Tensor")
    library.impl("sized", torch.empty, "CompositeExplicitAutograd")
    with OwnMemory(POISONS[0]) as memory:
        assert torch.ops.parity_own.take(torch.ones(3)).isnan().all()
        assert torch.ops.parity_own.take(torch.ones(3, requires_grad=True)).isnan().all()
        assert torch.ops.parity_own.sized(3).isnan().all()
        assert (torch.ops.aten.cumsum(torch.ones(3), 0) == torch.tensor([1, 2, 3])).all()
    assert memory.taken == 3


def test_compiled_code_stays_compiled():
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    doubled = torch.compile(lambda x: torch.empty_like(x).copy_(x * 2), backend=backend)
    with OwnMemory(POISONS[0]):
        assert (doubled(torch.ones(3)) == 2).all()
    assert len(graphs) == 1


# --- the guards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [-GUARD, -1, 24, 24 + GUARD - 1])
def test_a_byte_beside_is_found_by_either_call(offset: int):
    for poison in POISONS:
        with OwnMemory(poison) as memory:
            scratch = torch.empty(24, dtype=torch.uint8)
            torch.empty(3)
            scratch.as_strided((1,), (1,), scratch.storage_offset() + offset).bitwise_xor_(1)
        side = "before the start" if offset < 0 else "behind the end"
        apart = -offset - 1 if offset < 0 else offset - 24
        tail = f", the first of them {apart} away" if apart else ""
        assert memory.stray() == (
            f"writes beside memory of its own: 1 byte {side} of its uint8 [24] from torch.empty"
            f"{tail}"
        )


def test_growing_is_not_beside_and_what_was_there_stays():
    with OwnMemory(POISONS[1]) as memory:
        grown = torch.empty(2, 2).fill_(1).resize_(2, 4)
        assert (grown.view(-1)[:4] == 1).all()
        assert (grown.view(-1)[4:] > 0).all()
        grown.fill_(2)
        shrunk = torch.empty(9).resize_(3).fill_(1)
        assert shrunk.resize_(9).fill_(1).shape == (9,)
        tail = torch.zeros(2).resize_(4)
        assert (tail[:2] == 0).all()
        assert (tail[2:] > 0).all()
        torch.cat([torch.ones(2000)] * 2, out=torch.empty(0)).add_(1)
    assert not memory.stray()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_output_that_torch_resizes_is_nobodys_fault():
    with OwnMemory(POISONS[1]) as memory:
        out = torch.empty(3)
        torch.add(torch.ones(40), 1, out=out)
        assert (out == 2).all()
    assert not memory.stray()


def test_what_is_let_go_is_freed_and_was_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own, "HELD", 1 << 16)
    with OwnMemory(POISONS[0]) as memory:
        hit = torch.empty(4)
        hit.as_strided((1,), (1,), hit.storage_offset() + 4).zero_()
        kept = torch.empty(4)
        del hit
        for _ in itertools.repeat(None, 40):
            torch.empty(1000)
        assert len(memory.kept) < 20
        assert kept.untyped_storage().data_ptr() in memory.kept
    assert "of its fp32 [4] from torch.empty" in memory.stray()
