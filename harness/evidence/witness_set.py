"""The set of witnesses that the project ships, and the two commands on witnesses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from moe_parity.harness.calling import isolate
from moe_parity.harness.evidence import witness
from moe_parity.harness.silicon.models import MODELS, DotCase
from moe_parity.kernels import Kernel, all_kernels, find, load_file
from moe_parity.kernels.registry import builtin
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case

SEED = 11
CHILDREN = 6
"""Processes that record at the same time."""
DOTS = (
    DotCase(unit="wgmma_fp8", m=64, n=16, k=128, spread=16, accumulator="wide"),
    DotCase(unit="wgmma_fp8", m=64, n=32, k=128, spread=4),
    DotCase(unit="wgmma_fp8", m=64, n=16, k=64, spread=8, accumulator="special", nan=True),
    DotCase(unit="mma_f16", m=16, n=64, k=128, spread=16, accumulator="wide"),
    DotCase(unit="mma_f16", m=16, n=64, k=128, spread=4),
    DotCase(unit="mma_f16", m=16, n=64, k=64, spread=8, accumulator="special", nan=True),
)


def cases(kernel: Kernel) -> Iterator[Case]:
    """Yield the cases in which a kernel is witnessed."""
    for case in kernel.stage.witness_cases():
        if kernel.declines(case, "cuda") is None:
            yield case


def record(out: Path, names: Iterable[str] = ()) -> int:
    """Record witnesses on a GPU: of the named kernels, or of everything that runs here.

    Prints a line for each file.  Each kernel runs in a process of its own, with a time limit: one
    that crashes or hangs is one failed line, and the result 1 instead of 0.  Raises
    ParityError without a GPU, for an unknown kernel, and where ``out`` cannot be written.
    """
    names = list(names)
    witness.provenance()  # refuses at once where there is no GPU
    kernels = [find(name) for name in names] or all_kernels()
    made = 0
    if not names:
        for name in MODELS:
            made += _write(witness.of_model(name, SEED), out / f"model-{name}.safetensors")
        for dot in DOTS:
            made += _write(witness.of_dot(dot, SEED), out / f"dot-{dot.name}.safetensors")
    red = 0
    with ThreadPoolExecutor(max_workers=CHILDREN) as pool:
        for kernel, ended in zip(kernels, pool.map(partial(_alone, out), kernels), strict=True):
            print(ended.output, end="")
            if not ended.ok:
                red += 1
                print(f"failed {kernel.name}: its process {ended.what}. {ended.error}".rstrip())
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(f"{size} bytes of witnesses in {out}" + (f"; {red} kernels failed" if red else ""))
    return 1 if red else 0


def _alone(out: Path, kernel: Kernel) -> isolate.Outcome:
    """Record one kernel in a process of its own."""
    file = "" if builtin(kernel) else str(kernel.source)
    code = (
        "from moe_parity.harness.evidence import witness_set\n"
        f"witness_set.record_kernel({str(out)!r}, {kernel.name!r}, {file!r})"
    )
    return isolate.run_python(code)


def record_kernel(out: str, name: str, file: str = "") -> None:
    """Record every case of one kernel and print a line for each; what it raises passes through."""
    if file:
        load_file(file)
    kernel = find(name)
    reason = kernel.unavailable()
    if reason:
        print(f"skipped {kernel.name}: {reason}")
        return
    for case in cases(kernel):
        recipe = kernel.recipes(case, "cuda")[0]
        kept = witness.of_kernel(kernel, case, recipe, kernel.versions())
        _write(kept, Path(out) / f"{kernel.name}-{case.id}.safetensors")


def _write(kept: witness.Witness, path: Path) -> int:
    witness.write(kept, path)
    size = path.stat().st_size
    print(f"{size:8} {path.name}")
    return size


def verify(paths: Iterable[str | Path] = ()) -> int:
    """Replay witnesses on the CPU, the shipped ones by default; return 0, or 1 where one is red.

    Prints a line for each; raises ParityError where there is none.
    """
    red = total = 0
    for path in witness.paths_of(paths):
        try:
            compared = witness.check(path)
        except ParityError as error:
            red += 1
            print(f"red   {error}")
        else:
            total += compared
            print(f"ok    {path.name}: {compared} outputs")
    print(f"{total} outputs as recorded" + (f"; {red} witnesses red" if red else ""))
    return 1 if red else 0
