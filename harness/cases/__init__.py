"""Which cases a suite runs: grids, strategies, real shapes."""
