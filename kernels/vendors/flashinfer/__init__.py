"""TensorRT-LLM's block-FP8 source as FlashInfer ships it: one GEMM, and the whole fused layer."""

REGISTERED = ("layer",)
"""The modules that register kernels."""
