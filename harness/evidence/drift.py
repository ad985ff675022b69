"""Version drift: the same case under two versions of a vendor, the difference named by decision.

Each version's bits are a witness, since two versions cannot share a process; both are replayed
first, so that the recipes between which the decision is named are proven, not believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_parity.harness.evidence import witness
from moe_parity.harness.evidence.witness import Witness
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Recipe, Stage
from moe_parity.references.recipes import ALL
from moe_parity.references.stages import stage_named


@dataclass(frozen=True, kw_only=True)
class Drift:
    """One case under two versions."""

    case: str
    """The id, kernel first."""
    versions: tuple[str, str]
    differing: dict[str, tuple[int, int]]
    """Output -> (differing, of): codes and scales apart."""
    decisions: tuple[str, ...]
    """``quant.apply: divide -> mul_recip``."""

    @property
    def sentence(self) -> str:
        """Return the drift in words."""
        before, after = self.versions
        parts = [f"{n} of {of} {name}" for name, (n, of) in self.differing.items() if n]
        if not parts:
            return f"{self.case}: {before} and {after} give the same bits."
        why = "; ".join(self.decisions) or "no decision of its recipe differs"
        return f"{self.case}: {', '.join(parts)} differ between {before} and {after}: {why}."


def drifts(before: Path, after: Path) -> Iterator[Drift]:
    """Yield every case of which both folders hold a witness, in order.

    Raises ParityError where a witness does not replay, and where the folders share no case.
    """
    old, new = _kernels(before), _kernels(after)
    common = sorted(old.keys() & new.keys())
    if not common:
        raise ParityError(f"{before} and {after} hold no witness of the same kernel and case.")
    for case in common:
        yield _compare(case, old[case], new[case])


def _kernels(folder: Path) -> dict[str, Witness]:
    found = {}
    for path in witness.paths_of([folder]):
        witness.check(path)
        kept = witness.read(path)[0]
        if kept.kind == "kernel":
            found[f"{kept.detail}#{kept.seed}"] = kept
    return found


def _compare(case: str, old: Witness, new: Witness) -> Drift:
    differing = {
        name: (int((old.tensors[name] != new.tensors[name]).sum()), old.tensors[name].numel())
        for name in sorted(old.tensors)
    }
    stage = stage_named(old.detail.partition("/")[0])
    named = tuple(changes(stage, ALL[old.recipe], ALL[new.recipe]))
    identity = case.partition("#")[0].partition("/")[2]
    return Drift(
        case=identity, versions=(_version(old), _version(new)), differing=differing,
        decisions=named,
    )  # fmt: skip


def _version(kept: Witness) -> str:
    for name in ("vllm", "sgl-deep-gemm", "triton"):
        if name in kept.provenance:
            return f"{name} {kept.provenance[name]}"
    return "an unknown version"


def changes(stage: Stage[Any], old: Recipe, new: Recipe) -> Iterator[str]:
    """Yield the decisions on which two recipes differ in a stage."""
    for name, one, other in old.changes(new, stage.acting):
        yield f"{name}: {one.value} -> {other.value}"


def report(before: Path, after: Path) -> int:
    """Print a sentence for every case and a sum; return 0."""
    found = list(drifts(before, after))
    for drift in found:
        print(drift.sentence)
    moved = [d for d in found if any(n for n, _ in d.differing.values())]
    total = sum(n for d in moved for n, _ in d.differing.values())
    print(f"{len(moved)} of {len(found)} cases differ, in {total} outputs")
    return 0
