"""The option ``--case-from``, which several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the option; ``moe_parity.harness.captured.feed.case_from`` reads what it names."""
    parser.add_argument(
        "--case-from",
        type=Path,
        metavar="FILE",
        help="run kernels on these captured tensors (.safetensors), instead of drawn inputs",
    )
