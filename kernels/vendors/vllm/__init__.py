"""vLLM's kernels: CUDA ops from its libraries, Triton kernels from its files."""

REGISTERED = (
    "quant_ops",
    "layer_ops",
    "triton_gemm",
    "triton_linear",
    "triton_quant",
    "triton_rows",
)
"""The modules that register kernels."""
