"""The set of witnesses that the project ships, and the two commands on witnesses."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from moe_parity.harness import witness
from moe_parity.harness.arithmetic import MODELS, DotCase
from moe_parity.harness.errors import ParityError
from moe_parity.harness.witness import WitnessError
from moe_parity.kernels import Kernel, KernelError, all_kernels, find
from moe_parity.references.spec import Case, InputDtype, ScaleFormat, Stage, Values

SEED = 11
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
    weights = kernel.stage is Stage.WEIGHT_QUANT
    plain = dataclasses.replace(
        Case(i=200, h=300) if weights else Case(m=24, h=512), values=Values.AIMED, seed=SEED
    )
    for scale in ScaleFormat:
        for dtype in (InputDtype.BF16,) if weights else (InputDtype.BF16, InputDtype.FP32):
            case = dataclasses.replace(plain, scale=scale, dtype=dtype)
            if kernel.supports(case, "cuda") is None:
                yield case


def record(out: Path, names: Iterable[str] = ()) -> int:
    """Record witnesses on a GPU: of the named kernels, or of everything that runs here.

    Prints a line for each file and returns 0.  Raises ParityError without a GPU, for an unknown
    kernel, and where ``out`` cannot be written.
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
    for kernel in kernels:
        reason = kernel.unavailable()
        if reason:
            print(f"skipped {kernel.name}: {reason}")
            continue
        for case in cases(kernel):
            recipe = kernel.recipes(case, "cuda")[0]
            kept = witness.of_kernel(kernel, case, recipe, _vendor(kernel))
            made += _write(kept, out / f"{kernel.name}-{case.id}.safetensors")
    print(f"{made} bytes of witnesses in {out}")
    return 0


def _vendor(kernel: Kernel) -> Mapping[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    if kernel.name.startswith("vllm"):
        return {"vllm": os.environ.get("MOE_PARITY_VLLM_VERSION", "installed")}
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
