"""The set of witnesses that the project ships, and the two commands on witnesses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from moe_parity.harness import stages
from moe_parity.harness.calling import isolate
from moe_parity.harness.evidence import witness
from moe_parity.harness.evidence.witness import WitnessError
from moe_parity.harness.silicon.models import MODELS, DotCase
from moe_parity.kernels import Kernel, KernelError, all_kernels, find, load_file
from moe_parity.kernels.registry import builtin
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, InputDtype, ScaleFormat, Stage, Values

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


GROUPED = Case(m=24, e=4, k=2, h=512, i=256, values=Values.AIMED, seed=SEED)
ACTIVATED = Case(m=128, e=5, i=256, values=Values.AIMED, seed=SEED)
SUMMED = Case(m=24, e=8, k=8, h=256, values=Values.AIMED, seed=SEED)
"""Cases of the middle stages; other sizes are added where a kernel takes another path."""


def cases(kernel: Kernel) -> Iterator[Case]:
    """Yield the cases in which a kernel is witnessed."""
    if kernel.stage is Stage.LAYER:
        return
    for case in middle_cases(kernel) if kernel.stage in stages.MIDDLE else quant_cases(kernel):
        if kernel.supports(case, "cuda") is None:
            yield case


def quant_cases(kernel: Kernel) -> Iterator[Case]:
    """Yield the aimed cases of a quantizer: formats and input types."""
    weights = kernel.stage is Stage.WEIGHT_QUANT
    plain = dataclasses.replace(
        Case(i=200, h=300) if weights else Case(m=24, h=512), values=Values.AIMED, seed=SEED
    )
    for scale in ScaleFormat:
        for dtype in (InputDtype.BF16,) if weights else (InputDtype.BF16, InputDtype.FP32):
            yield dataclasses.replace(plain, scale=scale, dtype=dtype)


def middle_cases(kernel: Kernel) -> Iterator[Case]:
    """Yield the aimed cases of a middle stage's kernel."""
    if kernel.stage in (Stage.FC1, Stage.FC2):
        dense = dataclasses.replace(GROUPED, e=1, k=1, m=48)
        shape = dense if kernel.supports(GROUPED, "cuda") else GROUPED
        yield shape
        yield dataclasses.replace(shape, scale=ScaleFormat.UE8M0)
        if kernel.triton:
            yield dataclasses.replace(shape, m=65, h=256, i=128)
    elif kernel.stage in (Stage.SWIGLU, Stage.SWIGLU_QUANT):
        for scale in ScaleFormat if kernel.stage is Stage.SWIGLU_QUANT else (ScaleFormat.FP32,):
            for clamp in (None, 9.97):
                yield dataclasses.replace(ACTIVATED, scale=scale, clamp=clamp)
    else:
        yield SUMMED


def record(out: Path, names: Iterable[str] = ()) -> int:
    """Record witnesses on a GPU: of the named kernels, or of everything that runs here.

    Prints a line for each file.  Each kernel runs in a process of its own, with a time limit: one
    that crashes or hangs is one failed line, and the result 1 instead of 0.  Raises
    ParityError without a GPU, for an unknown kernel, and where ``out`` cannot be written.
    """
    names = list(names)
    witness.provenance()  # refuses at once where there is no GPU
    try:
        kernels = [find(name) for name in names] or all_kernels()
    except KernelError as error:
        raise ParityError(str(error)) from None
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
        kept = witness.of_kernel(kernel, case, recipe, _vendor(kernel))
        _write(kept, Path(out) / f"{kernel.name}-{case.id}.safetensors")


def _vendor(kernel: Kernel) -> Mapping[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    from moe_parity.kernels.vendors.vllm import package as vllm_package

    if kernel.name.startswith("vllm"):
        return {"vllm": vllm_package.package().version}
    if kernel.name.startswith("deepgemm"):
        try:
            return {"sgl-deep-gemm": version("sgl-deep-gemm")}
        except PackageNotFoundError:
            return {}
    return {}


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
        except WitnessError as error:
            red += 1
            print(f"red   {error}")
        else:
            total += compared
            print(f"ok    {path.name}: {compared} outputs")
    print(f"{total} outputs as recorded" + (f"; {red} witnesses red" if red else ""))
    return 1 if red else 0
