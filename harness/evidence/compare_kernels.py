"""Two kernels on the same cases, or a package's kernels in two versions, compared bit for bit."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file as load_tensors

from moe_parity.harness.evidence import compare_given
from moe_parity.harness.evidence.compare_bits import Explainer, Pair, wrong
from moe_parity.harness.evidence.compare_process import Side, Told, served
from moe_parity.references.errors import ParityError
from moe_parity.references.language import parse_id
from moe_parity.references.stages import stage_named
from moe_parity.reports.comparison import Comparison, Item, State

EXPLAINED = 4
"""Changed cases of one kernel in one format that are explained; of the others it is said that they
changed."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is compared, and how."""

    base: tuple[str, ...] = ()
    candidate: tuple[str, ...] = ()
    """Kernel files, or names."""
    vendor: str = ""
    """Or all kernels of a package, by the name of its folder of adapters."""
    variables: tuple[Mapping[str, str], Mapping[str, str]] = field(default_factory=lambda: ({}, {}))
    """Environment of the base and of the candidate."""
    names: tuple[str, str]
    """What the sides are called."""
    device: str = "auto"
    seed: int = 0
    cases: tuple[str, ...] = ()
    """Case ids, ``@<seed>`` behind them; none where the base chooses."""
    case_from: str = ""
    """Or captured tensors: the base says what it takes of them."""
    seconds: float = 0.0


def compare(ask: Ask) -> Comparison:
    """Run both sides, one after the other, and compare what they gave.

    Raises ParityError, one sentence, for a side that cannot be loaded.
    """
    with _folder() as folder:
        cases = [("", key if "@" in key else f"{key}@{ask.seed}", "") for key in ask.cases]
        base = _run(ask, 0, cases or None, folder)
        cases = cases or [
            (kernel, key, told.get("given", ""))
            for (kernel, key), told in base.cases.items()
            if "given" in told
        ]
        candidate = _run(ask, 1, _matched(base, cases), folder)
        items = list(_items(base, candidate))
    lost = [side for side in (base, candidate) if side.lost]
    return Comparison(
        base=ask.names[0], candidate=ask.names[1], items=tuple(items),
        notes=tuple(_notes(base, candidate)),
        unfinished=f"the {lost[0].name}: {lost[0].lost.rstrip('.')}" if lost else "",
    )  # fmt: skip


@contextmanager
def _folder() -> Iterator[Path]:
    """Give a temporary folder; raises ParityError where there is none to be had."""
    try:
        made = tempfile.TemporaryDirectory(prefix="parity-compare-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ParityError(
            f"no temporary folder for the outputs of both sides: {error.strerror}; set TMPDIR."
        ) from None
    with made as name:
        yield Path(name)


def _run(ask: Ask, which: int, cases: Any, folder: Path) -> Side:
    request = {
        "targets": (ask.base, ask.candidate)[which], "vendor": ask.vendor, "device": ask.device,
        "seed": ask.seed, "cases": cases, "case_from": "" if which else ask.case_from,
    }  # fmt: skip
    name = ("base", "candidate")[which]
    if sys.stderr.isatty():
        print(f"running the {name}: {ask.names[which]}", file=sys.stderr)
    return served(name, request, folder, seconds=ask.seconds, variables=ask.variables[which])


