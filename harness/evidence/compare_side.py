"""One side of a comparison, in a process of its own: kernels run on cases, outputs go to files.

``python -P -m moe_parity.harness.evidence.compare_side REQUEST.json``.  What happens is told
line by line in the file that the request names, the case before its call, so that whoever waits
knows where a side is, was killed or hangs.  Two sides never share a process: kernels, files and the
modules beside them may have the same names.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from moe_parity.harness.calling.poison import POISONS
from moe_parity.harness.calling.run import other_order, run
from moe_parity.harness.captured.feed import Declined
from moe_parity.harness.cases.budget import skip_of
from moe_parity.harness.cases.strategies import GROUPS, formats
from moe_parity.harness.cases.sweep import swept
from moe_parity.harness.checks import memory as memories
from moe_parity.harness.checks.flow import BROKEN, raised
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.evidence.compare_given import read as read_given
from moe_parity.harness.evidence.compare_given import written
from moe_parity.harness.plugin import choose_device
from moe_parity.harness.session import environment
from moe_parity.kernels import Kernel, all_kernels, select
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, ScaleFormat, Why, parse_id

DRAWN = 60
"""The budget of sizes, as ``parity check`` has one for the cases that it draws."""
SIZES = 24
FORMATS = 24
"""Cases that are met once in every size and format, at most."""
TWICE_BELOW = 5.0
"""Seconds of a call up to which it is made a second time, on memory with other contents: on the
virtual GPU a large case may take half a minute, and small ones have shown what memory does."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a side is asked for."""

    targets: tuple[str, ...]
    """Names of kernels, and kernel files."""
    vendor: str = ""
    """Or all kernels of a package, by the name of its folder of adapters."""
    device: str = "auto"
    seed: int = 0
    cases: tuple[tuple[str, str, str], ...] | None = None
    """(kernel, ``<case id>@<seed>``, file of the inputs, if they are not the case's own); None
    where the side chooses.  An empty kernel is any."""
    case_from: str = ""
    """Or the captured tensors that the inputs are taken from."""
    told: str
    """The file of what happens."""
    folder: str
    """Where outputs go."""


def main(path: str) -> int:
    """Serve a request; what cannot be served is told in a sentence."""
    threading.Thread(target=_ends_with_its_parent, daemon=True).start()
    data = json.loads(Path(path).read_text())
    cases = data.pop("cases")
    request = Request(
        **{**data, "targets": tuple(data["targets"])},
        cases=None
        if cases is None
        else tuple((kernel, case, file) for kernel, case, file in cases),
    )
    with Path(request.told).open("a") as file:

        def tell(kind: str, **what: Any) -> None:
            file.write(json.dumps({"kind": kind, **what}) + "\n")
            file.flush()

        try:
            for line in serve(request):
                tell(**line)
            tell("end")
        except ParityError as error:
            tell("error", text=" ".join(str(error).split()))
    return 0


def _ends_with_its_parent() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock would be held when this process ends
    os._exit(1)


def serve(request: Request) -> Iterator[dict[str, Any]]:
    """Yield what happens: kernels, cases as they begin, what became of them."""
    device = choose_device(request.device)
    kernels = _kernels(request)
    number = itertools.count()
    for kernel in kernels:
        reason = kernel.unavailable()
        yield {
            "kind": "kernel", "kernel": kernel.name, "stage": kernel.stage.name,
            "unavailable": str(reason) if reason else "", "versions": dict(kernel.versions()),
        }  # fmt: skip
        try:
            asked = [] if reason else _asked(request, kernel, device)
        except Declined as error:
            name = Path(request.case_from).name
            yield {"kind": "case", "kernel": kernel.name, "case": name, "declined": str(error)}
            continue
        for case, given in asked:
            key = f"{case.id}@{case.seed}"
            yield {"kind": "begin", "kernel": kernel.name, "case": key}
            file = Path(request.folder) / f"{next(number)}.safetensors"
            told = _case(kernel, case, device, file, given)
            yield {"kind": "case", "kernel": kernel.name, "case": key, "given": given, **told}
            if "raised" in told and environment.gpu_lost():
                raise ParityError(f"{kernel.name} took the GPU with it on {key}.")


