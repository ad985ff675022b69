"""Stage ``align``: every owned pair once, in a block of its expert, in order; the rest dropped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_parity.harness.expect import Recorder
from moe_parity.kernels import KernelError
from moe_parity.references.arithmetic import random_bits

stages = pytest.importorskip("moe_parity.kernels.ours.steps", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")


def fault(aligned, ids: torch.Tensor, first: int, experts: int) -> str | None:
    """Return what is wrong with an alignment, in words, or None."""
    pairs, block = ids.numel(), aligned.block
    local = ids.flatten().long().cpu() - first
    owned = (ids.flatten().cpu() >= 0) & (local >= 0) & (local < experts)
    slots = aligned.slots.cpu().view(-1, block)
    owners = aligned.block_expert.cpu().tolist()
    wanted: list[tuple[int, list[int]]] = []
    for expert in range(experts):
        mine = (owned & (local == expert)).nonzero()[:, 0].tolist()
        wanted += [(expert, mine[n : n + block]) for n in range(0, len(mine), block)]
    for number, (expert, mine) in enumerate(wanted):
        if owners[number] != expert:
            return f"block {number} belongs to expert {owners[number]}, expected {expert}"
        full = mine + [pairs] * (block - len(mine))
        if slots[number].tolist() != full:
            return f"block {number} holds {slots[number].tolist()}, expected {full}"
    if any(owner != -1 for owner in owners[len(wanted) :]):
        return f"blocks past {len(wanted)} are not marked: {owners[len(wanted) :]}"
    return None


def make_ids(m: int, k: int, e: int, seed: int, holes: bool) -> torch.Tensor:
    """Return ids [m, k] over e experts; with holes also -1 and ids past the end."""
    low = 3 if holes else 0
    return (random_bits.integers(seed, "ids", m, k, below=e + 2 * low) - low).int()


def check(ids: torch.Tensor, first: int, experts: int, block: int, recorder: Recorder, device: str):
    __tracebackhide__ = True
    aligned = stages.align(ids.to(device), first, experts, block)
    wrong = fault(aligned, ids, first, experts)
    message = f"align of {ids.shape[0]} tokens, k = {ids.shape[1]}, {experts} experts: {wrong}."
    recorder.add(
        {
            "check": "structure",
            "verdict": "fail" if wrong else "pass",
            "kernel": "ours_align",
            "stage": "align",
            "shape": f"m{ids.shape[0]}-e{experts}-k{ids.shape[1]}",
            "device": "virtual_gpu" if device == "cpu" else device,
            "bound": "exact",
            "compared": aligned.slots.numel() + aligned.block_expert.numel(),
            "message": message if wrong else "",
        }
    )
    assert wrong is None, message


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(
    ("m", "k", "e"),
    [
        (1, 1, 1), (1, 8, 288), (4, 8, 72), (16, 8, 256), (127, 1, 5), (128, 1, 5), (129, 1, 5),
        (43, 3, 7), (64, 2, 72), (20, 22, 64), (33, 8, 5),
    ],
)  # fmt: skip
def test_edges(m: int, k: int, e: int, block: int, parity_device: str, parity_recorder: Recorder):
    """Around the 128 pairs where the kernel changes, and expert counts of every kind."""
    for holes in (False, True):
        ids = make_ids(m, k, e, seed=m, holes=holes)
        check(ids, 0, e, block, parity_recorder, parity_device)


@given(
    m=st.integers(0, 40), k=st.sampled_from([1, 2, 6, 8, 9]), e=st.integers(1, 40),
    ranks=st.sampled_from([1, 2, 4]), wide=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_drawn(
    m: int,
    k: int,
    e: int,
    ranks: int,
    wide: bool,
    seed: int,
    parity_device: str,
    parity_recorder: Recorder,
):
    """Any batch, any rank, foreign ids and -1, int32 and int64."""
    ids = make_ids(m, k, e * ranks, seed, holes=True)
    ids = ids.long() if wide else ids
    check(ids, e * (ranks - 1), e, 16, parity_recorder, parity_device)


@pytest.mark.parametrize("m", [16, 40])
def test_everything_to_one_expert(m: int, parity_device: str, parity_recorder: Recorder):
    ids = torch.full((m, 8), 3, dtype=torch.int32)
    check(ids, 0, 8, 16, parity_recorder, parity_device)


def test_order_of_programs_does_not_matter():
    ids = make_ids(40, 8, 12, 5, holes=True)
    plain = stages.align(ids, 0, 12, 16)
    with virtual_gpu.shuffled(11):
        mixed = stages.align(ids, 0, 12, 16)
    assert fault(mixed, ids, 0, 12) is None
    assert torch.equal(plain.block_expert, mixed.block_expert)


@pytest.mark.parametrize("damage", ["lost", "doubled", "moved", "owner", "unmarked"])
def test_the_check_sees(damage: str):
    """A lost or doubled pair, one in another block, a wrong owner, a block left unmarked."""
    ids = make_ids(6, 4, 4, 3, holes=False)
    aligned = stages.align(ids, 0, 4, 16)
    assert fault(aligned, ids, 0, 4) is None
    if damage == "lost":
        aligned.slots[0] = ids.numel()
    elif damage == "doubled":
        aligned.slots[1] = aligned.slots[0]
    elif damage == "moved":
        aligned.slots[[0, 16]] = aligned.slots[[16, 0]]
    elif damage == "owner":
        aligned.block_expert[1] = 3
    else:
        aligned.block_expert[-1] = 0
    assert fault(aligned, ids, 0, 4) is not None


def test_bad_ids_are_refused():
    with pytest.raises(
        KernelError, match=r"ids must be contiguous int32 or int64, got torch\.int16"
    ):
        stages.align(torch.zeros(2, 2, dtype=torch.int16), 0, 1, 16)
    with pytest.raises(KernelError, match="ids must be contiguous"):
        stages.align(torch.zeros(4, 2, dtype=torch.int32).t(), 0, 1, 16)


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
    for pairs in range(1, 15):
        spread = partitions(pairs, experts, pairs)
        most = max(sum(-(-count // 4) for count in counts) for counts in spread)
        assert stages.block_bound(pairs, experts, 4) == most
