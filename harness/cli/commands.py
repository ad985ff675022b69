"""The command `parity`: what pytest cannot do, and a front door to what it can.

Each subcommand imports what it needs when it is called: `parity --help` and `parity report` start
without torch. Bad input is one sentence on stderr and status 2, never a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from moe_parity.harness.cli import (
    case_from,
    compare_options,
    map_options,
    new_kernel_options,
    repro_options,
)
from moe_parity.harness.session import caches, environment
from moe_parity.references.errors import ParityError
from moe_parity.reports.records import Run

OK, FAILED, BAD_INPUT, INCOMPLETE = 0, 1, 2, 3

_EXIT_CODES = """\
exit status:
  0  every check that ran passed
  1  a check failed, or a test broke
  2  bad input, usage or environment, a full disk: one sentence on stderr says what
  3  incomplete: interrupted, nothing ran, or a test left no record
"""
_FORMATS = {".html": "html", ".htm": "html", ".md": "md", ".csv": "csv"}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"parity: {message}; see `{self.prog} --help`.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="parity",
        description="Bit-exact parity of block-FP8 mixture-of-experts kernels.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = f"moe-parity {environment.versions()['moe-parity']}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    _add_check(add("check", "run the suites and write the results and a report"))
    _add_fuzz(add("fuzz", "draw cases for one kernel until the time is up"))
    new_kernel_options.add_to(
        add("new-kernel", "write a file with a kernel of a stage, to be made yours")
    )
    _add_report(add("report", "make a report from a results file"))
    add("kernels", "list the kernels, and why some are unavailable")
    add("recipes", "list the recipes, their decisions and what tells each decision")
    _add_identify(add("identify", "name the recipe of a kernel, or of outputs in a file"))
    compare_options.add_to(add("compare", "say what changed between a base and a candidate"))
    map_options.add_to(add("map", "say at which number of tokens a token's bits change, and why"))
    repro_options.add_to(add("repro", "run again what a record is about"))
    _add_witness(add("witness", "record bits of real kernels, or replay them without a GPU"))
    return parser


def _add_check(parser: argparse.ArgumentParser) -> None:
    from moe_parity.harness.session.profiles import PROFILES

    add = parser.add_argument
    add("--out", type=Path, default=Path("parity-out"), metavar="DIR", help="default: parity-out")
    add(
        "--kernel",
        action="append",
        default=[],
        metavar="NAME|FILE.py",
        help="check this kernel, or those that a file registers, and no other (repeatable)",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu")
    add("--require-gpu", action="store_true", help="a missing GPU is an error, not a skip")
    add("-k", dest="expression", metavar="EXPR", help="select tests by name, as pytest does")
    add("-m", dest="markers", metavar="EXPR", help="select by marker: \"moe(scale='ue8m0')\"")
    add(
        "-n",
        dest="workers",
        type=_workers,
        default=min(2, os.cpu_count() or 1),
        metavar="WORKERS",
        help="worker processes; 0 runs in this one (default: %(default)s)",
    )
    add(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds that one case may take, 0 for any (default: 120 on a CPU, 300 on a GPU)",
    )
    add("--profile", choices=tuple(PROFILES), help="how many cases each property draws")
    add("--seed", type=int, metavar="N", help="base seed of inputs and drawn cases")
    add(
        "--shapes",
        metavar="FILTER",
        help="tests of these shapes: sizes and words of ids joined by hyphens, m33-e256, or models "
        "of the catalogue, deepseek_v3_tp8; commas between alternatives",
    )
    add("--shard", metavar="I/N", help="one of N parts that together are all tests, 1/4 to 4/4")
    case_from.add_to(parser)
    add("--lf", dest="last_failed", action="store_true", help="what failed in the last run of DIR")
    add("--durations", type=_number, default=0, metavar="N", help="also print the N slowest tests")


def _add_fuzz(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="KERNEL", help="NAME, FILE.py:NAME, or FILE.py with one kernel")
    add("--minutes", type=_minutes, metavar="N", help="how long (default: until --cases)")
    add("--cases", type=_number, metavar="N", help="how many cases (default: 10,000)")
    add(
        "-n",
        dest="workers",
        type=_workers,
        default=1,
        metavar="WORKERS",
        help="processes; 0 runs in this one, which a crash then ends (default: %(default)s)",
    )
    add("--seed", type=int, metavar="N", help="what cases are drawn with (default: one is drawn)")
    add(
        "--corpus",
        type=Path,
        metavar="DIR",
        help="where failures are kept, and tried first (default: parity-corpus; for kernels of "
        "ours in a checkout suites/corpus)",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu")
    add("--timeout", type=float, metavar="S", help="seconds that one case may take, 0 for any")


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes")
    return value


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def _workers(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers")
    return int(text)


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "results",
        type=Path,
        metavar="RESULTS",
        help="a results.jsonl, or the folder of a run: what a killed one left is read too",
    )
    add("-o", dest="file", type=Path, required=True, metavar="FILE", help="the file to write")
    add("--format", choices=("html", "md", "csv"), help="default: by the ending of FILE")
    add("--partial", action="store_true", help="accept the file of an interrupted run")


def _add_identify(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="a kernel, a kernel file (.py), or outputs in a file (.safetensors)",
    )
    add("--kernel", action="append", default=[], metavar="FILE.py", help="load a file first")
    add("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    case_from.add_to(parser)
    add("--stage", metavar="STAGE", help="the stage of a file that does not say it")
    add("--case", metavar="WORDS", help="the words of its case, such as ue8m0-c7 (default: fp32)")
    add("--seed", type=int, default=0, metavar="N", help="the seed of its case")


def _add_witness(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="record|verify|drift")
    record = actions.add_parser("record", help="record the bits that kernels give on this GPU")
    record.add_argument("-o", "--out", type=Path, required=True, metavar="DIR")
    record.add_argument("--kernel", action="append", default=[], metavar="NAME")
    verify = actions.add_parser("verify", help="replay witnesses against the references")
    verify.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="default: our own")
    drift = actions.add_parser("drift", help="name what changed between two versions of a vendor")
    drift.add_argument("before", type=Path, metavar="DIR")
    drift.add_argument("after", type=Path, metavar="DIR")


# --- commands -----------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    from moe_parity.harness.cli import check as cli_check

    return cli_check.run(
        cli_check.Request(
            out=args.out,
            kernels=tuple(args.kernel),
            device=args.device,
            require_gpu=args.require_gpu,
            expression=args.expression,
            markers=args.markers,
            workers=args.workers,
            timeout=args.timeout,
            profile=args.profile,
            seed=args.seed,
            shapes=args.shapes,
            shard=args.shard,
            last_failed=args.last_failed,
            durations=args.durations,
            case_from=args.case_from,
        )
    )


def _fuzz(args: argparse.Namespace) -> int:
    from moe_parity.harness.cli import fuzz

    return fuzz.run(
        fuzz.Request(
            target=args.target,
            minutes=args.minutes,
            cases=args.cases,
            workers=args.workers,
            seed=args.seed,
            corpus=args.corpus,
            device=args.device,
            timeout=args.timeout,
        )
    )


def _report(args: argparse.Namespace) -> int:
    from moe_parity.reports.results import write_atomic

    form = args.format or _FORMATS.get(args.file.suffix.lower())
    if form is None:
        raise ParityError(
            f"cannot tell the format of {args.file}: end its name in .html, .md or .csv, or say "
            "--format."
        )
    run = _read(args.results, partial=args.partial)
    from moe_parity.reports import html, markdown, tables

    render = {"html": html.render, "md": markdown.render, "csv": tables.to_csv}[form]
    write_atomic(args.file, render(run))
    print(args.file)
    return OK


def _read(path: Path, *, partial: bool) -> Run:
    """Read a results file, or what the run in its folder has written so far; say which."""
    from moe_parity.reports import parts
    from moe_parity.reports.results import FILE_NAME, read

    file = path / FILE_NAME if path.is_dir() else path
    folder = parts.unfinished(path)
    left = parts.read_parts(folder) if folder else None
    if folder is not None and left is not None:
        sentence = parts.sentence_of(folder, left)
        if path == folder or not file.exists():
            print(f"parity: {sentence}", file=sys.stderr)
            return left
        print(
            f"parity: {file} is of an earlier run; {sentence} `parity report {folder}` reports it.",
            file=sys.stderr,
        )
    return read(file, partial=partial)


def _kernels(_: argparse.Namespace) -> int:
    from moe_parity.harness.cli import listing

    print(listing.kernels_table())
    return OK


def _recipes(_: argparse.Namespace) -> int:
    from moe_parity.harness.cli import listing

    print(listing.recipes_table())
    return OK


def _witness(args: argparse.Namespace) -> int:
    from moe_parity.harness.evidence import witness_set

    if args.action == "record":
        return witness_set.record(args.out, args.kernel)
    if args.action == "drift":
        from moe_parity.harness.evidence import drift

        return drift.report(args.before, args.after)
    return witness_set.verify(args.paths)


def _identify(args: argparse.Namespace) -> int:
    from moe_parity.harness.cli import identify

    if args.device is not None:
        from moe_parity.harness.plugin import choose_device

        choose_device(args.device)
    return identify.run(
        identify.Request(
            targets=tuple(args.targets),
            files=tuple(args.kernel),
            device=args.device,
            stage=args.stage,
            case=args.case,
            seed=args.seed,
            case_from=args.case_from,
        )
    )


_COMMANDS = {
    "check": _check,
    "compare": compare_options.run,
    "fuzz": _fuzz,
    "identify": _identify,
    "report": _report,
    "kernels": _kernels,
    "map": map_options.run,
    "new-kernel": new_kernel_options.run,
    "recipes": _recipes,
    "repro": repro_options.run,
    "witness": _witness,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    given = sys.argv[1:] if argv is None else argv
    try:
        args = _parser().parse_args(given)
    except SystemExit as refusal:
        raise SystemExit(compare_options.usage_status(given, int(refusal.code or 0))) from None
    caches.provide()
    try:
        status = _COMMANDS[args.command](args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("parity: interrupted.", file=sys.stderr)
        return INCOMPLETE
    except BrokenPipeError:
        # the reader of a pipe, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except ParityError as error:
        print(f"parity: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    return status
