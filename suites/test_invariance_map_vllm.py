"""The invariance map of vLLM's grouped GEMM, with its default tiles and with stored ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from moe_parity.harness.evidence.invariance_map import map_of
from moe_parity.kernels import Kernel, find
from moe_parity.kernels.vendors.vllm import stored, tiles, triton_gemm
from moe_parity.references.errors import ParityError
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.suites.test_invariance_map import FC1, spans


def tile(m: int, n: int, k: int = 128) -> dict[str, int]:
    return {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 1,
            "num_warps": 4, "num_stages": 3}  # fmt: skip


def test_stored_configurations_are_read_by_name_and_the_nearest_is_taken(tmp_path: Path):
    name = "E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    entries = {"1": tile(16, 64), "4": tile(64, 128), "8": tile(16, 128)}
    (tmp_path / name).write_text(json.dumps({"triton_version": "3.5.0", **entries}))
    (tmp_path / name.replace("H200", "H100")).write_text("{}")
    files = tuple(tmp_path.iterdir())
    read = stored.read_files(files, ("E", "N"))
    assert list(read) == ["E=8,N=64"]
    (found,) = read.values()
    taken = [found.of(m)["BLOCK_SIZE_M"] for m in (1, 2, 3, 6, 7, 900)]
    # of two that are as near the first, as in vLLM
    assert taken == [16, 16, 64, 64, 16, 16]
    (tmp_path / name).write_text('{"1": {"BLOCK_SIZE_M": 16}}')
    stored.read_files.cache_clear()
    with pytest.raises(ParityError, match="must map numbers of tokens to tiles"):
        stored.read_files(files, ("E", "N"))


@pytest.mark.parametrize(
    ("shape", "order", "unit"),
    [
        ((16, 128), "b_then_a", "wgmma_fp8"),
        ((64, 128), "a_then_b", "wgmma_fp8"),
        ((16, 32), "a_then_b", "mma_f16"),
        ((64, 8), "a_then_b", "mma_f16"),
        ((8, 64), "b_then_a", "mma_f16"),
    ],
)
def test_a_tile_decides_the_scale_order_and_the_unit(
    shape: tuple[int, int], order: str, unit: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tiles, "version", lambda name: "3.7.1")
    part = tiles.recipe_of(tile(*shape)).of("gemm", GemmRecipe)
    assert (part.scale_order.value, part.unit.value) == (order, unit)
    monkeypatch.setattr(tiles, "version", lambda name: "3.8.0")
    part = tiles.recipe_of(tile(*shape)).of("gemm", GemmRecipe)
    assert part.unit.value == ("mma_f16" if shape == (16, 32) else "wgmma_fp8")


def vllm() -> Kernel:
    kernel = find("vllm_fused_moe_fc1")
    reason = kernel.unavailable()
    if reason:
        pytest.skip(reason.sentence)
    return kernel


def test_the_tile_of_vllms_default_changes_at_64_tokens():
    made = map_of(vllm(), dataclasses.replace(FC1, m=66), "cpu", "default", beside=0)
    assert spans(made) == [
        (1, 64, "vllm_triton_swap", ""),
        (65, 66, "vllm_triton", "gemm.scale_order: b_then_a -> a_then_b"),
    ]
    assert not made.broken


def test_stored_tiles_of_vllm_change_the_unit_with_the_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
):
    """Tiles as those stored for 256 experts of width 256 at 1, 4 and 8 tokens."""
    kernel = vllm()
    file = stored.Stored({1: tile(8, 32), 4: tile(8, 64), 8: tile(16, 64)})
    monkeypatch.setattr(triton_gemm, "read", lambda: {"E=256,N=256": file})
    monkeypatch.setattr(tiles, "version", lambda name: "3.7.1")
    made = map_of(kernel, dataclasses.replace(FC1, m=9), "cpu", "E=256,N=256", beside=0)
    assert [s[:2] for s in spans(made)] == [(1, 2), (3, 6), (7, 9)]
    assert spans(made)[1][3] == "gemm.scale_order: a_then_b -> b_then_a"
