"""Inputs that somebody brings along: tensors by name, looked at before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_parity.references.errors import ParityError
from moe_parity.references.language.case import Case

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
CODES = (torch.uint8, torch.float8_e4m3fn)
IDS = (torch.int32, torch.int64)


class Own:
    """The tensors of one stage's inputs."""

    def __init__(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        self.stage, self.tensors = stage, tensors

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self.tensors

    def take(
        self,
        name: str,
        dims: int,
        dtypes: tuple[torch.dtype, ...],
        shape: tuple[int | None, ...] = (),
    ) -> Tensor:
        """Return a tensor; raises ParityError where it is missing or of another kind.

        ``shape`` are the sizes it must have, None for any.  Codes come as uint8.
        """
        if name not in self.tensors:
            have = ", ".join(sorted(self.tensors)) or "nothing"
            raise ParityError(f"{self.stage} needs the input {name}, and there is {have}.")
        found = self.tensors[name]
        fits = found.dim() == dims and all(
            want in (None, size) for size, want in zip(found.shape, shape, strict=False)
        )
        if found.dtype not in dtypes or not fits:
            sizes = [("any" if n is None else str(n)) for n in shape] or ["any"] * dims
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ParityError(
                f"{self.stage}: the input {name} is {found.dtype} {list(found.shape)}, expected "
                f"{kinds} [{', '.join(sizes)}]."
            )
        return found.view(torch.uint8) if found.dtype is torch.float8_e4m3fn else found


def experts_of(case: Case, ids: Tensor) -> int:
    """Return how many experts there are where no weights say it: the case's, or all that are named.

    Where ids past the last expert are asked for, the case alone says it.
    """
    named = 1 if case.has_odd_ids or not ids.numel() else int(ids.max()) + 1
    return max(case.e, named)
