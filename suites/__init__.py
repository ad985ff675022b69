"""The suites: `pytest suites/`, or `parity check` where the package is installed."""
