"""The options of `parity compare`; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_parity.harness.cli import case_from
from moe_parity.references.errors import ParityError

SKIP = 125
"""What `git bisect run` takes for: this commit cannot be judged."""
OPTION = "--bisect"

_EPILOG = """\
exit status:
  0  nothing changed
  1  bits or verdicts changed, something fails that did not, or the other way round
  2  bad input, usage or environment: one sentence on stderr says what
  3  nothing was comparable, or a side crashed, hung or was interrupted
--bisect gives 125, which `git bisect run` skips, in place of 2 and 3.
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `parity compare`."""

    paths: tuple[str, ...] = ()
    """Two results files, or two folders of a package."""
    kernel: str | None = None
    against: str | None = None
    package: str | None = None
    cases: tuple[str, ...] = ()
    case_from: Path | None = None
    device: str | None = None
    seed: int = 0
    timeout: float | None = None
    any_version: bool = False
    json: str | None = None
    markdown: str | None = None


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of the command."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    paths = "two results.jsonl or their folders, or two folders of a package: base, then candidate"
    add("paths", nargs="*", metavar="PATH", help=paths)
    add("--kernel", metavar="NAME|FILE.py", help="the base; with --package this kernel alone")
    add("--against", metavar="NAME|FILE.py", help="the candidate, run on the same cases")
    add("--package", metavar="NAME", help="its kernels, from two folders or checkouts: vllm")
    case = "this case, as ids say it: ue8m0-m33-h512[@seed] (repeatable; default: many)"
    add("--case", action="append", default=[], metavar="WORDS", help=case)
    case_from.add_to(parser)
    add("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    add("--seed", type=int, default=0, metavar="N", help="the seed of the cases")
    timeout = "seconds that a side may take for one case, 0 for any (default: 120, on a GPU 300)"
    add("--timeout", type=_seconds, metavar="S", help=timeout)
    versions = "compare runs with other versions of torch, Triton or a vendor too"
    add("--any-version", action="store_true", help=versions)
    add("--json", metavar="FILE", help="write what was found as JSON; - for stdout")
    add("--markdown", metavar="FILE", help="write it for a comment of a pull request; - for stdout")
    add(OPTION, action="store_true", help=f"status {SKIP} where nothing can be said")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def run(args: argparse.Namespace) -> int:
    """Compare; return the exit status."""
    if not args.bisect:
        return _run(args)
    try:
        status = _run(args)
    except ParityError as error:
        print(f"parity: {' '.join(str(error).split())}", file=sys.stderr)
        return SKIP
    except (Exception, KeyboardInterrupt) as error:
        # a traceback's status 1 would accuse the commit
        print(f"parity: {type(error).__name__}: {error}".rstrip(), file=sys.stderr)
        return SKIP
    return status if status in (0, 1) else SKIP


def usage_status(argv: Sequence[str], status: int) -> int:
    """Return the exit status of arguments that are not understood: a bisection skips them."""
    bisects = "compare" in argv and OPTION in argv
    return SKIP if bisects and status else status


def _run(args: argparse.Namespace) -> int:
    from moe_parity.harness.cli import compare

    return compare.run(
        Request(
            paths=tuple(args.paths),
            kernel=args.kernel,
            against=args.against,
            package=args.package,
            cases=tuple(args.case),
            case_from=args.case_from,
            device=args.device,
            seed=args.seed,
            timeout=args.timeout,
            any_version=args.any_version,
            json=args.json,
            markdown=args.markdown,
        )
    )
