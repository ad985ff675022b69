"""The checks ``no_sync`` and ``no_recompile``: measured for every kernel, demanded where promised.

A kernel whose contract does not promise one is never red: what was measured is the reason of a
skip, and green means that the promise could be made.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from moe_parity.harness.calling import graph
from moe_parity.harness.calling.poison import PoisonedAllocator
from moe_parity.harness.calling.recording import Wait
from moe_parity.harness.calling.run import aliased, run, settings_kept
from moe_parity.harness.checks.flow import BROKEN, raised
from moe_parity.harness.checks.replay import replay
from moe_parity.harness.checks.verdict import Verdict, caused, found
from moe_parity.harness.diagnosis.cause import Cause, CauseKind
from moe_parity.kernels import Call, Kernel
from moe_parity.kernels.registry import builtin
from moe_parity.references.language import Case, Check

EDGES = tuple(n for power in (16, 32, 64, 128, 256) for n in (power - 1, power, power + 1))
WARMED = tuple(sorted({*range(1, 17), *EDGES}))
"""The sizes that a server calls before it serves: the first 16, and around powers of two."""
SERVED = (*range(1, 71), 96, 100, 200)
"""The sizes that it then meets."""

FEW, FEW_MORE = (1, 2, 3, 16, 17, 32), (5, 24, 33)
"""The same for a kernel that is run each time."""


def served(kernel: Kernel, case: Case, device: str) -> Iterator[Verdict]:
    """Yield what a contract says of calls in a server, beside the checks of one call."""
    checks = kernel.contract.checks
    if Check.REPLAY in checks:
        yield replay(kernel, case, device)
    if Check.NO_SYNC in checks:
        yield no_sync(kernel, case, device)
    if Check.NO_RECOMPILE in checks:
        yield no_recompile(kernel, case, device)


def no_sync(kernel: Kernel, case: Case, device: str, *, inputs: Any = None) -> Verdict:
    """Call a kernel once and look for what waits for the GPU, or copies from the host."""
    made = kernel.stage.inputs(case, device) if inputs is None else inputs
    try:
        if device == "cuda" or not builtin(kernel):
            run(kernel, case, made)  # compiles and caches
        if device == "cuda":
            stop = graph.waiting(kernel, lambda: _call(kernel, case, made))
            words = stop.words if stop else ""
        else:
            words = _first(graph.waits_of(kernel, _call(kernel, case, made)))
    except BROKEN as error:
        return raised(kernel, case, error, Check.NO_SYNC)
    told = f"its call {words}" if words else ""
    return _promised(kernel, Check.NO_SYNC, told, "waits_for_gpu", compared=1)


def _first(waits: list[Wait]) -> str:
    """Return the first wait in words, one for the GPU before a copy from the host."""
    return min(waits, key=lambda wait: wait.copies).words if waits else ""


def no_recompile(kernel: Kernel, case: Case, device: str) -> Verdict:
    """Call a kernel at many numbers of rows, after some, and look for what is compiled anew.

    The forms of the arguments of each launch say what Triton compiles, and nothing is run; on a GPU
    the binaries are counted as well.
    """
    reason = _unmeasurable(kernel, case, device)
    if reason:
        return Verdict(check=Check.NO_RECOMPILE, verdict="skip", reason=f"{kernel.name}: {reason}.")
    try:
        compared, words = _specialised(kernel, case, device)
        if device == "cuda" and not words:
            compared, words = _compiled(kernel, case, device)
    except BROKEN as error:
        return raised(kernel, case, error, Check.NO_RECOMPILE)
    return _promised(kernel, Check.NO_RECOMPILE, words, "compiles_anew", compared)


def _promised(kernel: Kernel, check: Check, words: str, name: str, compared: int = 0) -> Verdict:
    """Return red where a promise is broken, and what was measured where none was made."""
    if words and check not in kernel.contract.checks:
        reason = f"{kernel.name}: {check} is not promised, and does not hold: {words}."
        return Verdict(check=check, verdict="skip", reason=reason)
    if not words:
        return found(check, "", compared=compared)
    text = f"{kernel.stage} of {kernel.name} promises {check}, and {words}."
    return caused(found(check, text), Cause(kind=CauseKind.CALL, name=name, words=words))


def _unmeasurable(kernel: Kernel, case: Case, device: str) -> str:
    if not kernel.triton:
        return "it is not said to be a Triton kernel, so nothing tells what it compiles"
    if "m" not in kernel.stage.sizes:
        return f"{kernel.stage} has no batch"
    if device == "cuda":
        return ""
    made = kernel.stage.inputs(case, device)
    if not builtin(kernel):
        run(kernel, case, made)
    waits = [w for w in graph.waits_of(kernel, _call(kernel, case, made)) if not w.copies]
    return f"its launches depend on data: its call {waits[0].words}" if waits else ""


def _call(kernel: Kernel, case: Case, inputs: Any) -> Call:
    device = kernel.stage.handed(inputs)[0].device
    names = kernel.stage.outputs(case, inputs)
    return Call(
        case=case, stage=kernel.stage, inputs=aliased(inputs),
        allocate=PoisonedAllocator(device=str(device), poison=0xFF, names=names),
        config=kernel.config(case, device.type),
    )  # fmt: skip


def _sized(kernel: Kernel, case: Case, device: str, sizes: Iterable[int]) -> Iterator[Call]:
    """Yield a call for each number of rows that the kernel takes; the inputs are made once."""
    stage = kernel.stage
    chosen = [m for m in sizes if _takes(kernel, case, device, m)]
    if not chosen:
        return
    most = dataclasses.replace(case, m=max(chosen))
    inputs = stage.inputs(most, device)
    for m in chosen:
        own, made = dataclasses.replace(case, m=m), None
        if stage.units(inputs) == max(chosen):
            part = stage.some(most, inputs, torch.arange(m, device=device))
            own, made = part.case, part.inputs
        yield _call(kernel, own, stage.inputs(own, device) if made is None else made)


def _takes(kernel: Kernel, case: Case, device: str, m: int) -> bool:
    return kernel.declines(dataclasses.replace(case, m=m), device) is None


# --- on a CPU ------------------------------------------------------------------------------------


def _specialised(kernel: Kernel, case: Case, device: str) -> tuple[int, str]:
    """Return the launches looked at, and what would be compiled while serving, in words."""
    from moe_parity.kernels.virtual_gpu import dry, record
    from moe_parity.kernels.virtual_gpu.specialize import forms, integers

    warmed: dict[str, set[str]] = defaultdict(set)
    seen: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    values: dict[tuple[str, str], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    new: dict[str, int] = {}
    count = 0
    # What a kernel of somebody's keeps from call to call may come from its launches: they run.
    own = builtin(kernel) or Check.NO_RECOMPILE in kernel.contract.checks
    quiet = dry if own else nullcontext
    for warm, sizes in ((True, WARMED if own else FEW), (False, SERVED if own else FEW_MORE)):
        for call in _sized(kernel, case, device, sizes):
            with settings_kept(), record() as tape, quiet():
                kernel.run(call)
            for launch in tape.launches:
                count += 1
                shown, ints, name = forms(launch), integers(launch), launch.kernel.__name__
                given = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
                rest = str({key: form for key, form in shown.items() if key not in ints})
                for argument in ints:
                    seen[name, rest][argument].add(shown[argument])
                    values[name, rest][argument].add(given.get(argument, 0))
                key = str(shown)
                if warm:
                    warmed[name].add(key)
                elif key not in warmed[name]:
                    warmed[name].add(key)
                    new.setdefault(name, call.case.m)
    faults = [
        f"specialises on the batch: argument {argument} of {name} has {len(kinds)} forms"
        for (name, rest), arguments in seen.items()
        for argument, kinds in arguments.items()
        if len(kinds) > 1 and len(values[name, rest][argument]) > 1
    ]
    faults += [f"compiles {name} anew for m = {m}" for name, m in new.items()]
    return count, next(iter(faults), "")


# --- on a GPU ------------------------------------------------------------------------------------


def _compiled(kernel: Kernel, case: Case, device: str) -> tuple[int, str]:
    """Return the calls made, and which kernels were compiled while serving, in words."""
    from moe_parity.kernels.virtual_gpu import record

    kernels: dict[int, Any] = {}
    before: dict[str, int] = {}
    count = 0
    for sizes in (WARMED, SERVED):
        before = _binaries(kernels.values())
        for call in _sized(kernel, case, device, sizes):
            with record() as tape, settings_kept():
                kernel.run(call)
            kernels |= {id(item.kernel): item.kernel for item in tape.launches}
            count += 1
        torch.cuda.synchronize()
    grown = {n: k - before.get(n, 0) for n, k in _binaries(kernels.values()).items()}
    faults = [f"compiles {name} {n} times while serving" for name, n in grown.items() if n]
    return count, next(iter(faults), "")


def _binaries(kernels: Iterable[Any]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for kernel in kernels:
        found[kernel.__name__] += sum(len(cache[0]) for cache in kernel.device_caches.values())
    return found
