"""Ops that torch itself brings: its block-scaled matrix product."""

REGISTERED = ("scaled_mm",)
"""The modules that register kernels."""
