"""`parity repro`: one kernel, one case, every check, printed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from moe_parity.harness.checks.flow import check, first_line
from moe_parity.harness.checks.promises import served
from moe_parity.harness.session import environment
from moe_parity.kernels import find, load_file
from moe_parity.references.errors import ParityError
from moe_parity.references.language import parse_id


def run(case_id: str, seed: int, device: str | None = None, files: Iterable[str] = ()) -> int:
    """Run the checks of ``<kernel>-<case id>`` and print a line for each; return 0 or 1.

    ``files`` are kernel files to load first.  Raises ParityError for an id that is not understood,
    an unknown kernel, or a case that the kernel does not take here.
    """
    for file in files:
        load_file(file)
    name, case = parse_id(case_id, seed)
    kernel = find(name)
    device = device or ("cuda" if environment.gpu() else "cpu")
    reason = kernel.why_not(case, device)
    if reason:
        raise ParityError(f"{kernel.name} does not take {case.id} here: {reason}")
    red = 0
    try:
        every = itertools.chain(
            check(kernel, case, device, power=True), served(kernel, case, device)
        )
        for verdict in every:
            red += verdict.failed
            detail = verdict.message or verdict.reason or f"{verdict.compared} outputs compared"
            if verdict.could_show:
                detail += f", {verdict.could_show} could have been red"
            print(f"{verdict.verdict:4}  {verdict.check:18}  {detail}")
    except (RuntimeError, MemoryError, OverflowError) as error:
        text = f"{type(error).__name__}: {first_line(error)}"
        raise ParityError(f"{case_id} cannot be run: {text}") from None
    return 1 if red else 0
