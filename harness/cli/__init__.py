"""The command `parity`."""

from moe_parity.harness.cli.commands import main

__all__ = ["main"]
