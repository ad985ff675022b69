"""The file of a capture: a safetensors file that any reader opens, and what is refused in it.

Tensors have the names of the stage's inputs and outputs (docs/stages.md).  In the metadata
``capture`` is the version of this schema, ``stage`` and ``case`` are words of ours, ``origin`` is
JSON that says which rows and experts of how many these are.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from moe_parity.harness.captured.axes import AXES, is_output, sizes_of
from moe_parity.harness.evidence import dump, witness
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Routing, Stage, parse_id
from moe_parity.references.stages import stage_named
from moe_parity.references.stages.gemm.reference import hit
from moe_parity.references.stages.routing import local_expert
from moe_parity.reports.results import write_atomic

SCHEMA = dump.CAPTURE_SCHEMA
"""The version that is written; a later one is refused."""
SHOWN = 8
"""Rows that a sentence lists."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """Tensors of one layer, or of one stage, on the CPU; codes are uint8."""

    path: Path
    stage: Stage[Any]
    case: Case
    """The words, with the sizes of these tensors."""
    given: Mapping[str, Tensor]
    """Inputs by name."""
    seen: Mapping[str, Tensor]
    """Outputs by name, as the model gave them: whole, or none."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """``sizes`` before the cut, ``rows`` and ``experts`` that were kept, ``call``, ``module``."""

    @property
    def words(self) -> str:
        """The words of the case that are no sizes."""
        return words_of(self.case)

    @property
    def rows_said(self) -> str:
        """A sentence that says which rows these are, empty where nothing is known."""
        rows = self.origin.get("rows")
        if not rows:
            return ""
        of = self.origin.get("sizes", {}).get("m", "?")
        if len(rows) == 1:
            return f"The token of {self.path.name} is row {rows[0]} of {of} captured ones."
        more = "" if len(rows) <= SHOWN else f" and {len(rows) - SHOWN} more"
        listed = ", ".join(map(str, rows[:SHOWN])) + more
        return f"The tokens of {self.path.name} are rows {listed} of {of} captured ones."


def words_of(case: Case) -> str:
    """Return the words of a case that are no sizes, as ``--case`` takes them."""
    plain = dataclasses.replace(case, **{n: getattr(Case(), n) for n in ("m", "e", "k", "h", "i")})
    return "-".join(word for word in plain.id.split("-") if word not in ("m1", "h128"))


def read(path: Path | str) -> Captured:
    """Read a capture, or own tensors that say their stage.

    Raises ParityError, in a sentence, for a file that is none, of a later schema, with tensors that
    are missing or do not fit, ids that no expert has, and scales that cannot be.
    """
    path = Path(path)
    metadata, tensors = witness.opened(path)
    if "outputs_sha256" in metadata:
        raise ParityError(
            f"{path} is a witness, not captured tensors: its inputs are made from a seed; "
            f"`parity witness verify {path}` replays it."
        )
    dump.known_schema(path, metadata)
    name = metadata.get("stage", "none")
    if name not in AXES:
        raise ParityError(
            f"{path} holds {', '.join(tensors) or 'nothing'} and its metadata say stage {name!r}, "
            f"expected one of {', '.join(AXES)}: write it with moe_parity.harness.capture "
            "(docs/captured.md)."
        )
    own = {key.removeprefix(dump.PREFIX): as_bytes(value) for key, value in tensors.items()}
    try:
        words = parse_id(f"it-{metadata.get('case', 'fp32')}")[1]
        return made(path, stage_named(name), words, own, _origin(path, metadata))
    except ParityError as error:
        raise ParityError(f"{path}: {error}") from None


def _origin(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        found = json.loads(metadata.get("origin", "{}"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ParityError(f"{path}: broken metadata: origin is no JSON object.")
    return found


def made(
    path: Path,
    stage: Stage[Any],
    words: Case,
    tensors: Mapping[str, Tensor],
    origin: Mapping[str, Any],
) -> Captured:
    """Return tensors as a capture; raises ParityError for what ``read`` refuses."""
    known = {name: tensor for name, tensor in tensors.items() if name in AXES[stage.name]}
    given = {name: t for name, t in known.items() if not is_output(stage.name, name)}
    sizes = sizes_of(stage.name, known)
    ids = given.get("ids")
    if ids is not None and words.ep_size > 1 and "e" not in sizes:
        raise ParityError(
            f"{stage} alone does not say how many experts a rank has: leave the rank out of "
            f"{words_of(words)}, and let ids of other ranks be -1."
        )
    if ids is not None and "routing" in stage.reads and bool((ids == -1).any()):
        words = dataclasses.replace(words, routing=Routing.HOLES)
    case, inputs = stage.given(stage.check(words), given)
    stage.check(case)
    if ids is not None:
        _ids(ids, case, sizes.get("e"))
    _scales(case, _of_hit(stage, case, given))
    seen = {name: tensor for name, tensor in known.items() if name not in given}
    if seen:
        seen = dump.own_outputs(str(path), stage, case, inputs, seen, " holds ", partial=True)
    return Captured(path=path, stage=stage, case=case, given=given, seen=seen, origin=origin)


def _ids(ids: Tensor, case: Case, experts: int | None) -> None:
    """Refuse ids that no expert of any rank has."""
    e = case.e if experts is None else experts * case.ep_size
    wrong = (ids < -1) | (ids >= e)
    if bool(wrong.any()):
        row, choice = (int(n) for n in wrong.nonzero()[0])
        ranks = f" over {case.ep_size} ranks" if case.ep_size > 1 else ""
        raise ParityError(
            f"ids hold {int(ids[row, choice])} at row {row}, choice {choice}, and there are {e} "
            f"experts{ranks}: expected 0 to {e - 1}, or -1 for nobody; where the ids are global "
            "and the experts one rank's, say the rank as a word of the case, such as fp32-ep1of4."
        )


def _of_hit(stage: Stage[Any], case: Case, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without the experts that no pair takes, whose scales nobody reads."""
    axes = AXES[stage.name]
    if "ids" not in given or not any(axes[name].startswith("e") for name in given):
        return dict(given)
    experts = next(t.shape[0] for name, t in given.items() if axes[name].startswith("e"))
    taken = hit(local_expert(given["ids"], case.first_expert, experts))
    return {n: t[list(taken)] if axes[n].startswith("e") else t for n, t in given.items()}


