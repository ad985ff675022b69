"""Two results files compared: record by record, by verdict, cause and digest of the bits.

A record holds no outputs.  What proves that bits are the same is the digest that the checks of bits
write down; the other checks are compared by what they said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_parity.reports.causes import cause_of
from moe_parity.reports.comparison import Comparison, Item, State
from moe_parity.reports.records import ITEM_CHECK, SEVERITY, Record, Run
from moe_parity.reports.results import FILE_NAME, read

BITS = "exact"
"""The check that looks at every bit; ``exact_<stage>`` are those inside a layer."""
DECIDING = ("torch", "triton")
"""Whose other version may change the bits of any kernel."""
VENDORS = {
    "vllm": ("vllm",), "sglang": ("sglang",), "flashinfer-python": ("flashinfer", "trtllm"),
    "sgl-deep-gemm": ("deepgemm",), "deep-gemm": ("deepgemm",),
}  # fmt: skip
"""Distribution -> how the names of the kernels begin that come from it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What keeps records of two runs from being compared."""

    everything: str = ""
    """Why nothing is comparable, empty where something is."""
    kernels: Mapping[str, str]
    """How the names of kernels begin that are not comparable -> why."""

    def of(self, record: Record) -> str:
        """Return why a record is not comparable, or nothing."""
        own = (why for start, why in self.kernels.items() if record.kernel.startswith(start))
        return self.everything or next(own, "")


def compare(base: Path, candidate: Path, *, any_version: bool = False) -> Comparison:
    """Compare two results files, or the folders that hold one.

    ``any_version`` compares what other versions of torch, Triton or a vendor gave as well.  Raises
    ParityError, one sentence, for a file that cannot be read.
    """
    old, new = _read(base), _read(candidate)
    setting = _setting(old, new, any_version=any_version)
    known = {record.id: record for record in new.records}
    items = []
    for record in (r for r in old.records if r.check != ITEM_CHECK):
        other = known.pop(record.id, None)
        if other is None:
            items.append(_apart(record, setting.of(record) or _missing("candidate", new, record)))
        else:
            items.append(_pair(record, other, setting))
    for record in known.values():
        if record.check != ITEM_CHECK:
            items.append(_apart(record, setting.of(record) or _missing("base", old, record)))
    moved = {item.case.rpartition(":")[0] for item in items if item.state is not State.SAME}
    items += list(_tests(old, new, setting, moved))
    notes = [*_notes(old, new)]
    if any(r.check != ITEM_CHECK for r in (*old.records, *new.records)) and not any(
        record.digest for record in old.records
    ):
        notes.append("The base holds no digests: verdicts and causes are compared, no bits.")
    return Comparison(
        base=str(base), candidate=str(candidate), items=tuple(items), notes=tuple(notes),
        unfinished=_unfinished(old, new, items),
    )  # fmt: skip


def _missing(side: str, run: Run, record: Record) -> str:
    """Say why a side lacks a record: it skips the whole test, or does not have it."""
    skips = (r.reason for r in run.tests if r.nodeid == record.nodeid and r.verdict == "skip")
    reason = next(skips, "")
    return f"the {side} skips it: {reason}" if reason else f"the {side} has no such record"


def _read(path: Path) -> Run:
    return read(path / FILE_NAME if path.is_dir() else path, partial=True)


def _unfinished(old: Run, new: Run, items: list[Item]) -> str:
    for name, run in (("base", old), ("candidate", new)):
        if run.end is None:
            return f"the run of the {name} was interrupted"
    bits = [item for item in items if item.state in (State.SAME, State.CHANGED)]
    blind = [item for item in items if item.reason.endswith(NO_DIGEST)]
    return f"no bits were compared: {blind[0].reason}" if blind and not bits else ""


# --- the setting ---------------------------------------------------------------------------------

NO_DIGEST = "holds no digest"


def _setting(old: Run, new: Run, *, any_version: bool) -> Setting:
    facts = [
        ("device", old.info.device, new.info.device),
        ("GPU", old.info.environment.get("gpu", ""), new.info.environment.get("gpu", "")),
        ("seed", str(old.info.seed), str(new.info.seed)),
    ]
    if not any_version:
        facts += [(name, *_versions(old, new, name)) for name in DECIDING]
    why = [f"{w} {a or 'none'} and {b or 'none'}" for w, a, b in facts if a != b]
    vendors: dict[str, str] = {}
    for name, starts in VENDORS.items() if not any_version else ():
        a, b = _versions(old, new, name)
        if a != b:
            told = f"the runs have {name} {a or 'absent'} and {b or 'absent'} (--any-version)"
            vendors |= dict.fromkeys(starts, told)
    hint = "" if any_version or not _only_versions(facts) else " (--any-version)"
    return Setting(
        everything=f"the runs have {', '.join(why)}{hint}" if why else "", kernels=vendors
    )


def _only_versions(facts: list[tuple[str, str, str]]) -> bool:
    return all(a == b for word, a, b in facts if word not in DECIDING)


def _versions(old: Run, new: Run, name: str) -> tuple[str, str]:
    return old.info.environment.get(name, ""), new.info.environment.get(name, "")


def _notes(old: Run, new: Run) -> Iterator[str]:
    if old.info.commit != new.info.commit:
        a, b = ((run.info.commit or "unknown")[:12] for run in (old, new))
        yield f"moe-parity itself: commit {a} and {b}."


# --- records -------------------------------------------------------------------------------------


def _pair(old: Record, new: Record, setting: Setting) -> Item:
    """Return what became of a record that both sides have."""
    reason = setting.of(old)
    if reason:
        return _apart(old, reason)
    skips = [r.verdict == "skip" for r in (old, new)]
    if all(skips):
        return _apart(old, "both skip it")
    if any(skips):
        side, skipped = ("base", old) if skips[0] else ("candidate", new)
        return _apart(old, f"the {side} skips it: {skipped.reason}")
    bad = [SEVERITY[r.verdict] > SEVERITY["pass"] for r in (old, new)]
    if bad == [False, True]:
        return _moved(State.FAILS, old, new, new.message or new.check)
    if bad == [True, False]:
        return _moved(State.FIXED, old, new, f"it was red: {old.message or old.check}", cause=old)
    if all(bad) and (cause_of(old), old.verdict) != (cause_of(new), new.verdict):
        return _moved(State.CHANGED, old, new, f"red for another cause: {new.message}")
    return _bits(old, new)


def _bits(old: Record, new: Record) -> Item:
    """Return what became of a record whose verdict is the same."""
    if old.check != BITS and not old.check.startswith(f"{BITS}_"):
        return _item(State.AGREED, old)
    for side, record in (("base", old), ("candidate", new)):
        if not record.digest:
            several = record.examples > 1
            why = "stands for several drawn cases" if several else NO_DIGEST
            return _apart(old, f"the {side} {why}")
    (case, before), (other, after) = (r.digest.rsplit(" ", 1) for r in (old, new))
    if case != other:
        return _apart(old, f"drawn cases: the base judged {case}, the candidate {other}")
    if before == after:
        return _item(State.SAME, old, compared=new.compared)
    if new.message:
        return _moved(State.CHANGED, old, new, new.message)
    return _moved(State.CHANGED, old, new, _recipes(old, new))


def _recipes(old: Record, new: Record) -> str:
    """Say what changed where both are green: the recipe that the kernel follows."""
    if old.recipe == new.recipe:
        return (
            f"{new.stage} of {new.kernel} has other bits on {new.shape or new.id}, and both are "
            f"green by recipe {new.recipe}: the recipe is another one in the two runs."
        )
    from moe_parity.references.recipes import ALL
    from moe_parity.references.stages import STAGES

    told = ""
    stage = STAGES.get(new.stage)
    if stage is not None and old.recipe in ALL and new.recipe in ALL:
        changes = ALL[old.recipe].changes(ALL[new.recipe], stage.acting)
        told = ", ".join(f"{name}={b.value} instead of {a.value}" for name, a, b in changes)
    told = f": {told}" if told else ""
    return (
        f"{new.stage} of {new.kernel} follows recipe {new.recipe}, and followed {old.recipe}{told}."
    )


def _tests(old: Run, new: Run, setting: Setting, told: set[str]) -> Iterator[Item]:
    """Yield tests whose own record changed where none of their checks says so: one that broke."""
    known = {record.id: record for record in new.tests}
    for record in old.tests:
        other = known.get(record.id)
        if other is None or setting.of(record) or record.id.rpartition(":")[0] in told:
            continue
        bad = [SEVERITY[r.verdict] > SEVERITY["pass"] for r in (record, other)]
        if bad == [False, True]:
            yield _moved(State.FAILS, record, other, other.message or "the test broke")
        elif bad == [True, False] and other.verdict == "pass":
            yield _moved(State.FIXED, record, other, f"it was red: {record.message}", cause=record)


def _item(state: State, record: Record, *, compared: int = 0) -> Item:
    return Item(
        state=state, stage=record.stage, kernel=record.kernel, case=record.id, compared=compared
    )


def _apart(record: Record, reason: str) -> Item:
    return Item(
        state=State.APART, stage=record.stage, kernel=record.kernel, case=record.id, reason=reason
    )


def _moved(
    state: State, old: Record, new: Record, sentence: str, *, cause: Record | None = None
) -> Item:
    why = cause or new
    known = cause_of(why) is not None
    return Item(
        state=state, stage=new.stage or old.stage, kernel=new.kernel or old.kernel, case=new.id,
        sentence=" ".join(sentence.split()), cause_kind=why.cause_kind if known else "",
        cause=why.cause if known else "", alternatives=why.alternatives if known else (),
        differing=new.differing, compared=new.compared,
    )  # fmt: skip
