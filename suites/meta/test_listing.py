"""The tables of `parity recipes` and `parity kernels`, on the real recipes and kernels."""

from __future__ import annotations

from moe_parity.harness.listing import kernels_table, recipe_table
from moe_parity.kernels import all_kernels
from moe_parity.references.spec.recipes import ALL


def test_every_recipe_has_a_table():
    """Two recipes that differ in which decisions exist; a decision that cannot show says so."""
    ours, vllm = recipe_table(ALL["ours"]), recipe_table(ALL["vllm_cuda"])
    for line in ours.splitlines()[2:]:
        name, _, told, *_ = line.split()
        assert name.startswith("quant.")
        assert int(told) >= 1000
    assert "shows beside other options only" in vllm
    assert ours.startswith("ours (act_quant, weight_quant")


def test_every_kernel_is_listed():
    table = kernels_table()
    assert all(kernel.name in table for kernel in all_kernels())
