"""Tensors captured from a running model: written, read, fed to kernels, made small."""
