"""The harness: inputs, comparison, checks, mutants, witnesses, results, plugin, command.

What somebody's own tests import stands here by name, and is loaded when it is asked for: the plugin
and the command are parts of this package and start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_parity.harness.captured.hook import capture as capture
    from moe_parity.harness.matching import assert_matches as assert_matches

__all__ = ["assert_matches", "capture"]

_MODULES = {
    "assert_matches": "moe_parity.harness.matching",
    "capture": "moe_parity.harness.captured.hook",
}
"""Name -> where it is."""


def __getattr__(name: str) -> Any:
    """Load what is public when it is asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
