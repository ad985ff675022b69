"""Loads the parity plugin for `pytest` in a checkout; `parity check` loads it by name."""

pytest_plugins = ["moe_parity.harness.plugin"]
