"""`parity compare`: a base and a candidate, and an exit status that a CI or a bisection can use."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moe_parity.harness.cli.commands import FAILED, INCOMPLETE, OK
from moe_parity.harness.cli.compare_options import Request
from moe_parity.harness.session.watch import ON_CPU, ON_GPU
from moe_parity.references.errors import ParityError
from moe_parity.reports.comparison import Comparison, lines, to_json
from moe_parity.reports.results import write_atomic

if TYPE_CHECKING:
    from moe_parity.harness.evidence import compare_kernels

_STATUS = {"same": OK, "changed": FAILED, "incomplete": INCOMPLETE}
PACKAGES = {"vllm": "MOE_PARITY_VLLM"}
"""Package -> the variable that says where it is (docs/vendors.md)."""


def run(request: Request) -> int:
    """Compare, print what was found and write the files; return the exit status.

    Raises ParityError for input that says nothing, or several things at once.
    """
    for path in (request.json, request.markdown):
        if path is not None and path != "-" and not Path(path).resolve().parent.is_dir():
            raise ParityError(f"cannot write {path}: there is no folder {Path(path).parent}.")
    if request.json == request.markdown == "-":
        raise ParityError("--json - and --markdown - both write to stdout: name a file for one.")
    comparison = _compared(request)
    if "-" not in (request.json, request.markdown):
        for line in lines(comparison):
            print(line)
    if request.json is not None:
        _write(request.json, to_json(comparison))
    if request.markdown is not None:
        from moe_parity.reports.comparison_markdown import render

        _write(request.markdown, render(comparison))
    return _STATUS[comparison.status]


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
    else:
        write_atomic(Path(path), text)


def _compared(request: Request) -> Comparison:
    sides = (request.kernel, request.against)
    if any(sides) and not all(sides) and not request.package:
        missing = "--against" if request.kernel else "--kernel"
        raise ParityError(f"two kernels are compared: {missing} is missing.")
    if all(sides) and (request.paths or request.package):
        raise ParityError(
            "--kernel BASE --against CANDIDATE compares two kernels: leave out "
            f"{'--package' if request.package else request.paths[0]}."
        )
    if not any(sides) and len(request.paths) != 2:
        raise ParityError(
            "compare needs a base and a candidate: two results.jsonl, --kernel BASE --against "
            f"CANDIDATE, or --package NAME and two folders; got {len(request.paths)} paths."
        )
    if all(sides) or request.package:
        return _of_kernels(request)
    if request.case_from is not None:
        raise ParityError(
            "--case-from runs kernels: give them by --kernel BASE --against CANDIDATE, or a "
            "--package and two folders."
        )
    base, candidate = request.paths
    for path in request.paths:
        if path.endswith(".py"):
            raise ParityError(
                f"{path} is no results file: kernels are compared by --kernel BASE --against "
                "CANDIDATE."
            )
    from moe_parity.harness.evidence import compare_runs

    return compare_runs.compare(Path(base), Path(candidate), any_version=request.any_version)


def _of_kernels(request: Request) -> Comparison:
    from moe_parity.harness.captured.file import read as read_capture
    from moe_parity.harness.evidence import compare_kernels
    from moe_parity.harness.session import environment
    from moe_parity.references.language import parse_id

    for case in request.cases:
        parse_id(f"it-{case}", request.seed)
    if request.case_from is not None:
        if request.cases:
            raise ParityError("--case-from and --case both say the inputs: leave one out.")
        read_capture(request.case_from)
    seconds = request.timeout
    if seconds is None:
        seconds = ON_CPU if request.device == "cpu" or environment.gpu() is None else ON_GPU
    if request.package:
        return compare_kernels.compare(_package(request, seconds))
    base, candidate = str(request.kernel), str(request.against)
    return compare_kernels.compare(
        compare_kernels.Ask(
            base=(base,),
            candidate=(candidate,),
            names=(base, candidate),
            device=request.device or "auto",
            seed=request.seed,
            cases=request.cases,
            case_from=_captured(request),
            seconds=seconds,
        )
    )


def _captured(request: Request) -> str:
    return "" if request.case_from is None else str(request.case_from.resolve())


def _package(request: Request, seconds: float) -> compare_kernels.Ask:
    """Return what is asked of a package in two folders."""
    from moe_parity.harness.evidence import compare_kernels

    package = str(request.package)
    if package not in PACKAGES:
        raise ParityError(
            f"--package {package} is unknown; known: {', '.join(PACKAGES)}. Of another package, "
            "compare a kernel file of each checkout: --kernel BASE --against CANDIDATE."
        )
    if len(request.paths) != 2:
        raise ParityError(
            f"--package {package} needs two folders, BASE and CANDIDATE; got {len(request.paths)}."
        )
    for path in request.paths:
        for folder in path.split(os.pathsep):
            if not Path(folder).is_dir():
                raise ParityError(f"{folder} is no folder: --package {package} needs two.")
    base, candidate = (
        os.pathsep.join(str(Path(f).resolve()) for f in path.split(os.pathsep))
        for path in request.paths
    )
    names = (request.kernel,) if request.kernel else ()
    return compare_kernels.Ask(
        base=names, candidate=names, vendor=package, names=(request.paths[0], request.paths[1]),
        variables=({PACKAGES[package]: base}, {PACKAGES[package]: candidate}),
        device=request.device or "auto", seed=request.seed, cases=request.cases,
        case_from=_captured(request), seconds=seconds,
    )  # fmt: skip
