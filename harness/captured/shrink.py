"""A failure on captured tensors made small: fewer rows, choices, experts, and blocks of H and I.

The same kernel fails for the same reason on what is left.  What is left out goes by halves, then by
smaller parts, dimension after dimension, until nothing more can go or the budget is used up.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_parity.harness.captured.axes import cut, sizes_of
from moe_parity.harness.captured.feed import fed
from moe_parity.harness.captured.file import Captured, made, read, write
from moe_parity.harness.checks.flow import check
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.fuzz.reason import Failure, failures_of, same
from moe_parity.harness.session.watch import Overrun, current
from moe_parity.kernels import Kernel
from moe_parity.kernels.registry import builtin
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Routing

BUDGET = 80
"""Captures that one failure may cost."""
SECONDS = 120.0
"""After so many seconds nothing more is tried: a capture of a large model may take long."""
DIMENSIONS = ("rows", "choices", "i", "h")

Judge = Callable[[Captured], tuple[Failure, ...]]
"""What a capture has against a kernel."""


def line(kernel: Kernel, path: Path) -> str:
    """Return the command that runs a kernel on a captured file."""
    name = kernel.name if builtin(kernel) else str(kernel.source)
    return f"parity check --kernel {shlex.quote(name)} --case-from {shlex.quote(_near(path))}"


def _near(path: Path) -> str:
    """Return a path as seen from here, where it lies below."""
    whole, here = path.resolve(), Path.cwd().resolve()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(path)


def judge(kernel: Kernel, device: str) -> Judge:
    """Return what judges captures by a kernel's contract; what it does not take has no failure."""

    def judged(captured: Captured) -> tuple[Failure, ...]:
        current().case(f"{kernel.name}-{captured.case.id}", line(kernel, captured.path))
        try:
            case, inputs = fed(captured, kernel, device)
            red = [v for v in check(kernel, case, device, inputs=inputs) if v.failed]
        except (ParityError, Overrun):
            return ()
        return failures_of(kernel, case, red)

    return judged


def made_small(captured: Captured, red: Verdict, kernel: Kernel, device: str) -> Captured:
    """Return the smallest capture found on which a kernel fails as it does on this one.

    That is itself where it passes now, or was made small before.
    """
    if captured.origin.get("small"):
        return captured
    found = failures_of(kernel, captured.case, [red])
    return Shrinking(captured, found[0], judge(kernel, device)).run() if found else captured


class Shrinking:
    """One failure on its way down; ``best`` is the smallest capture that fails for its reason."""

    def __init__(
        self, captured: Captured, failure: Failure, judge: Judge, budget: int = BUDGET
    ) -> None:
        """Begin with a capture that fails."""
        self.best = captured
        self.tried = 0
        self._reason = failure.reason
        self._judge = judge
        self._budget = budget
        self._end = time.monotonic() + SECONDS

    @property
    def _spent(self) -> bool:
        return self.tried >= self._budget or time.monotonic() > self._end

    def run(self) -> Captured:
        """Shrink until nothing more can be left out, or the budget is used up."""
        before = None
        while before is not self.best and not self._spent:
            before = self.best
            for name in DIMENSIONS:
                self._along(name)
        return self.best

    def _along(self, name: str) -> None:
        """Leave out parts of one dimension: halves, quarters, single ones."""
        count = self._count(name)
        left = list(range(count))
        part = count // 2
        while part and not self._spent:
            start, gone = 0, False
            while start < len(left) and len(left) > 1:
                kept = left[:start] + left[start + part :]
                if kept and self._try(name, kept, left):
                    left, gone = kept, True
                else:
                    start += part
            part = part if gone and part < len(left) else part // 2

    def _count(self, name: str) -> int:
        """Return how many rows, choices or whole blocks there are; 1 where none can go."""
        sizes = sizes_of(self.best.stage.name, {**self.best.given, **self.best.seen})
        if name in ("rows", "choices"):
            return sizes.get({"rows": "m", "choices": "k"}[name], 1)
        size = sizes.get(name, 0)
        return size // BLOCK if size % BLOCK == 0 else 1

    def _try(self, name: str, kept: list[int], of: list[int]) -> bool:
        """Take over a capture of what is kept, where it fails for the same reason."""
        if self._spent:
            return False
        self.tried += 1
        # ``best`` is what ``of`` names: places in it
        places = [of.index(n) for n in kept]
        try:
            smaller = left_with(self.best, name, places)
        except ParityError:
            return False
        if same(self._reason, self._judge(smaller)) is None:
            return False
        self.best = smaller
        return True


def left_with(captured: Captured, name: str, places: list[int]) -> Captured:
    """Return a capture of some rows, choices or blocks, without the experts that no pair takes.

    Raises ParityError for what is no capture.
    """
    stage = captured.stage.name
    chosen: dict[str, Any] = {name: places}
    tensors = cut(stage, {**captured.given, **captured.seen}, **chosen)
    origin = dict(captured.origin)
    if name == "rows" and "rows" in origin:
        origin["rows"] = [origin["rows"][n] for n in places]
    if name == "choices":
        # a sum of fewer pairs is not what the model gave
        tensors.pop("out", None)
    ids, experts = tensors.get("ids"), sizes_of(stage, tensors).get("e")
    if ids is not None and experts is not None and captured.case.ep_size == 1:
        taken = [int(e) for e in ids.unique() if e >= 0] or [0]
        tensors = cut(stage, tensors, experts=taken)
        number = torch.full((experts + 1,), -1, dtype=ids.dtype)
        number[taken] = torch.arange(len(taken), dtype=ids.dtype)
        tensors["ids"] = number[ids.long()]  # -1 is the last place, which holds -1
        if origin.get("experts"):
            origin["experts"] = [origin["experts"][e] for e in taken]
    if name in ("h", "i"):
        known = origin.get(f"{name}_blocks")
        origin[f"{name}_blocks"] = [known[n] for n in places] if known else places
    # what tensors say is said anew
    e = 1 if captured.case.ep_size == 1 else captured.case.e
    plain = dataclasses.replace(captured.case, routing=Routing.UNIFORM, e=e)
    return made(captured.path, captured.stage, plain, tensors, origin)


def kept_small(small: Captured, captured: Captured, kernel: Kernel, alone: bool) -> Path:
    """Write what was made small beside the capture and return its path; the old one's if it is it.

    The name ends in ``-small``, and in the kernel's where several kernels run.  Raises ParityError
    where it cannot be written, or a file is there that is not ours to replace.
    """
    if small is captured:
        return captured.path
    name = f"{captured.path.stem}-small" + ("" if alone else f"-{kernel.name}")
    path = captured.path.with_name(f"{name}.safetensors")
    if path.exists():
        try:
            ours = bool(read(path).origin.get("small"))
        except ParityError:
            ours = False
        if not ours:
            raise ParityError(f"{path} is there already and was not made small by us: left alone.")
    origin = {**small.origin, "small": captured.path.name}
    write(dataclasses.replace(small, path=path, origin=origin))
    return path


__all__ = ["BUDGET", "Shrinking", "kept_small", "left_with", "line", "made_small"]
