"""Block quantization: activations in groups, weights in tiles."""
