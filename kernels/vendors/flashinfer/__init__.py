"""TensorRT-LLM's block-FP8 source as FlashInfer ships it: one GEMM, and the whole fused layer."""

REGISTERED = ("gemms", "layer")
"""The modules that register kernels."""
