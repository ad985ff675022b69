"""Adapters for the kernels users really run; each is lazy and says why it is absent."""
