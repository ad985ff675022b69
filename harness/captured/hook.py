"""``capture``: writes one layer's tensors while a model runs.

The hook waits for nothing: it copies the rows that may be kept where they are, and looks at ids and
experts when the file is written, which is at the end of the ``with`` block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from moe_parity.harness.captured.axes import AXES, is_output
from moe_parity.harness.captured.file import Captured, as_bytes, write
from moe_parity.harness.captured.names import named
from moe_parity.harness.captured.sample import LIMIT, ROWS, Wanted, sampled
from moe_parity.references.errors import ParityError
from moe_parity.references.language import parse_id

Take = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], Mapping[str, Any]]
"""(module, args, kwargs, what it returned) -> tensors by the stage's names."""


class Recording:
    """One capture under way: a context manager, or ``attach`` and ``close`` where none fits."""

    def __init__(
        self, target: Any, path: str | Path, wanted: Wanted, call: int, take: Take | None
    ) -> None:
        """Prepare; ``Capture.__call__`` says what the arguments mean."""
        self.path = Path(path)
        self.problem = "no call was seen"
        """Why nothing can be written so far, in words; empty once a call is held."""
        self.calls = 0
        self.written: Captured | None = None
        self._target, self._wanted, self._call = target, wanted, call
        self._take = take or named
        self._held: dict[str, Tensor] = {}
        self._rows: list[int] = []
        self._m = 0
        self._versions: dict[str, tuple[Tensor, int | None]] = {}
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> Self:
        """Begin to listen; returns itself.

        Raises ParityError where the file could not be written at the end, as far as that shows now.
        """
        target, folder = self._target, self.path.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ParityError(f"{folder} is no folder that can be written to; name another path.")
        if isinstance(target, torch.nn.Module):
            if hasattr(target, "_orig_mod"):
                raise ParityError(
                    "the module is compiled by torch.compile, whose graph runs no hook: capture "
                    "the module that was handed to torch.compile, and call that one."
                )
            handle = target.register_forward_hook(self._after, with_kwargs=True)
            self._undo.append(handle.remove)
            before = target.register_forward_pre_hook(self._before, with_kwargs=True)
            self._undo.append(before.remove)
        else:
            self._replace(*target)
        return self

    def _replace(self, owner: Any, name: str) -> None:
        """Put a function that listens in the place of ``owner.name``."""
        own = getattr(owner, name)

        def listening(*args: Any, **kwargs: Any) -> Any:
            self._before(own, args, kwargs)
            returned = own(*args, **kwargs)
            self._after(own, args, kwargs, returned)
            return returned

        setattr(owner, name, listening)
        self._undo.append(lambda: setattr(owner, name, own))

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Hold the inputs before the layer may write into them."""
        if torch.compiler.is_compiling():
            self.problem = "the layer ran inside torch.compile, where nothing can be held"
            return
        self.calls += 1
        if self.calls == self._call:
            self._listen(module, args, kwargs, None)

    def _after(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], returned: Any
    ) -> None:
        """Hold the outputs of the call whose inputs are held, and listen no more."""
        if torch.compiler.is_compiling() or self.calls != self._call or not self._undo:
            return
        if not self.problem:
            self._listen(module, args, kwargs, returned)
        self.detach()

    def detach(self) -> None:
        """Listen no more; what is held stays."""
        while self._undo:
            self._undo.pop()()

    def _listen(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], returned: Any
    ) -> None:
        """Hold a call's tensors; a problem is kept in words, as the model must not suffer."""
        try:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                raise ParityError(
                    f"call {self.calls} was recorded into a CUDA graph, where nothing can be held: "
                    "run the model without graphs (enforce_eager=True in vLLM)"
                )
            tensors = self._take(module, args, kwargs, returned)
            self._hold(clean(self._wanted.stage, tensors), returned is not None)
            self.problem = ""
        except ParityError as error:
            self.problem = str(error).rstrip(".")
        except Exception as error:
            text = str(error).partition("\n")[0]
            self.problem = f"call {self.calls}: {type(error).__name__}: {text}".rstrip(".")

    def _hold(self, tensors: Mapping[str, Tensor], returned: bool) -> None:
        stage = self._wanted.stage
        axes = AXES[stage]
        if not returned:
            first = next((n for n in axes if n in tensors and axes[n][0] == "m"), None)
            if first is None:
                have = ", ".join(tensors) or "nothing"
                raise ParityError(f"no tensor of rows was found, and there is {have}: pass take=")
            self._m = tensors[first].shape[0]
            self._rows = self._wanted.candidates(self._m)
        for name, tensor in tensors.items():
            if is_output(stage, name) != returned:
                continue
            if axes[name].startswith("e"):
                # too large to copy, and never written while a model answers
                self._held[name] = tensor
                self._versions[name] = tensor, _version(tensor)
            else:
                self._held[name] = _rows_of(tensor, self._rows, self._m)

    def close(self) -> Captured:
        """Write the file and return what it holds; raises ParityError where nothing is written."""
        self.detach()
        if self.problem:
            hint = ""
            if not self.calls:
                hint = ": a compiled layer, or one in a CUDA graph, runs no hook"
            elif self.calls < self._call:
                hint = f": call {self._call} was asked for, and there were {self.calls}"
            raise ParityError(f"nothing is captured to {self.path}: {self.problem}{hint}.")
        for name, (tensor, version) in self._versions.items():
            if _version(tensor) != version:
                raise ParityError(
                    f"nothing is captured to {self.path}: {name} was written after the call; close "
                    "the capture before weights change."
                )
        target = self._target
        name = target[1] if isinstance(target, tuple) else type(target).__name__
        about = {"call": self._call, "module": name}
        self.written = sampled(self.path, self._wanted, self._held, self._rows, self._m, about)
        write(self.written)
        self._held.clear()
        return self.written

    def __enter__(self) -> Self:
        """Begin to listen."""
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """Write the file; where the body raised, that stays, and nothing is written."""
        self.detach()
        if kind is None:
            self.close()


