"""`parity repro`: one kernel, one case, every check, printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from moe_parity.harness.checks.layer import check_layer
from moe_parity.harness.checks.quant import check_quant
from moe_parity.harness.checks.stage import check_stage
from moe_parity.harness.session import environment
from moe_parity.harness.stages import MIDDLE
from moe_parity.harness.verdict import Verdict
from moe_parity.kernels import KernelError, find, load_file
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Stage, parse_id


def _check_of(stage: Stage) -> Callable[..., Iterator[Verdict]]:
    if stage is Stage.LAYER:
        return check_layer
    return check_stage if stage in MIDDLE else check_quant


def run(case_id: str, seed: int, device: str | None = None, files: Iterable[str] = ()) -> int:
    """Run the checks of ``<kernel>-<case id>`` and print a line for each; return 0 or 1.

    ``files`` are kernel files to load first.  Raises ParityError for an id that is not understood,
    an unknown kernel, or a case that the kernel does not take here.
    """
    try:
        for file in files:
            load_file(file)
        name, case = parse_id(case_id, seed)
        kernel = find(name)
    except (ValueError, KernelError) as error:
        raise ParityError(str(error)) from None
    device = device or ("cuda" if environment.gpu() else "cpu")
    reason = kernel.why_not(case, device)
    if reason:
        raise ParityError(f"{kernel.name} does not take {case.id} here: {reason}")
    check = _check_of(kernel.stage)
    red = 0
    try:
        for verdict in check(kernel, case, device, power=True):
            red += verdict.verdict == "fail"
            detail = verdict.message or verdict.reason or f"{verdict.compared} outputs compared"
            if verdict.could_show:
                detail += f", {verdict.could_show} could have been red"
            print(f"{verdict.verdict:4}  {verdict.check:18}  {detail}")
    except (RuntimeError, ValueError, MemoryError, OverflowError) as error:
        text = (str(error).splitlines() or [""])[0]
        raise ParityError(f"{case_id} cannot be run: {type(error).__name__}: {text}") from None
    return 1 if red else 0
