"""Our own Triton kernels for block-FP8 MoE layers, checked against the recipe ``ours``."""

REGISTERED = ("stages", "layers")
"""The modules that register kernels."""