class Capture:
    """What ``moe_parity.harness.capture`` is."""

    def __call__(
        self,
        target: torch.nn.Module | tuple[Any, str],
        path: str | Path,
        *,
        case: str = "fp32",
        stage: str = "layer",
        take: Take | None = None,
        call: int = 1,
        rows: Iterable[int] | None = None,
        experts: Iterable[int] | None = None,
        count: int = ROWS,
        limit: int = LIMIT,
        seed: int = 0,
    ) -> Recording:
        """Return a context manager that writes one call of a layer to a safetensors file.

        ``target`` is a module, or ``(owner, "name")`` of a function.  ``case`` are the words of the
        case that no tensor says: the scale format, the limit, the rank (``fp32-c7-ep1of4``).
        ``take`` is called with (module, args, kwargs, returned) before the call, with None, and
        after it, and returns tensors by the names of the stage (docs/captured.md); by default they
        are found by the names that vLLM, SGLang and we use.  ``call`` is which call counts, from 1.
        At most ``count`` rows are drawn with ``seed``, or ``rows`` are kept; of the experts those
        that they take, or ``experts`` alone; ``limit`` is in bytes.  Raises ParityError for words
        that are no case, and at the end of the block where nothing could be written.
        """
        wanted = _wanted(stage, case, rows, experts, count, limit, seed)
        if call < 1:
            raise ParityError(f"call is {call}, expected 1 for the first one, or a later one.")
        return Recording(target, path, wanted, call, take)

    def write(
        self,
        path: str | Path,
        *,
        case: str = "fp32",
        stage: str = "layer",
        row_numbers: Iterable[int] | None = None,
        expert_numbers: Iterable[int] | None = None,
        count: int = ROWS,
        limit: int = LIMIT,
        seed: int = 0,
        **tensors: Tensor | None,
    ) -> Captured:
        """Write tensors that are at hand, by the names of the stage; outputs too.

        ``row_numbers`` and ``expert_numbers`` are the ``rows`` and ``experts`` of the context
        manager.  Raises ParityError for what does not fit, and where nothing could be written.
        """
        wanted = _wanted(stage, case, row_numbers, expert_numbers, count, limit, seed)
        found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        recording = Recording(None, path, wanted, 1, lambda *_: found)
        recording.calls = 1
        recording._listen(None, (), {}, None)
        if not recording.problem:
            recording._listen(None, (), {}, ())
        return recording.close()


def _wanted(
    stage: str, case: str, rows: Iterable[int] | None, experts: Iterable[int] | None, count: int,
    limit: int, seed: int,
) -> Wanted:  # fmt: skip
    if stage not in AXES:
        raise ParityError(f"stage {stage!r} cannot be captured; those are {', '.join(AXES)}.")
    if count < 1:
        raise ParityError(f"count is {count}, expected at least one row.")
    return Wanted(
        stage=stage, words=parse_id(f"it-{case}")[1], count=count, limit=limit, seed=seed,
        rows=None if rows is None else tuple(rows),
        experts=None if experts is None else tuple(experts),
    )  # fmt: skip


def clean(stage: str, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors of known names as a file holds them; nothing is copied that need not be.

    Raises ParityError for a name that the stage does not have, and for what is no real tensor.
    """
    axes, found = AXES[stage], {}
    for name, tensor in tensors.items():
        if name not in axes:
            raise ParityError(f"{stage} has no tensor {name!r}; it has {', '.join(axes)}.")
        if not isinstance(tensor, Tensor):
            raise ParityError(f"{name} is a {type(tensor).__name__}, expected a tensor.")
        if tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor":
            raise ParityError(f"{name} has no values: it is a {tensor.device.type} tensor.")
        tensor, words = as_bytes(tensor.detach()), axes[name].split()
        if words[0] == "m" and tensor.dim() > len(words):  # [batch, sequence, H]
            tensor = tensor.flatten(0, tensor.dim() - len(words))
        if name == "weights" or tensor.dtype is torch.float8_e8m0fnu:
            tensor = tensor.float()
        elif name == "ids" and tensor.dtype not in (torch.int32, torch.int64):
            tensor = tensor.to(torch.int32)
        found[name] = tensor
    return found


def _rows_of(tensor: Tensor, rows: list[int], m: int) -> Tensor:
    """Return a copy of some rows, or of their pairs, on their device and without a wait.

    Slices, as an index made on the host would make a GPU wait for it.
    """
    each = tensor.unflatten(0, (m, -1)) if m and tensor.shape[0] != m else tensor
    some = torch.stack([each[row] for row in rows])
    return some.flatten(0, 1) if each is not tensor else some


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


capture = Capture()
"""The one object: a context manager when it is called, ``capture.write`` for tensors at hand."""

__all__ = ["Capture", "Recording", "capture"]