def _matched(base: Side, wanted: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return the cases that the candidate is asked for: of any kernel, where the base has one."""
    if len(base.kernels) == 1:
        return [("", key, given) for _, key, given in wanted]
    return wanted


def _pairs(base: Side, candidate: Side) -> Iterator[tuple[str, str]]:
    """Yield kernels that are held against each other: of one name, or the only ones."""
    if len(base.kernels) == len(candidate.kernels) == 1:
        yield next(iter(base.kernels)), next(iter(candidate.kernels))
        return
    for name in dict.fromkeys((*base.kernels, *candidate.kernels)):
        yield (name if name in base.kernels else "", name if name in candidate.kernels else "")


def _items(base: Side, candidate: Side) -> Iterator[Item]:
    explainer = Explainer()
    for old, new in _pairs(base, candidate):
        if not old or not new:
            side, own = (base, old) if old else (candidate, new)
            missing = "candidate" if old else "base"
            yield _whole(side.kernels[own], f"the {missing} has no kernel {own}")
            continue
        left, right = base.kernels[old], candidate.kernels[new]
        if left["stage"] != right["stage"]:
            why = f"the base is a kernel of {left['stage']}, the candidate of {right['stage']}"
            yield _whole(left, why)
            continue
        out = [(s.name, k["unavailable"]) for s, k in ((base, left), (candidate, right))]
        cannot = [f"the {name} cannot run here: {why}" for name, why in out if why]
        if len(cannot) == len(out):
            cannot = [f"no side can run here: {left['unavailable']}"]
        if cannot:
            yield _whole(left, cannot[0].rstrip("."))
            continue
        yield from _cases(base, candidate, (old, new), explainer)


def _whole(kernel: Told, reason: str) -> Item:
    return Item(
        state=State.APART, stage=kernel["stage"], kernel=kernel["kernel"], case="", reason=reason
    )


def _cases(
    base: Side, candidate: Side, names: tuple[str, str], explainer: Explainer
) -> Iterator[Item]:
    old, new = names
    stage = base.kernels[old]["stage"]
    explained: dict[tuple[object, ...], int] = {}
    refusal, some = "", False
    for (name, key), left in base.cases.items():
        if name != old:
            continue
        right = candidate.cases.get((new, key))
        if left.get("declined") and (right is None or right.get("declined")):
            refusal = refusal or f"no side takes {key}: {left['declined'].rstrip('.')}"
            continue
        some = True
        if right is None:
            # a side that was lost has said so
            yield _apart(stage, new, key, "the candidate did not come to it")
        elif "file" in left and "file" in right:
            yield _compared(stage, new, key, (left, right), explainer, explained)
        else:
            yield _not_run(stage, new, key, left, right)
    if refusal and not some:
        yield _whole(base.kernels[old], refusal)


def _apart(stage: str, kernel: str, key: str, reason: str) -> Item:
    return Item(state=State.APART, stage=stage, kernel=kernel, case=key, reason=reason)


def _not_run(stage: str, kernel: str, key: str, left: Told, right: Told) -> Item:
    """Return what became of a case that one side or both did not run well."""
    for name, told in (("base", left), ("candidate", right)):
        if told.get("declined"):
            return _apart(stage, kernel, key, f"the {name} declines it: {told['declined']}")
    if "failed" in left and "failed" in right:
        # the case stands in the sentence: the reason is the same without it
        same = left["failed"].replace(key.partition("@")[0], "its case")
        return _apart(stage, kernel, key, f"both fail: {same}")
    failed, state = (right, State.FAILS) if "failed" in right else (left, State.FIXED)
    text = failed["failed"] if state is State.FAILS else f"the base failed: {failed['failed']}"
    return Item(
        state=state, stage=stage, kernel=kernel, case=key, sentence=text,
        cause_kind=failed.get("cause_kind", ""), cause=failed.get("cause", ""),
    )  # fmt: skip


def _compared(
    stage: str, kernel: str, key: str, told: tuple[Told, Told], explainer: Explainer,
    explained: dict[tuple[object, ...], int],
) -> Item:  # fmt: skip
    """Return whether bits are the same, and why not."""
    own = stage_named(stage)
    _, case = parse_id(f"it-{key}")
    inputs = own.inputs(case)
    if told[0]["given"]:
        case, inputs = compare_given.read(Path(told[0]["given"]), own)
    base, candidate = (
        {name: tensors[name] for name in side["names"]}
        for side, tensors in ((side, load_tensors(side["file"])) for side in told)
    )
    pair = Pair(
        who=kernel,
        stage=own,
        case=case,
        inputs=inputs,
        base=base,
        candidate=candidate,
        settled=told[1]["settled"],
    )
    found = pair.differences()
    compared, differing = sum(d.of for d in found), wrong(found)
    if not differing:
        return Item(
            state=State.SAME, stage=stage, kernel=kernel, case=key, compared=compared
        )  # fmt: skip
    kind = (case.scale, case.mid_scale, case.dtype, case.group)
    explained[kind] = explained.get(kind, 0) + 1
    if explained[kind] > EXPLAINED:
        words = ", ".join(d.words for d in found if d.wrong)
        return Item(
            state=State.CHANGED, stage=stage, kernel=kernel, case=key, compared=compared,
            sentence=f"{own} of {kernel} has other bits on {case.id}: {words}.",
            differing=differing,
        )  # fmt: skip
    why = explainer.explain(pair)
    return Item(
        state=State.CHANGED, stage=stage, kernel=kernel, case=key, sentence=why.message,
        cause_kind=why.cause_kind, cause=why.cause, alternatives=why.alternatives,
        differing=differing, compared=compared,
    )  # fmt: skip


def _notes(base: Side, candidate: Side) -> Iterator[str]:
    """Yield versions of a package that the sides do not share."""
    told = []
    for name in base.kernels.keys() & candidate.kernels.keys():
        a, b = (side.kernels[name]["versions"] for side in (base, candidate))
        told += [f"{p} {a.get(p, 'absent')} and {b.get(p, 'absent')}" for p in a | b if a.get(p) != b.get(p)]  # fmt: skip  # noqa: E501
    if told:
        yield f"versions: {', '.join(sorted(set(told)))}."
