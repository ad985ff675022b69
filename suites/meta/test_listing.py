"""The tables of `parity recipes` and `parity kernels`, on the real recipes and kernels."""

from __future__ import annotations

from moe_parity.harness.cli.listing import kernels_table, recipe_table
from moe_parity.kernels import all_kernels
from moe_parity.references.language import decisions
from moe_parity.references.recipes import ALL
from moe_parity.references.stages.combine import CombineRecipe
from moe_parity.references.stages.gemm.decisions import GemmRecipe
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.swiglu.decisions import SwigluRecipe


def test_every_recipe_has_a_table():
    """Two recipes that differ in which decisions exist; a decision that cannot show says so."""
    ours, vllm = recipe_table(ALL["ours"]), recipe_table(ALL["vllm_cuda"])
    quant = [line.split() for line in ours.splitlines() if line.startswith("quant.")]
    assert len(quant) == len(decisions(QuantRecipe))
    own = ALL["ours"].of("act_quant", QuantRecipe)
    exist = {d.name for d in decisions(own).values() if d.exists(own)}
    # it floors amax: a floor of scales has no place; nothing is compared flushed
    absent = {"quant.floor_order", "quant.subnormal_amax"}
    assert len(exist) == len(quant) - len(absent)
    assert {name for name, _, told, *_ in quant if told == "-"} == absent
    assert all(int(told) >= 1000 for name, _, told, *_ in quant if name in exist)
    for part in (GemmRecipe, SwigluRecipe, CombineRecipe):
        assert all(decision.name in ours for decision in decisions(part).values())
    gemm = recipe_table(ALL["deepgemm_gemm"])
    assert "gemm.scale_order" in gemm
    assert "quant." not in gemm
    assert "shows beside other options only" in vllm
    assert ours.startswith("ours (act_quant, weight_quant")


def test_every_kernel_is_listed():
    table = kernels_table()
    assert all(kernel.name in table for kernel in all_kernels())
