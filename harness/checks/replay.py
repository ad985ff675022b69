"""The check ``replay``: a call captured once is right on whatever its inputs hold later.

Between two replays everything is done that a server does: the inputs are overwritten in place, a
larger call runs eagerly, memory is taken, filled with NaN and freed, on a GPU another stream works.
Before each one all outputs and workspaces are poisoned.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.calling import graph
from moe_parity.harness.calling.bystanders import Bystanders, bystanders
from moe_parity.harness.calling.graph import Captured, Stopped
from moe_parity.harness.calling.poison import POISONS
from moe_parity.harness.calling.recording import Recording
from moe_parity.harness.calling.run import run
from moe_parity.harness.checks.compare import Difference, differences, where
from moe_parity.harness.checks.flow import BROKEN, raised
from moe_parity.harness.checks.verdict import Verdict, caused, found
from moe_parity.harness.diagnosis.cause import Cause, CauseKind
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, Check, Routing, Values
from moe_parity.references.language.stage import Output, Outputs, tensors_of
from moe_parity.references.stages.sparse import LARGE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """Other contents of the captured inputs."""

    words: str
    """They follow ``replayed``."""
    tensors: list[Tensor]


def replay(kernel: Kernel, case: Case, device: str, *, inputs: Any = None) -> Verdict:
    """Capture a kernel on a case and replay it with changed inputs; one verdict.

    A kernel that cannot be captured is skipped with its own line, unless its contract promises
    ``no_sync``.
    """
    made = kernel.stage.inputs(case, device) if inputs is None else inputs
    if device == "cpu" and any(tensor.numel() >= LARGE for tensor in tensors_of(made)):
        reason = f"a CPU keeps no second copy of weights of {LARGE} elements and more"
        return Verdict(check=Check.REPLAY, verdict="skip", reason=reason)
    buffers = _owned(made)
    try:
        captured = graph.capture(kernel, case, buffers)
    except BROKEN as error:
        return raised(kernel, case, error, Check.REPLAY)
    if isinstance(captured, Stopped):
        return stopped(kernel, captured.words, Check.REPLAY)
    return _Replays(kernel, case, device, buffers, captured).verdict(made)


def stopped(kernel: Kernel, words: str, check: Check) -> Verdict:
    """Return the verdict of a kernel that cannot be in a graph."""
    text = f"its call {words}"
    if Check.NO_SYNC not in kernel.contract.checks:
        return Verdict(check=check, verdict="skip", reason=f"{kernel.name}: {text}.")
    cause = Cause(kind=CauseKind.CALL, name="waits_for_gpu", words=text)
    promised = f"{kernel.stage} of {kernel.name} promises never to wait, and {text}."
    return caused(found(check, promised), cause)


class _Replays:
    """The replays of one captured call."""

    def __init__(
        self, kernel: Kernel, case: Case, device: str, buffers: Any, captured: Captured
    ) -> None:
        self.kernel, self.case, self.device = kernel, case, device
        self.buffers, self.captured = buffers, captured
        self.outputs = kernel.stage.outputs(case, buffers)
        self.right = True
        """Whether the captured inputs, unchanged, give what a recipe says."""
        self.before: Outputs = {}
        self.bystanders: Bystanders | None = None
        """On a GPU, what stands in memory that a larger call has freed."""

    def verdict(self, made: Any) -> Verdict:
        """Replay on every change of the inputs until one is wrong."""
        compared = 0
        for n, given in enumerate(changes(self.kernel, self.case, self.device, made)):
            self._fill(given)
            if n and (words := self._moved()):
                return self._red("stale_output", words)
            self._between(n)
            if self.captured.freed:
                return self._red("freed_memory", FREED.format(self.captured.freed))
            got, total, wrong = self._replayed(n, given)
            if self.bystanders is not None and (hit := self.bystanders.hit):
                return self._red("freed_memory", TAKEN.format(hit))
            if n == 0 and wrong is not None and self._differs(got, self.captured.first) is None:
                self.right, wrong = False, None  # the check exact says so
            if wrong is not None:
                return self._why(given, got, wrong, POISONS[n % 2])
            compared, self.before = compared + total, got
        return found(Check.REPLAY, "", compared=compared)

    def _fill(self, given: Given) -> None:
        for buffer, tensor in zip(tensors_of(self.buffers), given.tensors, strict=True):
            buffer.copy_(tensor)

    def _once(self, given: Given, poison: int) -> Outputs:
        """Replay under a poison; the inputs are put back, should it write to them."""
        self.captured.poison(poison)
        self.captured.replay()
        got = self.captured.outputs()
        self._fill(given)
        return got

    def _replayed(self, n: int, given: Given) -> tuple[Outputs, int, Difference | None]:
        got = self._once(given, POISONS[n % 2])
        every = self._against_recipe(got)
        wrong = next((d for d in every if d.wrong), None) if self.right else None
        if self.device != "cpu" or not self.right:
            wrong = wrong or self._eager_differs(got)
        return got, sum(d.of for d in every), wrong

    def _against_recipe(self, got: Outputs) -> list[Difference]:
        stage = self.kernel.stage
        outputs = stage.outputs(self.case, self.buffers)
        live = stage.live(self.case, self.buffers)
        tried = []
        for recipe in self.kernel.recipes(self.case, self.device):
            want = stage.reference(self.case, self.buffers, recipe)
            seen = dict(list(got.items())[-1:]) if stage.partial else got
            tried.append(differences(outputs, seen, want, live))
        return min(tried, key=lambda every: sum(d.wrong for d in every))

    def _eager_differs(self, got: Outputs) -> Difference | None:
        return self._differs(got, run(self.kernel, self.case, self.buffers).outputs)

    def _differs(self, got: Outputs, want: Outputs) -> Difference | None:
        stage = self.kernel.stage
        outputs = stage.outputs(self.case, self.buffers)
        every = differences(outputs, got, want, stage.live(self.case, self.buffers))
        return next((d for d in every if d.wrong), None)

    def _moved(self) -> str:
        """Return whether the result changed as the inputs were overwritten, in words."""
        if callable(self.captured.returned):  # the host's part looks at the inputs of now
            return ""
        now = self.captured.outputs()
        every = differences(self.outputs, now, self.before, {})
        bad = next((d for d in every if d.wrong), None)
        if bad is None:
            return ""
        return (
            f"returns {bad.name} in memory of its inputs: overwriting them after a replay changes "
            f"{bad.words}"
        )

    def _between(self, n: int) -> None:
        """Do what a server does between two replays."""
        if n == 1:
            bigger = larger(self.kernel, self.case, self.device)
            if bigger is not None:
                run(self.kernel, bigger, self.kernel.stage.inputs(bigger, self.device))
            self.bystanders = bystanders() if self.device == "cuda" else None
        churn(self.device)

    def _why(self, given: Given, got: Outputs, wrong: Difference, poison: int) -> Verdict:
        """Return the red verdict with its cause: what the graph kept."""
        place = where(self.buffers, wrong.output, wrong.index)
        told = (
            f"replayed {given.words}: at {place} of {wrong.name} got {wrong.got}, expected "
            f"{wrong.want}; {wrong.words}"
        )
        if kept := self._kept_scalar():
            return self._red("frozen_scalar", f"keeps {kept}, and is wrong when {told}")
        if self._as_before(got, wrong):
            also = self._kept_state()
            return self._red("stale_output", f"leaves {wrong.name} as it was before, {told}{also}")
        again = self._once(given, POISONS[0] if poison == POISONS[1] else POISONS[1])[wrong.name]
        if not _alike(self.outputs, wrong.name, again, got[wrong.name]):
            if _is_poison(got[wrong.name], wrong, poison):
                also = self._kept_state()
                words = f"leaves {wrong.name} as it was before, {told}{also}"
                return self._red("stale_output", words)
            return self._red("poison_read", f"{UNSET}{told}")
        also = (
            "" if self._eager_differs(got) else "; an eager call gives the same: it keeps a state"
        )
        return self._red("replay_differs", f"is wrong when {told}{also}")

    def _as_before(self, got: Outputs, wrong: Difference) -> bool:
        """Whether what is wrong is what the replay before gave."""
        before, one = self.before.get(wrong.name), got[wrong.name]
        if before is None or before.shape != one.shape:
            return False
        at = wrong.index
        return _alike(self.outputs, wrong.name, one[at].reshape(1), before[at].reshape(1))

    def _kept_state(self) -> str:
        """Return whether an eager call on these inputs is wrong too, in words."""
        try:
            eager = run(self.kernel, self.case, self.buffers).outputs
        except BROKEN:
            return ""
        wrong = any(d.wrong for d in self._against_recipe(eager))
        return "; an eager call is wrong as well: it keeps a state" if wrong else ""

    def _kept_scalar(self) -> str:
        """Return a host scalar that a capture on these inputs would have otherwise, in words."""
        kept = self.captured.recording
        try:
            now = self.captured.again()
        except BROKEN:
            return ""
        return _other_scalar(kept, now) if kept is not None and now is not None else ""

    def _red(self, name: str, words: str) -> Verdict:
        text = f"{self.kernel.stage} of {self.kernel.name} {words}."
        cause = Cause(kind=CauseKind.CALL, name=name, words=words)
        return caused(found(Check.REPLAY, text), cause)


UNSET = (
    "reads memory that nothing in its graph has written, which holds anything in each replay, and "
    "is wrong when "
)
FREED = (
    "keeps the address of memory that it freed when it was called with more rows: {} pieces of "
    "what its graph uses are gone; never let go of a workspace that a graph may have seen"
)

TAKEN = (
    "writes to memory that it freed when it was called with more rows: {} bytes of what lies there "
    "by now are overwritten by a replay; never let go of a workspace that a graph may have seen"
)


def _alike(outputs: Mapping[str, Output], name: str, one: Tensor, other: Tensor) -> bool:
    """Whether two values of an output have the same bits."""
    if one.shape != other.shape:
        return False
    return not differences(outputs, {name: one}, {name: other}, {})[0].wrong


def _is_poison(got: Tensor, wrong: Difference, poison: int) -> bool:
    """Whether the first wrong element is what memory was filled with."""
    held = got[wrong.index].reshape(1).contiguous().view(torch.uint8)
    return bool((held == poison).all())


def _other_scalar(kept: Recording, now: Recording) -> str:
    pairs = zip(kept.scalars(), now.scalars(), strict=False)
    for (step, argument, old), (other, name, new) in pairs:
        if (step, argument) != (other, name):
            return f"the ops of its first call ({step}, now {other})"
        if repr(old) != repr(new):
            _, _, kernel = step.partition(" ")
            return f"{argument} = {old!r} of {kernel}, which these inputs make {new!r}"
    return ""


def churn(device: str) -> None:
    """Take memory, fill it with NaN and free it; on a GPU another stream does so as well."""
    sizes = (1 << 10, 1 << 14, 1 << 18, 1 << 12)
    if device == "cuda":
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            made = [torch.full((n,), float("nan"), device=device) for n in (*sizes, 1 << 24)]
            made.append(made[-1] * 2)
        other.synchronize()
        del made
    kept = [torch.full((n,), float("nan"), device=device) for n in sizes for _ in range(4)]
    del kept


# --- other inputs --------------------------------------------------------------------------------


MANY_ROWS = 64
"""Rows above which a CPU, on the virtual GPU, replays fewer changes."""


def changes(kernel: Kernel, case: Case, device: str, made: Any) -> Iterator[Given]:
    """Yield what the captured inputs are to hold, the same as at first at both ends."""
    first = [tensor.clone() for tensor in tensors_of(made)]
    yield Given(words="on the inputs it was captured with", tensors=first)
    few = device == "cpu" and kernel.triton and case.m > MANY_ROWS
    for words, changed in itertools.islice(_cases(kernel, case, device), 1 if few else None):
        tensors = tensors_of(kernel.stage.inputs(changed, device))
        if [t.shape for t in tensors] == [t.shape for t in first]:
            yield Given(words=words, tensors=tensors)
    for words, other in _rows(kernel, case, device, made):
        if few and "no row" not in words:
            continue
        yield Given(words=words, tensors=tensors_of(other))
    yield Given(words="on its first inputs again", tensors=first)


def _cases(kernel: Kernel, case: Case, device: str) -> Iterator[tuple[str, Case]]:
    """Yield cases of the same shapes."""
    reads = kernel.stage.reads

    def taken(**words: Any) -> Case | None:
        made = dataclasses.replace(case, **words)
        return made if kernel.declines(made, device) is None else None

    values = Values.NORMAL if case.values is not Values.NORMAL else Values.AIMED
    other = taken(seed=case.seed + 1, values=values) or taken(seed=case.seed + 1)
    if other is not None:
        yield "on other values", other
    special = taken(seed=case.seed + 1, values=Values.SPECIAL)
    if special is not None:
        yield "on special values", special
    if "routing" in reads:
        for n, routing in enumerate((Routing.ONE, Routing.HOLES)):
            changed = taken(seed=case.seed + 2 + n, routing=routing)
            if changed is not None:
                yield f"with the routing {routing.value}", changed


def _rows(kernel: Kernel, case: Case, device: str, made: Any) -> Iterator[tuple[str, Any]]:
    """Yield the inputs with no row live, with one, with all, where the kernel takes such."""
    batch = getattr(made, "batch", made)
    expert = getattr(made, "expert", None)
    if expert is None or not expert.numel():
        return
    holes = "routing" not in kernel.stage.reads or (
        kernel.declines(dataclasses.replace(case, routing=Routing.HOLES), device) is None
    )
    own = (expert >= 0).nonzero()[:, 0]
    if not own.numel():
        return
    last = int(own[-1])
    one = torch.full_like(expert, -1)
    one[last] = expert[last]
    every = expert[own[torch.arange(expert.numel(), device=own.device) % own.numel()]]
    picked = [("with no row live", torch.full_like(expert, -1)), ("with one row live", one)]
    for words, chosen in [*(picked if holes else []), ("with all rows live", every)]:
        changed: dict[str, Any] = {}
        if hasattr(batch, "ids"):
            first = made.experts.first if batch is not made else made.first
            ids = torch.where(chosen >= 0, chosen + first, -1).view(batch.ids.shape)
            changed["ids"] = ids.to(batch.ids.dtype)
        if batch is not made:
            yield words, dataclasses.replace(made, batch=dataclasses.replace(batch, **changed))
            continue
        changed["expert"] = chosen
        if hasattr(made, "counts"):
            live = torch.nn.functional.one_hot(chosen.clamp(min=0), made.counts.numel())
            changed["counts"] = (live * (chosen >= 0)[:, None]).sum(0).to(made.counts.dtype)
        yield words, dataclasses.replace(made, **changed)


def larger(kernel: Kernel, case: Case, device: str) -> Case | None:
    """Return a case with more rows that the kernel takes here, or None."""
    if "m" not in kernel.stage.sizes:
        grown = dataclasses.replace(case, i=2 * case.i)
        return grown if kernel.declines(grown, device) is None else None
    for m in (16 * case.m,) if device == "cuda" else (case.m + 8, 2 * case.m):
        grown = dataclasses.replace(case, m=m)
        if kernel.declines(grown, device) is None:
            return grown
    return None


def _owned(inputs: Any) -> Any:
    """Return the inputs in memory of their own, with the same strides."""
    made: dict[str, Any] = {}
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            made[field.name] = value.clone()
        elif dataclasses.is_dataclass(value):
            made[field.name] = _owned(value)
    return dataclasses.replace(inputs, **made)
