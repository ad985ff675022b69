"""A call: what the harness hands to a kernel of any stage, and what a kernel may give back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Stage
from moe_parity.references.language.stage import Output


class BadCall(ParityError):
    """A kernel asked for memory in a way that its stage does not know; never a refusal of input."""


class CannotCall(ParityError):
    """A kernel cannot be called as it is: nothing was computed, so nothing is said of it."""


class Allocator(Protocol):
    """Makes output tensors; the harness's one fills them and their surroundings with poison."""

    def __call__(
        self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Return a tensor of that shape, strides in elements, and dtype."""
        ...


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a kernel.

    ``inputs`` is what the stage says (``ACT_QUANT``: ``x``; ``FC1``: ``a``, ``a_scale``, ``w``,
    ``w_scale``, ``expert`` ...: docs/stages.md).
    """

    case: Case
    stage: Stage[Any]
    inputs: Any
    allocate: Allocator
    config: Any = None
    """The configuration to take, of those that the kernel registered; None where it has none."""

    @cached_property
    def outputs(self) -> Mapping[str, Output]:
        """The stage's outputs; where their shapes depend on values, asking for them waits."""
        return self.stage.outputs(self.case, self.inputs)

    def fix_outputs(self) -> None:
        """Work the outputs out now: later it might wait in a capture, or see other inputs."""
        _ = self.outputs

    def new(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return memory for an output: poison that a kernel has to overwrite.

        By name alone it is one of the stage's outputs in the case's format and layout.  With a
        shape it is whatever a kernel needs, row-major unless it says otherwise; raises BadCall
        where the name is not the stage's and the dtype is missing.
        """
        outputs = self.outputs
        known = outputs.get(name)
        if shape is None:
            if known is None:
                names = ", ".join(outputs)
                raise BadCall(f"{self.stage} has no output {name!r}; it has {names}.")
            shape, strides = known.shape, strides or known.strides
        dtype = dtype or (known.dtype if known else None)
        if dtype is None:
            raise BadCall(f"call.new({name!r}, {shape}): say the dtype, {name} is not known.")
        return self.allocate(name, shape, strides or row_major_strides(shape), dtype)


class Fate(IntEnum):
    """What a call does to a row of an output."""

    LIVE = 0
    """Written, and compared."""
    ZERO = 1
    """Written: +0."""
    JUNK = 2
    """Written or not, with anything; nobody may read it."""
    UNTOUCHED = 3
    """As it was before the call."""


@dataclass(frozen=True, kw_only=True)
class Produced:
    """Outputs with the fate of every row of the memory that was allocated for them.

    Only a kernel that pads, reorders or leaves rows alone needs it; any other returns its outputs,
    as a mapping, in the stage's order, or as one tensor.  Where the host has to look at values to
    say which rows were used, a kernel returns a function of no arguments that returns it: it is
    called after the call, and is in no graph.
    """

    outputs: Mapping[str, Tensor]
    fates: Mapping[str, Tensor] = field(default_factory=dict)
    """Output name -> int8 fates, one for each row (all dimensions but the last), or one for each
    element where the shapes are the same.  Left out: the stage's owned rows are live."""


def demand_contiguous(tensor: Tensor, who: str) -> Tensor:
    """Return a tensor; raises ParityError, which refuses the call, unless it is contiguous."""
    if not tensor.is_contiguous():
        raise ParityError(f"{who} takes contiguous input, got strides {tensor.stride()}.")
    return tensor


def demand_rows(tensor: Tensor, who: str) -> Tensor:
    """Return a tensor; raises ParityError, which refuses the call, unless its rows are contiguous.

    There may be gaps between them.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ParityError(f"{who} takes contiguous rows, got strides {tensor.stride()}.")
    return tensor


def demand_near(tensor: Tensor, who: str) -> Tensor:
    """Return a tensor; raises ParityError, which refuses the call, where offsets need 64 bits.

    They do from 2^31 elements on: what is counted in 32 bits is negative there.
    """
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
    if last >= 1 << 31:
        raise ParityError(f"{who} takes offsets below 2^31 elements, got one of {last}.")
    return tensor


def demand_aligned(tensor: Tensor, who: str, count: int = 16) -> Tensor:
    """Return a tensor; raises ParityError, which refuses the call, unless it starts aligned.

    A vector load of ``count`` bytes at another address is a fault of the GPU, which ends the
    process.
    """
    past = tensor.data_ptr() % count
    if past:
        raise ParityError(
            f"{who} takes input that starts at a multiple of {count} bytes, got one {past} past it."
        )
    return tensor


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
