"""FlashInfer's ``fp8_blockscale_gemm_sm90``, TensorRT-LLM's source, in two builds."""

REGISTERED = ("gemms",)
"""The modules that register kernels."""
