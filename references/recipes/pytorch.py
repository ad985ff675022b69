"""What the ops of torch itself do."""

from __future__ import annotations

from moe_parity.references.language.recipe import Recipe
from moe_parity.references.stages.gemm.decisions import GemmRecipe, SplitK
from moe_parity.references.stages.swiglu.decisions import ProductRounding, SwigluRecipe
from moe_parity.references.stages.swiglu.silu import Silu

SCALED_MM_HALVES = Recipe(
    name="torch_scaled_mm_halves",
    source="cuBLASLt behind torch 2.11.0 scaled_mm, 1 x 128 by 128 x 128, some shapes from K = "
    "6144 on; the others are deepgemm_gemm",
    parts={"gemm": GemmRecipe(split_k=SplitK.HALVES)},
)
SILU_AND_MUL = Recipe(
    name="torch_silu_and_mul",
    source="torch 2.11.0 silu(gate) * up of BF16 on CUDA tensors, two kernels",
    parts={"swiglu": SwigluRecipe(silu=Silu.DIV, product_rounding=ProductRounding.TWICE)},
)
