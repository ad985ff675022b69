"""Stages that move rows: ``align``, ``permute``, and ``combine`` with the top-k sum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from moe_parity.harness.calling.run import on_device
from moe_parity.harness.cases import budget
from moe_parity.harness.cases.grid import params
from moe_parity.harness.checks.expect import Recorder, expect
from moe_parity.kernels import Kernel, find
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Hazard, InputDtype, Routing, Values
from moe_parity.references.stages import ALIGN, COMBINE, PERMUTE
from moe_parity.references.stages.routing import local_expert, place


def cases() -> Iterator[Case]:
    """Tokens around the tiles, every top-k that has a path of its own, ranks, odd expert counts."""
    for m, k in itertools.product((1, 17, 64, 65), (1, 2, 6, 8, 9)):
        yield Case(m=m, e=72, k=k, h=256, values=Values.AIMED)
    yield Case(m=33, e=64, k=22, h=256, values=Values.AIMED)
    yield Case(m=200, e=7, k=3, h=384, values=Values.AIMED)
    yield Case(m=50, e=8, k=4, h=256, values=Values.AIMED, ep_rank=1, ep_size=2)
    yield Case(m=130, e=256, k=8, h=256, values=Values.AIMED, ep_rank=3, ep_size=8)
    yield Case(m=40, e=8, k=4, h=256, routing=Routing.REPEATED)
    yield Case(m=40, e=8, k=4, h=256, routing=Routing.ONE)
    yield Case(m=40, e=8, k=4, h=256, routing=Routing.HOLES)


@pytest.mark.parametrize(("kernel", "case"), params((PERMUTE, COMBINE), cases()))
def test_rows(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Permutation and the top-k sum; rows of other ranks hold NaN."""
    expect(kernel, case, parity_device, parity_recorder, power=True)


def sums() -> Iterator[Case]:
    """Every output type, odd widths, input that is not contiguous."""
    for dtype in InputDtype:
        yield Case(m=24, e=8, k=8, h=256, dtype=dtype, values=Values.AIMED)
    yield from (Case(m=m, e=8, k=4, h=h, values=Values.AIMED) for m, h in ((0, 128), (5, 3584)))
    # No multiple of the block of columns, and one that no power of two divides.
    yield from (Case(m=3, e=5, k=3, h=h, values=Values.AIMED) for h in (384, 1000, 1025, 1536))
    for hazard in (Hazard.STRIDED, Hazard.TRANSPOSED):
        yield Case(m=24, e=8, k=4, h=256, values=Values.AIMED, hazard=hazard)


