"""A dense GEMM of BF16 rows that it quantizes itself."""
