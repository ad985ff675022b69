"""The options of `parity new-kernel`; what it does is in ``new_kernel``, which needs torch."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("name", metavar="NAME", help="its name: lower-case letters, digits and _")
    add("--stage", required=True, metavar="STAGE", help="a stage, as `parity kernels` names them")
    add("--form", default="torch", metavar="torch|triton", help="default: torch")
    add("-o", dest="file", type=Path, metavar="FILE.py", help="default: NAME.py, here")


def run(args: argparse.Namespace) -> int:
    """Write the file; return the exit status."""
    from moe_parity.harness.cli import new_kernel

    return new_kernel.run(
        new_kernel.Request(name=args.name, stage=args.stage, form=args.form, file=args.file)
    )
