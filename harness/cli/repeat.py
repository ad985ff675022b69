"""`parity repro --repeat N`: one case many times, for races that only a real GPU shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moe_parity.harness.checks.repeat import repeat
from moe_parity.harness.session import environment
from moe_parity.kernels import find, load_file
from moe_parity.references.errors import ParityError
from moe_parity.references.language import parse_id


def run(
    ids: Sequence[str], seed: int, times: int, device: str | None = None, files: Iterable[str] = ()
) -> int:
    """Run ``<kernel>-<case id>`` ``times`` times and print what differs; return 0 or 1.

    ``files`` are kernel files to load first.  Raises ParityError for an id that is not understood,
    an unknown kernel, a case that the kernel does not take here, less than two runs, or several
    ids.
    """
    if len(ids) > 1:
        raise ParityError(f"--repeat is about one case, got {len(ids)} ids.")
    for file in files:
        load_file(file)
    name, case = parse_id(ids[0], seed)
    kernel = find(name)
    device = device or ("cuda" if environment.gpu() else "cpu")
    reason = kernel.why_not(case, device)
    if reason:
        raise ParityError(f"{kernel.name} does not take {case.id} here: {reason}")
    verdict = repeat(kernel, case, device, times)
    equal = f"{times} runs, {verdict.compared} outputs compared with those of the first"
    print(f"{verdict.verdict:4}  {verdict.check:18}  {verdict.message or equal}")
    return 1 if verdict.failed else 0
