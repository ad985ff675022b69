"""Our own Triton kernels for block-FP8 MoE layers, checked against the recipe ``ours``."""

REGISTERED = (
    "stages.quant", "stages.align", "stages.gemm", "stages.linear", "stages.activation",
    "stages.combine", "stages.batched", "stages.sorted_rows",
    "stages.prefix_sum", "layers",
)  # fmt: skip
"""The modules that register kernels."""
