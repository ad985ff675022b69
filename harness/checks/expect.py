"""The flow of checks in a test: every verdict recorded, a skip with its reason, red raised."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from moe_parity.harness.cases.budget import CPU_COST, WRITTEN_COST, skip_of
from moe_parity.harness.cases.grid import labels
from moe_parity.harness.cases.sequences import base_of, batched, sequences
from moe_parity.harness.cases.sweep import swept
from moe_parity.harness.checks.configs import configs, edges
from moe_parity.harness.checks.flow import bits, check, overran
from moe_parity.harness.checks.invariance import invariance
from moe_parity.harness.checks.sequence import sequence
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.session.skips import skip_test
from moe_parity.harness.session.watch import Overrun, current
from moe_parity.kernels import Kernel
from moe_parity.kernels.registry import builtin
from moe_parity.references.language import Case, Check, Skip, Why


class Recorder(Protocol):
    """What takes the fields of a record."""

    def add(self, record_fields: Mapping[str, Any]) -> None:
        """Add what a check found."""


def needs(kernel: Kernel, case: Case, device: str, most: int = CPU_COST) -> None:
    """Skip the running test where a case does not run here; ``most`` is what it may cost."""
    reason = skip_of(kernel, case, device, most)
    if reason is not None:
        skip_test(reason)


def expect(
    kernel: Kernel,
    case: Case,
    device: str,
    recorder: Recorder,
    *,
    power: bool = False,
    inputs: Any = None,
) -> None:
    """Run a kernel's contract on a case; skip with a reason, or fail with the first red check.

    ``power`` also measures how many outputs could have been red.
    """
    __tracebackhide__ = True
    needs(kernel, case, device, WRITTEN_COST)
    current().case(f"{kernel.name}-{case.id}", repro(kernel, case))
    verdicts = check(kernel, case, device, power=power, inputs=inputs)
    record(kernel, case, device, verdicts, recorder)


def expect_calls(
    kernel: Kernel, name: Check, device: str, recorder: Recorder, *, seed: int = 0
) -> None:
    """Hold a kernel to its contract of several calls, ``sequence`` or ``invariance``.

    The cases are small ones of its own stage with that base seed.  Skips with a reason, or fails
    with the first red verdict.
    """
    __tracebackhide__ = True
    if name not in kernel.contract.checks:
        skip_test(Skip(Why.UNSUPPORTED, f"{kernel.name} does not promise {name}."))
    base = base_of(kernel, device)
    case = base if name == Check.SEQUENCE or base is None else batched(kernel, base, device)
    if base is None or case is None:
        reason = kernel.why_not(next(iter(kernel.stage.witness_cases())), device)
        skip_test(reason or Skip(Why.UNSUPPORTED, f"{kernel.name} takes no small case here."))
    case = dataclasses.replace(case, seed=seed)
    needs(kernel, case, device)
    current().case(f"{kernel.name}-{case.id}", repro(kernel, case))
    if name == Check.SEQUENCE:
        verdicts = sequence(kernel, sequences(kernel, case, device), device)
    else:
        verdicts = invariance(kernel, case, device)
    record(kernel, case, device, verdicts, recorder)


def expect_configs(kernel: Kernel, device: str, recorder: Recorder, *, seed: int = 0) -> None:
    """Hold every configuration of a kernel to the bits of a recipe, on small cases of its own.

    Skips with a reason where there is one configuration, or fails with the first red verdict.
    """
    __tracebackhide__ = True
    if Check.CONFIGS not in kernel.contract.checks:
        skip_test(Skip(Why.UNSUPPORTED, f"{kernel.name} does not promise {Check.CONFIGS}."))
    cases = edges(kernel, device, seed)
    if not cases:
        reason = kernel.why_not(next(iter(kernel.stage.witness_cases())), device)
        skip_test(reason or Skip(Why.UNSUPPORTED, f"{kernel.name} takes no small case here."))
    needs(kernel, cases[0], device)
    failed: AssertionError | None = None
    several = False
    for case in cases:
        current().case(f"{kernel.name}-{case.id}", repro(kernel, case))
        verdicts = list(configs(kernel, case, device))
        if verdicts[0].verdict == "skip":
            break
        several = True
        try:
            record(kernel, case, device, verdicts, recorder)
        except AssertionError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    if not several:
        skip_test(Skip(Why.UNSUPPORTED, f"{kernel.name} has one configuration."))


def expect_sizes(
    kernel: Kernel, device: str, recorder: Recorder, *, drawn: int, seed: int = 0
) -> None:
    """Demand the bits of the recipe at every size that a kernel may choose by.

    ``drawn`` is how many cases a run draws for a kernel, by which the budget of the virtual GPU
    grows.  One record where all sizes are right, and one of the first that is not.
    """
    __tracebackhide__ = True
    cases = swept(kernel, device, drawn, seed)
    if not cases:
        reason = kernel.why_not(next(iter(kernel.stage.witness_cases())), device)
        skip_test(reason or Skip(Why.UNSUPPORTED, f"{kernel.name} takes no small case here."))
    needs(kernel, cases[0], device)
    compared, verdict = 0, None
    for case in cases:
        current().case(f"{kernel.name}-{case.id}", repro(kernel, case))
        verdict = bits(kernel, case, device)
        if verdict.failed:
            break
        compared += verdict.compared
    assert verdict is not None
    if not verdict.failed:
        verdict = dataclasses.replace(verdict, compared=compared, digest="")
    record(kernel, case, device, [verdict], recorder)


def record(
    kernel: Kernel, case: Case, device: str, verdicts: Iterable[Verdict], recorder: Recorder
) -> None:
    """Record verdicts with the seconds each took; raise AssertionError with the first red one."""
    __tracebackhide__ = True
    failed = []
    start = time.perf_counter()
    try:
        for verdict in verdicts:
            now = time.perf_counter()
            recorder.add(fields(kernel, case, device, verdict, now - start))
            start = now
            if verdict.failed:
                failed.append(f"{verdict.message} Reproduce: {repro(kernel, case, verdict)}")
    except Overrun as error:
        verdict = overran(kernel, case, current().seconds, error)
        recorder.add(fields(kernel, case, device, verdict, time.perf_counter() - start))
        raise Overrun(f"{verdict.message} Reproduce: {repro(kernel, case)}") from None
    if failed:
        raise AssertionError(failed[0])


def claim(recorder: Recorder, name: str, fault: str = "", **about: Any) -> None:
    """Record a check that is not about one kernel on one case; raise AssertionError on a fault.

    ``about`` are further fields of the record.
    """
    __tracebackhide__ = True
    about.setdefault("bound", "exact")
    recorder.add({"check": name, "verdict": "fail" if fault else "pass", "message": fault, **about})
    assert not fault, fault


def repro(kernel: Kernel, case: Case, verdict: Verdict | None = None) -> str:
    """Return the command that runs this case again; it loads a kernel's own file first.

    A red ``verdict`` of a sequence is reproduced by its calls, one of its check alone by its name.
    """
    file = "" if builtin(kernel) else f" --kernel {kernel.source}"
    if verdict is not None and verdict.sequence:
        calls = "' '".join(verdict.sequence)
        return f"parity repro '{calls}'{file}"
    alone = verdict is not None and verdict.check == Check.INVARIANCE
    option = f" --check {Check.INVARIANCE}" if alone else ""
    option += f" --config '{verdict.config}'" if verdict is not None and verdict.config else ""
    return f"parity repro '{kernel.name}-{case.id}' --seed {case.seed}{option}{file}"


@lru_cache(maxsize=64)
def digest(path: Path) -> str:
    """Return twelve digits of the SHA-256 of a file, or of all of the package that it is in."""
    total = hashlib.sha256()
    inside = (path.parent / "__init__.py").exists()
    for source in sorted(path.parent.glob("*.py")) if inside else [path]:
        total.update(source.read_bytes())
    return total.hexdigest()[:12]


def sources(kernel: Kernel) -> dict[str, str]:
    """Return the digests of a kernel's own file, and of its package's files that it is of."""
    taken = {name: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
             for name, path in kernel.files().items() if path.is_file()}  # fmt: skip
    return {kernel.source.name: digest(kernel.source), **taken}


def fields(
    kernel: Kernel, case: Case, device: str, verdict: Verdict, seconds: float = 0.0
) -> dict[str, Any]:
    """Return a verdict as the fields of a record."""
    told = verdict.fields()
    stage = told.pop("stage") or kernel.stage.name
    told.pop("sequence"), told.pop("config")  # the line that reproduces it says them
    if verdict.digest:
        # a drawn case is another one in another run: bits are compared where the cases are one
        told["digest"] = f"{case.id}@{case.seed} {verdict.digest}"
    return (
        told
        | labels(kernel, case)
        | {
            "stage": stage,
            "shape": kernel.stage.size_words(case),
            "device": kernel.runs_on(device),
            "bound": "exact",
            "poison": True,
            "contract": kernel.contract.words,
            "repro": repro(kernel, case, verdict) if verdict.failed else "",
            "seconds": seconds,
            "sources": sources(kernel),
        }
    )
