"""Outputs in a safetensors file: a witness, or tensors that somebody brings along.

A witness says its case and its inputs are made anew.  Any other file holds the outputs of a stage
by their names, and its inputs by theirs (docs/stages.md); the stage and the words of the case come
with the command or stand in the metadata as ``stage`` and ``case``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_parity.harness.calling.canonical import BadOutput, canonical
from moe_parity.harness.evidence import witness
from moe_parity.kernels import Call
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, ScaleFormat, Stage, parse_id
from moe_parity.references.language.stage import Kind, Output
from moe_parity.references.stages import stage_named

CAPTURE_SCHEMA = 1
"""The version of the files that ``moe_parity.harness.captured`` writes."""
PREFIX = "inputs."
"""Before the name of an input that an output has too: ``inputs.rows`` of SwiGLU."""


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Outputs of a stage with the case and the inputs that they belong to."""

    stage: Stage[Any]
    case: Case
    inputs: Any
    outputs: dict[str, Tensor]
    """In canonical form."""


def read_dump(
    path: Path, *, stage: str | None = None, case: str | None = None, seed: int = 0
) -> Dump:
    """Read a file; ``stage`` and ``case`` say what it does not.

    Raises ParityError, in a sentence, for a file that is none, and for tensors that do not fit.
    """
    metadata, tensors = witness.opened(path)
    if metadata.get("schema") == witness.SCHEMA and "outputs_sha256" in metadata:
        return _of_witness(path)
    known_schema(path, metadata)
    named = stage or metadata.get("stage")
    if named is None:
        raise ParityError(f"{path} does not say its stage: add --stage, such as --stage act_quant.")
    words = case or metadata.get("case", "")
    return _own(path, stage_named(named), own_words(words, seed), tensors)


def own_words(words: str, seed: int = 0) -> Case:
    """Return the case of somebody's own tensors by the words that they do not say: ``ue8m0-c7``.

    The scales are fp32 where the words do not say it.  Raises ParityError for what is no word.
    """
    if not isinstance(words, str):
        raise ParityError(f"the case is {words!r:.60}, expected its words, such as 'ue8m0-c7'.")
    named = words if set(words.split("-")) & set(ScaleFormat) else f"{ScaleFormat.FP32}-{words}"
    return parse_id(f"case-{named.removesuffix('-')}", seed)[1]


def known_schema(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a capture of a later schema than this version knows, with a ParityError."""
    schema = metadata.get("capture", str(CAPTURE_SCHEMA))
    if not schema.isdecimal() or not 1 <= int(schema) <= CAPTURE_SCHEMA:
        raise ParityError(
            f"{path} has capture schema {schema!r}, this version reads up to {CAPTURE_SCHEMA}: "
            "use the moe-parity that wrote it, or a later one."
        )


def _of_witness(path: Path) -> Dump:
    kept, _ = witness.read(path)
    if kept.kind != "kernel":
        raise ParityError(f"{path} witnesses a {kept.kind}, not a kernel: nothing to identify.")
    stage, case = witness.kernel_case(kept)
    inputs = stage.inputs(case)
    outputs = stage.outputs(case, inputs)
    made = {name: _from_bits(bits, outputs[name]) for name, bits in kept.tensors.items()}
    ordered = {name: made[name] for name in outputs if name in made}
    return Dump(stage=stage, case=case, inputs=inputs, outputs=ordered)


def _from_bits(bits: Tensor, output: Output) -> Tensor:
    """Return the values that a witness keeps the bits of."""
    if output.kind in (Kind.CODES, Kind.INTEGERS):
        return bits
    if output.kind is Kind.SCALES:
        return bits.view(torch.float32)
    if output.dtype is torch.float16:
        return bits.to(torch.int16).view(torch.float16)
    return bits.view(output.dtype)


def _own(path: Path, stage: Stage[Any], case: Case, tensors: Mapping[str, Tensor]) -> Dump:
    given = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}
    case, inputs = stage.given(stage.check(case), {**tensors, **given})
    outputs = stage.outputs(case, inputs)
    inside = [name for name in outputs if name in tensors]
    returned = {name: tensors[name] for name in inside}
    if not returned:
        have = ", ".join(tensors) or "nothing"
        raise ParityError(
            f"{path} holds {have}, and no output of {stage}, which are {', '.join(outputs)}."
        )
    made = own_outputs(str(path), stage, case, inputs, returned, " holds ")
    return Dump(stage=stage, case=case, inputs=inputs, outputs=made)


def own_outputs(
    who: str, stage: Stage[Any], case: Case, inputs: Any, tensors: Mapping[str, Tensor], verb: str,
    *, partial: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return outputs that exist already in canonical form; ``partial`` takes any of them.

    Raises ParityError for those that do not fit: ``who``, ``verb``, which output, what it is.
    """
    call = Call(case=case, stage=stage, inputs=inputs, allocate=_NoMemory())
    blank = {n: _blank(out) for n, out in call.outputs.items()} if partial else {}
    try:
        made = canonical(who, call, blank | dict(tensors))
    except BadOutput as error:
        raise ParityError(str(error).replace(" returned ", verb)) from None
    return {name: tensor for name, tensor in made.items() if name in tensors or not partial}


def _blank(output: Output) -> Tensor:
    """Return zeros as an output lies in memory."""
    if output.strides is None:
        return torch.zeros(output.shape, dtype=output.dtype)
    return torch.empty_strided(output.shape, output.strides, dtype=output.dtype).zero_()


class _NoMemory:
    """An allocator for outputs that exist already."""

    def __call__(
        self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Refuse."""
        raise ParityError(
            f"no memory for {name}, {dtype} {shape} {strides}: it is read from a file."
        )
