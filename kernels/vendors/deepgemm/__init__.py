"""DeepGEMM's kernels: its cast helpers, its GEMMs in every layout, a layer around them."""

REGISTERED = ("casts", "gemms", "chain")
"""The modules that register kernels."""