@pytest.mark.parametrize(("kernel", "case"), params(COMBINE, sums()))
def test_sums(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Cancelling rows far apart in k, rounded once to what is asked for."""
    expect(kernel, case, parity_device, parity_recorder, power=True)


def alignments() -> Iterator[Case]:
    """Around the 128 pairs and 64 tokens where forms and blocks change; experts of every kind."""
    for m, k, e in (
        (1, 1, 1), (1, 8, 288), (4, 8, 72), (16, 8, 256), (127, 1, 5), (128, 1, 5), (129, 1, 5),
        (43, 3, 7), (64, 2, 72), (65, 2, 72), (20, 22, 64), (33, 8, 5), (0, 2, 4),
    ):  # fmt: skip
        for routing in (Routing.UNIFORM, Routing.HOLES):
            yield Case(m=m, e=e, k=k, routing=routing)
    yield from (Case(m=m, e=8, k=8, routing=Routing.ONE) for m in (16, 40))
    yield from cases()
    yield from tiled()


def tiled() -> Iterator[Case]:
    """More than the 512 pairs and 512 experts of a tile, where counts and places carry over."""
    for m, k, e in ((512, 1, 3), (513, 1, 3), (512, 2, 5), (205, 5, 7)):
        for routing in (Routing.UNIFORM, Routing.HOLES):
            yield Case(m=m, e=e, k=k, routing=routing)
    yield Case(m=1025, e=4, k=1, routing=Routing.ONE)
    yield Case(m=64, e=8, k=17, routing=Routing.REPEATED, ep_rank=1, ep_size=2)
    yield Case(m=9, e=1025, k=8)


@pytest.mark.parametrize(("kernel", "case"), params(ALIGN, alignments()))
def test_alignment(kernel: Kernel, case: Case, parity_device: str, parity_recorder: Recorder):
    """Every owned pair once, in a block of its expert, in order; the rest is dropped."""
    expect(kernel, case, parity_device, parity_recorder)


@pytest.mark.parametrize("case", list(tiled()), ids=lambda case: case.id)
@pytest.mark.parametrize("name", ["ours_align", "ours_align_large"])
def test_what_takes_several_tiles_runs_on_a_cpu(name: str, case: Case):
    """A case over the budget would be skipped where there is no GPU, and nobody would see it."""
    assert budget.skip_of(find(name), case, "cpu") is None


@pytest.mark.parametrize("experts", [1, 511, 512, 513, 1024, 1025])
def test_first_blocks_carry_over_from_tile_to_tile(experts: int, parity_device: str):
    """Against a running sum of the blocks; more than a tile of spare blocks behind the last one."""
    kernels = pytest.importorskip("moe_parity.kernels.ours.align_kernels", reason="needs Triton")
    virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")
    counts = random_bits.integers(2, "counts", 1, experts, below=50, device=parity_device)[0].int()
    used = (counts + 15) // 16
    total = int(used.sum())
    starts, owners = torch.full_like(counts, -7), torch.full((total + 700,), 99).to(counts)
    virtual_gpu.dispatch(
        kernels.prefix_kernel, (1,), counts, starts, owners, experts, total + 600, BLOCK=16,
        TILE=512, num_warps=4,
    )  # fmt: skip
    assert torch.equal(starts.long(), used.cumsum(0) - used)
    assert bool((owners[:total] == 99).all())
    assert bool((owners[total : total + 600] == -1).all())
    assert bool((owners[total + 600 :] == 99).all())


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("pairs", "experts"), [(129, 5), (513, 1025), (1024, 3)])
def test_one_program_aligns_as_three_launches_do(pairs: int, experts: int, block: int):
    """The small form is right past the 128 pairs up to which it is taken.

    On the virtual GPU alone: a real one compares a million pairs of pairs in no program.
    """
    steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
    ids = random_bits.integers(3, "ids", pairs, 1, below=experts + 3) - 1
    got = steps.align(ids, 1, experts, block, most=pairs)
    want = place(local_expert(ids, 1, experts), experts, block)
    used = want.used // block
    assert torch.equal(got.slots[: want.used].long(), want.pairs())
    assert torch.equal(got.block_expert[:used], want.block_expert())
    assert bool((got.block_expert[used:] == -1).all())


def test_bad_ids_are_refused():
    steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
    with pytest.raises(
        ParityError, match=r"ids must be contiguous int32 or int64, got torch\.int16"
    ):
        steps.align(torch.zeros(2, 2, dtype=torch.int16), 0, 1, 16)
    with pytest.raises(ParityError, match="ids must be contiguous"):
        steps.align(torch.zeros(4, 2, dtype=torch.int32).t(), 0, 1, 16)


@pytest.mark.parametrize(("pairs", "launches"), [(0, 0), (1, 1), (128, 1), (129, 3)])
def test_up_to_128_pairs_take_one_launch(pairs: int, launches: int, parity_device: str):
    steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
    virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")
    ids = torch.zeros(pairs, 1, dtype=torch.int32, device=parity_device)
    with virtual_gpu.record() as tape:
        steps.align(ids, 0, 2, 16)
    assert len(tape.launches) == launches


@pytest.mark.parametrize(("name", "launches"), [("ours_align", 1), ("ours_align_large", 3)])
def test_the_two_alignments_are_two_forms(name: str, launches: int):
    """They give the same, so that one under the other's name would be green."""
    virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")
    with virtual_gpu.record() as tape:
        on_device(find(name), Case(m=3, e=4, k=2), "cpu")
    assert len(tape.launches) == launches


def partitions(total: int, parts: int, largest: int):
    """Yield the ways to split ``total`` pairs over at most ``parts`` experts."""
    if total == 0:
        yield ()
    elif parts:
        for head in range(min(total, largest), 0, -1):
            for tail in partitions(total - head, parts - 1, head):
                yield (head, *tail)


@pytest.mark.parametrize("experts", [1, 2, 3, 5, 20])
def test_the_grid_is_the_most_that_a_batch_can_occupy(experts: int):
    """Against every way to spread up to 14 pairs."""
    steps = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
    for pairs in range(1, 15):
        spread = partitions(pairs, experts, pairs)
        most = max(sum(-(-count // 4) for count in counts) for counts in spread)
        assert steps.block_bound(pairs, experts, 4) == most
