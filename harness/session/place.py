"""Whose tests a run has: our suites, or those of somebody who loads the plugin for a few of them.

Our suites are written for what the plugin does to a run: a time limit, profiles of hypothesis, one
GPU for a worker, names that stand for themselves. Other tests are not, and are left alone.
"""

from __future__ import annotations

from pathlib import Path


def is_ours(root: Path) -> bool:
    """Whether the root folder of a run is that of our suites, in a checkout or installed."""
    return (root / "suites").is_dir() and (root / "harness" / "plugin.py").is_file()
