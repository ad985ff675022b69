"""vLLM's stored configurations as cases: every tile has the bits that the table says of it.

The tiles are those of 0.33.0's files for an H200 as they are committed, so the files need not be
here; vLLM's kernels must.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from moe_parity.harness.checks.flow import bits
from moe_parity.harness.session.skips import skip_test
from moe_parity.kernels import Kernel, find
from moe_parity.kernels.choice import choosing
from moe_parity.kernels.vendors.vllm import stored, tiles, triton_gemm, triton_linear
from moe_parity.references.language import Case, Skip, Values, Why
from moe_parity.references.stages.gemm.decisions import GemmRecipe, Interval
from moe_parity.suites.meta import measured

GROUPED = Case(m=9, e=2, k=2, h=256, i=128, values=Values.AIMED)
DENSE = Case(m=9, e=1, k=1, h=256, i=128, values=Values.AIMED)
FILES = {line["file"]: line for line in measured.stored_files()}


def tile(numbers: list[int]) -> stored.Config:
    return dict(zip(measured.TILE, numbers, strict=True))


def called(
    monkeypatch: pytest.MonkeyPatch, file: str, held: dict[int, stored.Config]
) -> tuple[Kernel, Case]:
    """Return the kernel and a case of a file, with configurations in its place."""
    grouped = file.startswith("E")
    kernel = find("vllm_fused_moe_fc1" if grouped else "vllm_triton_linear")
    if absent := kernel.unavailable():
        skip_test(absent)
    made = {"file": stored.Stored(held)}
    monkeypatch.setattr(triton_gemm if grouped else triton_linear, "read", lambda *_: made)
    return kernel, GROUPED if grouped else DENSE


def distinct() -> dict[str, tuple[str, list[int]]]:
    """Return every tile that decides other bits or covers other rows: a file, the tile."""
    found = {}
    for file, line in FILES.items():
        for numbers in line["tiles"].values():
            m, n, k = numbers[0], numbers[1], min(numbers[2], 128)
            found.setdefault(f"{file[0].lower()}-m{m}-n{n}-k{k}", (file, numbers))
    return found


DISTINCT = distinct()


@pytest.mark.parametrize("name", DISTINCT)
def test_every_stored_tile_has_the_bits_of_its_class(
    name: str, parity_device: str, monkeypatch: pytest.MonkeyPatch
):
    file, numbers = DISTINCT[name]
    kernel, case = called(monkeypatch, file, {1: tile(numbers)})
    with choosing(registered="file"):
        verdict = bits(kernel, case, parity_device)
    assert not verdict.failed, verdict.message
    assert verdict.compared == case.m * case.k * 2 * case.i


@pytest.mark.parametrize("file", FILES)
def test_a_stored_file_changes_its_bits_where_the_table_says(
    file: str, parity_device: str, monkeypatch: pytest.MonkeyPatch
):
    """Both sides of every edge, at its own number of tokens; the committed table is the recipe."""
    if parity_device != "cuda":
        skip_test(Skip(Why.NEEDS_GPU, "thousands of tokens are too many for the virtual GPU."))
    line = FILES[file]
    kernel, case = called(monkeypatch, file, {int(m): tile(t) for m, t in line["tiles"].items()})
    for first, last, order, unit, interval in line["spans"]:
        for m in {first, min(last, 4097)}:
            asked = dataclasses.replace(case, m=m, e=8 if case.e > 1 else 1)
            with choosing(registered="file"):
                part = kernel.recipes(asked, "cuda")[0].of("gemm", GemmRecipe)
                verdict = bits(kernel, asked, "cuda")
            if tiles.narrowest() == 16:  # as the table was made
                said = part.scale_order.value, part.unit.value, part.interval.value
                assert said == (order, unit, interval)
            assert not verdict.failed, verdict.message


def test_the_table_is_that_of_the_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "version", lambda name: "3.7.1")
    found: list[dict[str, Any]] = measured.stored_lines()
    if len(found) < len(FILES):
        skip_test(Skip(Why.ABSENT, "vLLM's stored configurations are not here: unpack them too."))
    # as they are written
    assert json.loads(json.dumps(found)) == measured.stored_files()


def test_the_batch_invariant_configuration_is_vllms_own_and_takes_32_of_k(parity_device: str):
    kernel = find("vllm_fused_moe_fc1")
    if absent := kernel.unavailable():
        skip_test(absent)
    pinned = triton_gemm.batch_invariant()
    assert {word: pinned[word] for word in measured.TILE[:3]} == {
        "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32,
    }  # fmt: skip
    for m in (1, 70):
        case = dataclasses.replace(GROUPED, m=m)
        with choosing(registered="batch_invariant"):
            (recipe,) = kernel.recipes(case, parity_device)
            verdict = bits(kernel, case, parity_device)
        assert recipe.of("gemm", GemmRecipe).interval is Interval.K32
        assert not verdict.failed, verdict.message
