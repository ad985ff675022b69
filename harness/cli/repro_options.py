"""The options of `parity repro`; what it needs is imported when it runs."""

from __future__ import annotations

import argparse


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of the command."""
    parser.add_argument(
        "ids", metavar="ID", nargs="+",
        help="<kernel>-<case id>[@<seed>], as a failure prints it; several are calls in this order",
    )  # fmt: skip
    parser.add_argument(
        "--config", metavar="NAME|N", help="take this configuration, by its name or number from 0"
    )
    parser.add_argument(
        "--check", choices=("invariance",), help="run this check, which others lack"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="base seed of the inputs")
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="FILE.py",
        help="load this kernel file first",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is a GPU")
    parser.add_argument(
        "--repeat", type=int, metavar="N", help="run it N times instead, and say what differs"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    from moe_parity.harness.cli import repro

    if args.device is not None:
        from moe_parity.harness.plugin import choose_device

        choose_device(args.device)
    if args.repeat is not None:
        from moe_parity.harness.cli import repeat

        return repeat.run(args.ids, args.seed, args.repeat, args.device, args.kernel)
    return repro.run(args.ids, args.seed, args.device, args.kernel, args.check, args.config)
