"""What an op may be given: the same sentences from the real one and from its fake.

Only metadata is looked at, which a fake tensor has too.  Where tensors lie in memory it has not:
that is asked on the real side alone (:func:`demand_apart`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_parity.kernels.ours.arguments import are_apart, has_own_elements
from moe_parity.references.errors import ParityError

IDS = (torch.int32, torch.int64)


def demand(
    op: str, name: str, tensor: Tensor, shape: Sequence[int], *dtypes: torch.dtype
) -> None:  # fmt: skip
    """Raise ParityError unless a tensor has that shape and one of the dtypes."""
    if tensor.dtype not in dtypes or tuple(tensor.shape) != tuple(shape):
        known = " or ".join(str(dtype) for dtype in dtypes)
        raise ParityError(
            f"{op}: {name} must be {known} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}."
        )


def demand_rank(op: str, name: str, tensor: Tensor, form: str) -> None:
    """Raise ParityError unless a tensor has as many dimensions as ``form``, "[M, K]", names."""
    if tensor.dim() != form.count(",") + 1:
        raise ParityError(f"{op}: {name} must be {form}, got shape {list(tensor.shape)}.")


def demand_row_major(op: str, **tensors: Tensor | None) -> None:
    """Raise ParityError for the first tensor with gaps or in another order."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ParityError(f"{op}: {name} must be contiguous, strides {tensor.stride()}.")


def demand_rows(op: str, **tensors: Tensor) -> None:
    """Raise ParityError for the first tensor whose rows have gaps inside."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ParityError(
                f"{op}: rows of {name} must be contiguous, strides {tensor.stride()}."
            )


def demand_device(op: str, first: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Raise ParityError for the first tensor that is not on the device of ``first``."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ParityError(
                f"{op}: {name} is on {tensor.device}, {first} on {device}; use one device."
            )


def demand_apart(op: str, outs: dict[str, Tensor], inputs: dict[str, Tensor | None]) -> None:
    """Raise ParityError where an output lies in its own or in another tensor's memory.

    Programs read and write in any order.
    """
    for name, out in outs.items():
        if not has_own_elements(out):
            raise ParityError(
                f"{op}: elements of {name} overlap, strides {out.stride()}; give each its own "
                "memory."
            )
    seen = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    for name, out in outs.items():
        for other, tensor in seen.items():
            if not are_apart(_matrix(tensor), _matrix(out)):
                raise ParityError(
                    f"{op}: {other} and {name} share memory; give {name} memory of its own."
                )
        seen[name] = out


def _matrix(tensor: Tensor) -> Tensor:
    """Return a matrix over all the memory of a tensor: itself, or one row from end to end."""
    if tensor.dim() == 2 or not tensor.numel():
        return tensor if tensor.dim() == 2 else tensor.reshape(1, 0)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    return tensor.as_strided((1, last + 1), (last + 1, 1))
