"""vLLM's kernels."""
