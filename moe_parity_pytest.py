"""The pytest entry point: loads the plugin of moe-parity where a run asks for it, and nothing else.

A run asks by an option that begins with `--parity`, on the command line, in `addopts` or in
PYTEST_ADDOPTS. All other runs are as they were: no option, no line, no import of ours.

It is a module of its own: pytest rewrites the assertions of every package of a distribution that
has an entry point, and takes those of a namespace such as `moe_parity` for packages called
`kernels` or `harness`, which may be somebody else's.
"""

from __future__ import annotations

import pytest

PLUGIN = "moe_parity.harness.plugin"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Load the plugin before any conftest.py, so that its options are known in time."""
    if any(arg == "--parity" or arg.startswith("--parity-") for arg in args):
        early_config.pluginmanager.import_plugin(PLUGIN)
