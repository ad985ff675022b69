"""Canonical outputs compared bit for bit, and a difference in words.

The rule for NaN, stated here once: what is compared is that a value is NaN, not its sign or
payload, which projects leave to the library (0x7f or 0xff, 0x7fffffff or 0x7fc00000).  The sign of
zero is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import E4M3, CodeFormat, canonical_nan, to_f32
from moe_parity.references.language.stage import Kind, Output, Outputs


def comparable(tensor: Tensor, codes: CodeFormat = E4M3) -> Tensor:
    """Return the bits of a tensor as integers, every NaN the same; bytes are ``codes``."""
    if tensor.dtype is torch.uint8:
        return torch.where(codes.is_nan(tensor), codes.nan, tensor.int())
    if not tensor.dtype.is_floating_point:
        return tensor
    if tensor.dtype is torch.float32:
        return canonical_nan(tensor).view(torch.int32)
    bits = tensor.contiguous().view(torch.int16).int()
    return torch.where(torch.isnan(to_f32(tensor)), 0x7FFF, bits)


NOTHING = -(1 << 31)
"""What stands for an integer that was not returned, or is one too many."""


def fitted(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """Return two lists of integers at one length; what one lacks never equals anything."""
    if got.shape == want.shape or got.dim() != 1:
        return got, want
    length = max(len(got), len(want))
    fills = ((got, NOTHING), (want, NOTHING + 1))
    one, two = (torch.nn.functional.pad(t, (0, length - len(t)), value=f) for t, f in fills)
    return one, two


def mask(output: Output, got: Tensor, want: Tensor, live: Tensor | None) -> Tensor:
    """Return where two tensors of an output differ, in live rows."""
    got, want = fitted(got, want)
    bad = comparable(got, output.codes) != comparable(want, output.codes)
    return bad if live is None else bad & live.view(-1, *[1] * (bad.dim() - 1))


def digest(outputs: Mapping[str, Output], got: Outputs, live: Mapping[str, Tensor]) -> str:
    """Return sixteen digits that tell the bits of live rows from any others.

    They are the same on every device, and for every NaN: equal where ``differences`` finds none.
    """
    total = blake2b(digest_size=8)
    for name, tensor in got.items():
        bits = comparable(tensor, outputs[name].codes)
        if name in live:
            bits = torch.where(live[name].view(-1, *[1] * (bits.dim() - 1)), bits, 0)
        total.update(f"{name} {bits.dtype} {list(bits.shape)} ".encode())
        total.update(bits.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How one output differs from what is expected."""

    name: str
    output: Output
    wrong: int
    of: int
    """Elements compared: those of live rows."""
    farthest: int | None
    """The largest distance in values that the format has in between, NaN aside; None for
    integers."""
    nans: int
    """Differences that are a NaN on one side alone."""
    index: tuple[int, ...]
    """Of the first mismatch; empty where there is none."""
    got: str
    want: str
    """The first mismatch in bits and value."""

    @property
    def words(self) -> str:
        """Return for instance ``18 of 32768 codes (at most 1 step)``, ``all 256 scales equal``."""
        if not self.wrong:
            return f"all {self.of} {self.output.noun} equal"
        unit = "step" if self.output.kind is Kind.CODES else "ulp"
        far = self.farthest
        plural = "s" if unit == "step" and far != 1 else ""
        parts = [f"{self.nans} NaN on one side alone"] if self.nans else []
        if far is not None and (far or not self.nans):
            parts.append(f"at most {far} {unit}{plural}" if far else "signs of zero alone")
        tail = f" ({', others '.join(parts)})" if parts else ""
        return f"{self.wrong} of {self.of} {self.output.noun}{tail}"


def differences(
    outputs: Mapping[str, Output], got: Outputs, want: Outputs, live: Mapping[str, Tensor]
) -> list[Difference]:
    """Compare every output that was returned, scales before codes: a cause before its effects."""
    order = sorted(got, key=lambda name: outputs[name].kind is not Kind.SCALES)
    return [_difference(n, outputs[n], got[n], want[n], live.get(n)) for n in order]


def _difference(
    name: str, output: Output, got: Tensor, want: Tensor, live: Tensor | None
) -> Difference:
    got, want = fitted(got, want)
    bad = mask(output, got, want, live)
    wrong, rows = int(bad.sum()), got.shape[0] if live is None else int(live.sum())
    total = got.numel() if live is None else rows * (got.numel() // max(got.shape[0], 1))
    index = tuple(int(n) for n in bad.nonzero()[0]) if wrong else ()
    lone = bad & (_nan(got, output.codes) != _nan(want, output.codes))
    return Difference(
        name=name, output=output, wrong=wrong, of=total, nans=int(lone.sum()),
        farthest=_farthest(output, got, want, bad & ~lone), index=index,
        got=_words(output, got, index) if wrong else "",
        want=_words(output, want, index) if wrong else "",
    )  # fmt: skip


def _nan(values: Tensor, codes: CodeFormat) -> Tensor:
    if values.dtype is torch.uint8:
        return codes.is_nan(values)
    return torch.isnan(values)


def _farthest(output: Output, got: Tensor, want: Tensor, bad: Tensor) -> int | None:
    if not (got.dtype.is_floating_point or got.dtype is torch.uint8):
        return None
    if not bool(bad.any()):
        return 0
    width = 8 * got.element_size()
    left, right = (ordered(comparable(t, output.codes)[bad], width) for t in (got, want))
    return int((left - right).abs().max())


def ordered(bits: Tensor, width: int) -> Tensor:
    """Map sign-magnitude bits to integers in the order of their values (both zeros are 0)."""
    wide = bits.long() & ((1 << width) - 1)
    magnitude = wide & ((1 << (width - 1)) - 1)
    return torch.where(wide >> (width - 1) == 1, -magnitude, magnitude)


def _words(output: Output, tensor: Tensor, index: tuple[int, ...]) -> str:
    value = tensor[index].reshape(1)
    digits = 2 * value.element_size()
    if value.dtype is torch.uint8:
        return f"code 0x{int(value):02x} ({float(output.codes.decode(value)):g})"
    if not value.dtype.is_floating_point:
        return str(int(value)) if int(value) > NOTHING + 1 else "nothing"
    kind = {4: torch.int32, 2: torch.int16}[value.element_size()]
    word = int(value.view(kind)[0]) & ((1 << 4 * digits) - 1)
    return f"0x{word:0{digits}x} ({float(value):.9g})"


def where(inputs: Any, output: Output, index: tuple[int, ...]) -> str:
    """Return an index in words: ``token 3, k 1, column 4093 (expert 17)``."""
    parts = [f"{axis} {n}" for axis, n in zip(output.axes, index, strict=True)]
    tail = ""
    if output.axes[0] == "pair" and getattr(inputs, "expert", None) is not None:
        k = inputs.ids.shape[1] if hasattr(inputs, "ids") else inputs.batch.ids.shape[1]
        parts[0] = f"token {index[0] // k}, k {index[0] % k}"
        tail = f" (expert {int(inputs.expert[index[0]])})"
    elif output.axes[0] == "row" and getattr(inputs, "expert", None) is not None:
        tail = f" (expert {int(inputs.expert[index[0]])})"
    return ", ".join(parts) + tail
