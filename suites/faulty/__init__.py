"""Kernels with one planted fault each: what the default check has to find, and name."""
