"""What a kernel returned, made canonical: names, shapes, dtypes and layouts of its stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.call import Call, Produced
from moe_parity.references.arithmetic.formats import row_major, ue8m0_decode, unpack_ue8m0
from moe_parity.references.language.stage import Kind, Output


class BadOutput(Exception):
    """A kernel returned something that its stage does not have; the text is a sentence."""


def finished(returned: Any) -> Any:
    """Return what a kernel returned, once it has done its part on the host (``kernels.call``)."""
    return returned() if callable(returned) else returned


def canonical(
    name: str, call: Call, returned: object, unwritten: Collection[int] = ()
) -> dict[str, Tensor]:
    """Return the outputs of kernel ``name`` by name, codes as uint8 and scales as fp32.

    ``unwritten`` are bytes of memory that nobody has written: a packed word of one of them alone
    was left as it was.  Raises BadOutput, in a sentence, for other names, shapes, dtypes or layouts
    than the stage has.
    """
    wanted, found = call.outputs, by_name(name, call, returned)
    return {
        own: _one(name, own, found[own], wanted[own], unwritten) for own in wanted if own in found
    }


def by_name(name: str, call: Call, returned: object) -> Mapping[str, Tensor]:
    """Return what kernel ``name`` returned as a mapping, whichever way it said it.

    Raises BadOutput, in a sentence, for what are no tensors with the names of its stage's outputs.
    """
    stage, wanted = call.stage, list(call.outputs)
    if isinstance(returned, Produced):
        returned = returned.outputs
    if isinstance(returned, Tensor):
        returned = {wanted[-1]: returned} if stage.partial or len(wanted) == 1 else (returned,)
    if isinstance(returned, tuple | list):
        if len(returned) != len(wanted):
            raise BadOutput(
                f"{name} returned {len(returned)} values, and {stage} has {len(wanted)} outputs: "
                f"{', '.join(wanted)}; return them in this order, or as a mapping."
            )
        returned = dict(zip(wanted, returned, strict=True))
    if not isinstance(returned, Mapping):
        raise BadOutput(
            f"{name} returned {type(returned).__name__}, expected {stage}'s outputs "
            f"({', '.join(wanted)}) as tensors, in this order, or as a mapping."
        )
    needed = {wanted[-1]} if stage.partial else set(wanted)
    missing, extra = needed - returned.keys(), returned.keys() - set(wanted)
    if missing or extra:
        what = (
            f"lacks {', '.join(sorted(missing))}" if missing else f"has {', '.join(sorted(extra))}"
        )
        raise BadOutput(f"{name}: its result {what}; {stage}'s outputs are {', '.join(wanted)}.")
    for own, value in returned.items():
        if not isinstance(value, Tensor):
            raise BadOutput(f"{name}: {own} is a {type(value).__name__}, expected a tensor.")
    return returned


def declared(name: str, returned: object) -> Mapping[str, Tensor]:
    """Return the fates that kernel ``name`` declares by the name of an output.

    Raises BadOutput, in a sentence, for what is no mapping of names to tensors.
    """
    if not isinstance(returned, Produced):
        return {}
    fates: object = returned.fates
    if not isinstance(fates, Mapping) or not all(isinstance(f, Tensor) for f in fates.values()):
        raise BadOutput(
            f"{name} returned fates as {fates!r:.60}, expected a mapping from the name of an "
            "output to an int8 tensor."
        )
    return fates


def _one(name: str, own: str, tensor: Tensor, wanted: Output, unwritten: Collection[int]) -> Tensor:
    if wanted.kind is Kind.CODES and tensor.dtype is wanted.codes.dtype:
        tensor = tensor.view(torch.uint8)
    fits = tuple(tensor.shape) == wanted.shape or (wanted.any_length and tensor.dim() == 1)
    if tensor.dtype is not wanted.dtype or not fits:
        raise BadOutput(
            f"{name} returned {own} as {tensor.dtype} {list(tensor.shape)}, expected "
            f"{wanted.dtype} {list(wanted.shape)}."
        )
    packed = wanted.kind is Kind.SCALES and wanted.dtype is torch.int32
    if wanted.strides is not None and not packed:
        sizes = zip(tensor.shape, tensor.stride(), wanted.strides, strict=True)
        if any(size > 1 and got != want for size, got, want in sizes):
            raise BadOutput(
                f"{name} returned {own} with strides {tuple(tensor.stride())}, expected "
                f"{wanted.strides}, the layout that the case asks for."
            )
    # A copy: the memory may be the kernel's own, and change with its next call.
    return _unpacked(name, tensor, wanted, unwritten) if packed else row_major(tensor)


def _unpacked(name: str, words: Tensor, wanted: Output, unwritten: Collection[int]) -> Tensor:
    assert wanted.canonical is not None
    groups = wanted.canonical[-1]
    found = unpack_ue8m0(words, 4 * words.shape[-1])
    junk = (found[..., groups:] != 0).any(-1)
    for byte in unwritten:  # a word that was left packs nothing: the checks of memory name it
        junk &= (found[..., -4:] != byte).any(-1)
    if bool(junk.any()):
        raise BadOutput(
            f"{name} packs exponents of groups that do not exist: the last word of a row of "
            f"{groups} groups must end in zeros."
        )
    return ue8m0_decode(found[..., :groups])
