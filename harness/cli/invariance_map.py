"""`parity map`: at which number of tokens a token's bits change, and with which decision.

A map is a statement: a change that a kernel states, by the recipes that it names, is green.  Red is
one that it promises not to have, and a kernel that does not run.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from rich.console import Console

from moe_parity.harness.checks.flow import BROKEN, first_line, raised
from moe_parity.harness.cli.map_options import Request
from moe_parity.harness.evidence.invariance_map import map_of
from moe_parity.harness.evidence.map_cases import case_of, names_of
from moe_parity.harness.evidence.map_records import CHECK, labels, records
from moe_parity.harness.plugin import choose_device
from moe_parity.harness.session import environment, guesses, provenance
from moe_parity.kernels import Kernel, all_kernels, load_file, select
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.references.stages import stage_named
from moe_parity.reports import html, maps, markdown
from moe_parity.reports.parts import prepare
from moe_parity.reports.records import ITEM_CHECK, Record, Run, RunEnd, RunInfo
from moe_parity.reports.results import FILE_NAME, write, write_atomic


def run(request: Request) -> int:
    """Map the kernels, print the table and write the records and the report.

    Return 0, or 1 where a kernel fails, or changes bits that it promises to keep.  Raises
    ParityError for a kernel, stage, case or configuration that there is not, and where nothing
    can be mapped here.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    device = choose_device(request.device or "auto")
    for file in request.files:
        load_file(file)
    kernels = _kernels(request, device)
    prepare(request.out).rmdir()
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    found: list[Record] = []
    plan = [(kernel, _case(kernel, request, device)) for kernel in kernels]
    for kernel, case in plan:
        own = []
        for record in _of_kernel(kernel, case, request, device):
            own.append(record)
            if record.message:
                console.print(record.message)
        found += [*own, _item(kernel, own)]
    names = frozenset(kernel.name for kernel in kernels)
    info = RunInfo(
        started=started, command=("parity", *sys.argv[1:]),
        environment=environment.describe(device) | guesses.packages(names),
        commit=provenance.commit()[0],
        dirty=provenance.commit()[1], seed=request.seed, profile="map", device=device,
        checkouts=provenance.checkouts(provenance.OURS, names, request.out),
    )  # fmt: skip
    failed = any(record.verdict == "fail" for record in found)
    end = RunEnd(
        collected=len(kernels), ran=len(kernels), exitstatus=int(failed),
        seconds=round(time.perf_counter() - began, 2),
    )  # fmt: skip
    made = write(Run(info, tuple(found), end), request.out / FILE_NAME)
    write_atomic(request.out / "report.html", html.render(made))
    write_atomic(request.out / "summary.md", markdown.render(made))
    console.print("\n".join(maps.text(made)))
    console.print(f"report: {request.out / 'report.html'}")
    return int(failed)


def _kernels(request: Request, device: str) -> list[Kernel]:
    """Return what is to be mapped; of a stage, what can be."""
    chosen = select(request.targets)
    for kernel in chosen:
        reason = kernel.unavailable()
        if reason:
            raise ParityError(f"{kernel.name} cannot run here: {reason}")
        if kernel.needs_gpu and device != "cuda":
            raise ParityError(f"{kernel.name} cannot be mapped here: it needs a GPU.")
    if request.stage is not None:
        every = all_kernels(stage_named(request.stage))
        here = [k for k in every if not k.unavailable() and (device == "cuda" or not k.needs_gpu)]
        chosen += [kernel for kernel in here if kernel not in chosen]
        if not here:
            raise ParityError(f"no kernel of {request.stage} can run here.")
    if not chosen:
        raise ParityError("no kernel to map: name one, a kernel file, or a --stage.")
    return chosen


def _case(kernel: Kernel, request: Request, device: str) -> Case | str:
    """Return the case of a kernel; of one that was not named, why there is none."""
    try:
        return case_of(kernel, device, request.case, request.most, request.seed)
    except ParityError as error:
        if request.stage is None or kernel.name in request.targets:
            raise
        return str(error)


def _of_kernel(kernel: Kernel, case: Case | str, request: Request, device: str) -> Iterator[Record]:
    """Yield the records of all configurations of a kernel."""
    if isinstance(case, str):
        yield Record(
            id=f"map:{kernel.name}:{CHECK}", check=CHECK, verdict="skip", reason=case, suite="map",
            kernel=kernel.name, stage=kernel.stage.name, device=device,
        )  # fmt: skip
        return
    for config in names_of(kernel, case, device, request.configs):
        start = time.perf_counter()
        try:
            made = map_of(kernel, case, device, config)
        except BROKEN as error:
            yield _broken(kernel, case, config, error, device, request)
            continue
        seconds = round(time.perf_counter() - start, 2)
        for n, record in enumerate(records(made, device, _again(request, kernel, case, config))):
            yield dataclasses.replace(record, seconds=0.0 if n else seconds)


def _broken(
    kernel: Kernel, case: Case, config: str, error: BaseException, device: str, request: Request
) -> Record:
    verdict = raised(kernel, case, error, CHECK)
    return Record(
        **labels(kernel, case, config), device=device, check=CHECK, verdict="fail",
        message=f"{verdict.message or first_line(error)}.", cause_kind=verdict.cause_kind,
        cause=verdict.cause, repro=_again(request, kernel, case, config),
    )  # fmt: skip


def _again(request: Request, kernel: Kernel, case: Case, config: str) -> str:
    """Return the command that makes a map again."""
    files = "".join(f" --kernel {file}" for file in request.files)
    named = [t for t in request.targets if t.endswith(".py")]
    files += "".join(f" --kernel {file}" for file in named)
    option = f" --config '{config}'" if config else ""
    return f"parity map {kernel.name} --case {case.id} --seed {case.seed}{option}{files}"


def _item(kernel: Kernel, own: list[Record]) -> Record:
    """Return the record that speaks for a kernel's maps together."""
    bad = next((record for record in own if record.verdict == "fail"), None)
    node = f"map[{kernel.name}]"
    return Record(
        id=f"map:{kernel.name}:{ITEM_CHECK}", check=ITEM_CHECK, nodeid=node, suite="map",
        kernel=kernel.name, stage=kernel.stage.name, verdict="fail" if bad else "pass",
        message=bad.message if bad else "", repro=bad.repro if bad else "",
        seconds=round(sum(record.seconds for record in own), 2),
    )  # fmt: skip
