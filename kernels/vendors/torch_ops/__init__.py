"""Ops that torch itself brings: its block-scaled matrix product, its SiLU and product."""

REGISTERED = ("scaled_mm", "silu_mul")
"""The modules that register kernels."""