def _scales(case: Case, given: Mapping[str, Tensor]) -> None:
    """Refuse scales that are no numbers, and where the case says so those that are no powers."""
    for name, tensor in given.items():
        if not name.endswith("_scale"):
            continue
        form = case.mid if name == "w2_scale" else case.scale
        wrong, what = ~torch.isfinite(tensor), "scales are finite"
        if form.is_power_of_two and not bool(wrong.any()):
            mantissa, exponent = torch.frexp(tensor)
            wrong = (mantissa != 0.5) | (exponent < -126)
            what = f"the case says {form.value}: powers of two; say --case fp32 where they are not"
        if bool(wrong.any()):
            place = [int(n) for n in wrong.nonzero()[0]]
            raise ParityError(
                f"{name} holds {float(tensor[tuple(place)]):g} at {place}, and {what}."
            )


def as_bytes(tensor: Tensor) -> Tensor:
    """Return codes as uint8 and everything else as it is."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor


def serialized(captured: Captured) -> bytes:
    """Return the bytes of the file."""
    tensors = {**captured.given, **captured.seen}
    metadata = {
        "capture": str(SCHEMA), "stage": captured.stage.name, "case": captured.words,
        "origin": json.dumps(dict(captured.origin), sort_keys=True),
    }  # fmt: skip
    # a copy: two names may share memory in a model, which a file of this format cannot say
    return bytes(save({n: t.contiguous().clone() for n, t in tensors.items()}, metadata))


def write(captured: Captured) -> int:
    """Write the whole file or, with a ParityError, none of it; return its bytes."""
    data = serialized(captured)
    write_atomic(captured.path, data)
    return len(data)