def _kernels(request: Request) -> list[Kernel]:
    if request.vendor:
        known = all_kernels()
        own = [k for k in known if f"/vendors/{request.vendor}/" in k.source.as_posix()]
        names = set(request.targets)
        return [k for k in own if not names or k.name in names]
    return select(request.targets)


def _asked(request: Request, kernel: Kernel, device: str) -> list[tuple[Case, str]]:
    """Return cases, each with the file of its inputs, empty where they are its own."""
    if request.case_from:
        file = Path(request.folder) / f"given-{kernel.name}.safetensors"
        return [(written(Path(request.case_from), kernel, device, file), str(file))]
    if request.cases is None:
        return [(case, "") for case in chosen(kernel, device, request.seed)]
    mine = [(key, file) for name, key, file in request.cases if name in ("", kernel.name)]
    return [(parse_id(f"it-{key}", request.seed)[1], file) for key, file in mine]


def chosen(kernel: Kernel, device: str, seed: int = 0) -> list[Case]:
    """Return the cases of a comparison: those that tell decisions, every format, many sizes.

    The first are those of ``parity identify``, in every scale format of the stage whether the
    kernel takes it or not: what the other side takes is asked for as well.  What takes the virtual
    GPU too long is left out where anything else is left.
    """
    telling: list[Case] = []
    for group in GROUPS if "group" in kernel.stage.reads else GROUPS[:1]:
        every = [
            dataclasses.replace(probe, scale=scale, group=group)
            for scale, probe in itertools.product(ScaleFormat, kernel.stage.probes())
        ]
        own = [case for case in every if kernel.stage.refusal(case) is None]
        telling = telling or own
        if any(kernel.declines(case, device) is None for case in own):
            telling = own
            break
    small = formats(kernel, device)
    step = -(-len(small) // FORMATS) or 1
    others = [*small[::step], *swept(kernel, device, DRAWN, seed)[:SIZES]]
    others = [dataclasses.replace(case, seed=seed) for case in others]
    every = list({(case.id, case.seed): case for case in [*telling, *others]}.values())
    costly = [case for case in every if _over_budget(kernel, case, device)]
    within = [case for case in every if case not in costly]
    if costly and all(kernel.declines(case, device) is not None for case in within):
        within.append(min(costly, key=kernel.cost))  # slow, and all that there is
    return within


def _over_budget(kernel: Kernel, case: Case, device: str) -> bool:
    skip = skip_of(kernel, case, device)
    return skip is not None and skip.why is Why.BUDGET


def _case(kernel: Kernel, case: Case, device: str, file: Path, given: str) -> dict[str, Any]:
    """Run a case, twice where it is short; return what became of it."""
    # a chip without a model is as good as any: bits are compared with bits
    reason = kernel.declines(case, device)
    if reason is not None:
        return {"declined": str(reason)}
    try:
        if given:
            case, made = read_given(Path(given), kernel.stage, device)
        else:
            made = kernel.stage.inputs(case, device)
        start = time.monotonic()
        first = second = run(kernel, case, made)
        if time.monotonic() - start < TWICE_BELOW:
            with other_order(kernel, case, device):
                second = run(kernel, case, made, poison=POISONS[1])
    except BROKEN as error:
        if isinstance(error, ParityError) and kernel.stage.may_be_refused(case):
            return {"declined": str(error)}
        return _failed(raised(kernel, case, error))
    cause, settled = None, False
    if second is not first:
        found = memories.memory(kernel, case, made, device, first, second)
        cause, settled = found.cause or found.hit, found.settled
    if cause is not None:
        words = f"{kernel.stage} of {kernel.name} {cause.words} on {case.id}."
        return {
            "failed": words, "cause_kind": cause.kind.value, "cause": cause.name,
        }  # fmt: skip
    outputs = {name: tensor.cpu().contiguous().clone() for name, tensor in first.outputs.items()}
    save_file(outputs, file)
    return {"file": str(file), "names": list(outputs), "settled": settled}


def _failed(verdict: Verdict) -> dict[str, Any]:
    return {
        "failed": verdict.message, "cause_kind": verdict.cause_kind, "cause": verdict.cause,
        "raised": True,
    }  # fmt: skip


__all__ = ["Request", "chosen", "serve"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
