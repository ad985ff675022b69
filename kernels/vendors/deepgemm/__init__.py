"""DeepGEMM's kernels."""
