"""The options of `parity map`; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `parity map`."""

    targets: tuple[str, ...]
    """Names of kernels and kernel files (.py)."""
    files: tuple[str, ...] = ()
    """Kernel files to load first."""
    stage: str | None = None
    """All kernels of a stage that run here, besides the targets."""
    case: str | None = None
    """The words of a case, without its tokens."""
    most: int | None = None
    configs: tuple[str, ...] = ()
    device: str | None = None
    seed: int = 0
    out: Path = Path("parity-map")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of the command."""
    add = parser.add_argument
    add("targets", nargs="*", metavar="KERNEL", help="a kernel, or a kernel file (.py)")
    add("--kernel", action="append", default=[], metavar="FILE.py", help="load a file first")
    add("--stage", metavar="STAGE", help="all kernels of a stage that run here")
    add("--case", metavar="WORDS", help="the words of the case: fp32-aimed-e4-k2-h256-i128")
    most = "up to so many tokens (default: those of --case, else 129 on a CPU, 1,025 on a GPU)"
    add("-m", dest="most", type=_tokens, metavar="MAX", help=most)
    only = "this configuration alone (repeatable; default: all that it has, stored ones too)"
    add("--config", action="append", default=[], metavar="NAME", help=only)
    add("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    add("--seed", type=int, default=0, metavar="N", help="the seed of the case")
    out = "where results.jsonl, report.html and summary.md go (default: parity-map)"
    add("-o", "--out", type=Path, default=Path("parity-map"), metavar="DIR", help=out)


def _tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Make the maps; return the exit status."""
    from moe_parity.harness.cli import invariance_map

    return invariance_map.run(
        Request(
            targets=tuple(args.targets),
            files=tuple(args.kernel),
            stage=args.stage,
            case=args.case,
            most=args.most,
            configs=tuple(args.config),
            device=args.device,
            seed=args.seed,
            out=args.out,
        )
    )
