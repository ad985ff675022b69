"""Bit-exact references: pure functions that give the bits a Hopper GPU gives, on a CPU or a GPU."""
