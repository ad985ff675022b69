"""The harness: inputs, comparison, checks, mutants, witnesses, results, plugin, command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_parity.harness.captured.hook import capture as capture

__all__ = ["capture"]


def __getattr__(name: str) -> Any:
    """Import what is public when it is asked for: `parity --help` starts without torch."""
    if name == "capture":
        from moe_parity.harness.captured.hook import capture as found

        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
