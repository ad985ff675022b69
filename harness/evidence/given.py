"""Tensors of somebody's own test: looked at, one demand after the other, before they are judged.

Whatever does not fit is said in a sentence, and what would be green because nothing is compared is
refused as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moe_parity.harness.checks.judged import Judged
from moe_parity.harness.evidence.dump import own_outputs
from moe_parity.references.chips import why_not_modelled
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Recipe, Stage, Values
from moe_parity.references.recipes import recipe_named
from moe_parity.references.stages import stage_named
from moe_parity.references.stages.routing import local_expert

IDS = ("ids", "expert")
"""Inputs that hold the numbers of experts."""
SCALES = frozenset({"a_scale", "x_scale", "w_scale", "w13_scale", "w2_scale"})
"""Inputs that something is multiplied by."""
MOST_EXPERTS = 1 << 16
"""Experts past which a number is none: memory that was not written, or another tensor."""


def stage_of(name: object) -> Stage[object]:
    """Return the stage of a name; raises ParityError for what is none."""
    if not isinstance(name, str):
        raise ParityError(f"the stage is {name!r:.60}, expected the name of one.")
    return stage_named(name)


def recipes_of(stage: Stage[object], given: object) -> tuple[Recipe, ...]:
    """Return the recipes that are meant; raises ParityError for one that is none, and for none."""
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    found = []
    for one in several:
        if not isinstance(one, str | Recipe):
            raise ParityError(
                f"the recipe is {one!r:.60}, expected a name, a Recipe, or a list of these."
            )
        recipe = recipe_named(one) if isinstance(one, str) else one
        if not stage.described_by(recipe):
            needed = stage.acting.keys() if stage.needs is None else stage.needs
            lacks = ", ".join(sorted(needed - recipe.parts.keys()))
            raise ParityError(f"recipe {recipe.name} says nothing about {stage}: it lacks {lacks}.")
        found.append(recipe)
    if not found:
        raise ParityError(f"no recipe is given for {stage}: name one, or several.")
    return tuple(found)


def judged_of(
    stage: Stage[object],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    said: Case,
    who: str,
) -> Judged:
    """Return what is to be judged, under the words of a case.

    Raises ParityError, in a sentence, for what does not fit the stage.
    """
    given, returned = _tensors(stage, "input", inputs), _tensors(stage, "output", outputs)
    _demand_one_device(stage, {**{f"input {n}": t for n, t in given.items()},
                               **{f"output {n}": t for n, t in returned.items()}})  # fmt: skip
    known_experts = said.e > 1 and not said.has_odd_ids
    for name in IDS:
        most = said.e if known_experts and name == "ids" else MOST_EXPERTS
        _demand_ids(stage, given, name, most)
    asked = _Asked(given)
    case, made = stage.given(stage.check(said), asked)
    if unknown := [name for name in given if name not in asked.names]:
        raise ParityError(
            f"{stage} takes no input {', '.join(unknown)} here; it asks for "
            f"{', '.join(asked.names)}."
        )
    _demand_said(stage, said, stage.check(case))
    if not case.has_odd_ids:
        _demand_ids(stage, given, "ids", case.e)
    if said.values is not Values.SCALES:
        _demand_scales(stage, given, case)
    known = stage.outputs(case, made)
    if missing := [name for name in returned if name not in known]:
        raise ParityError(
            f"{stage} has no output {', '.join(missing)}; its outputs are {', '.join(known)}."
        )
    got = own_outputs(str(stage), stage, case, made, returned, " got ")
    if empty := [name for name, tensor in got.items() if not tensor.numel()]:
        raise ParityError(
            f"{stage}: the output {', '.join(empty)} has no elements: nothing to compare."
        )
    return Judged(who=who, stage=stage, case=case, inputs=made, got=got)


class _Asked(Mapping[str, Tensor]):
    """Tensors by name that note which names a stage asks for, optional ones too."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.names: dict[str, None] = {}

    def __getitem__(self, name: str) -> Tensor:
        self.names[name] = None
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        self.names[str(name)] = None
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _tensors(stage: Stage[object], what: str, given: object) -> dict[str, Tensor]:
    """Return tensors by name, without their gradients; raises ParityError for anything else."""
    if not isinstance(given, Mapping):
        raise ParityError(
            f"{stage}: the {what}s are a {type(given).__name__}, expected a mapping from names "
            "to tensors."
        )
    if not given:
        raise ParityError(f"{stage} is given no {what}s: nothing to compare.")
    for name, tensor in given.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ParityError(
                f"{stage}: the {what} {name} is a {type(tensor).__name__}, expected a tensor."
            )
        if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
            kind = str(tensor.layout).removeprefix("torch.")
            raise ParityError(
                f"{stage}: the {what} {name} is {kind} on {tensor.device}, expected a plain tensor "
                "on a CPU or a CUDA GPU."
            )
    return {name: tensor.detach() for name, tensor in given.items()}


def _demand_one_device(stage: Stage[object], named: Mapping[str, Tensor]) -> None:
    first, *others = named.items()
    for name, tensor in others:
        if tensor.device != first[1].device:
            raise ParityError(
                f"{stage}: the {first[0]} is on {first[1].device}, the {name} on {tensor.device}: "
                "move all to one device."
            )


def _demand_ids(stage: Stage[object], given: Mapping[str, Tensor], name: str, most: int) -> None:
    """Raise ParityError for ids past the last of ``most`` experts; -1 is nobody's."""
    ids = given.get(name)
    if ids is None or not ids.numel() or ids.dtype.is_floating_point or ids.dtype.is_complex:
        return  # of another type: the stage says so
    low, high = int(ids.min()), int(ids.max())
    if low < -1 or high >= most:
        wrong = low if low < -1 else high
        place = (ids == wrong).nonzero()[0].tolist()
        raise ParityError(
            f"{stage}: the input {name} is {wrong} at {place}, expected an expert from 0 to "
            f"{most - 1}, or -1 for nobody's."
        )


def _demand_scales(stage: Stage[object], given: Mapping[str, Tensor], case: Case) -> None:
    """Raise ParityError for a NaN among the scales of rows and experts that take part.

    What it multiplies is NaN whatever a kernel does, and any NaN equals any other.
    """
    ids = given.get("ids")
    owned = torch.ones(0, dtype=torch.bool)
    if ids is not None:
        owned = local_expert(ids, case.first_expert, case.local_experts).view(ids.shape)
    for name in sorted(SCALES & given.keys()):
        bad = torch.isnan(given[name])
        if ids is not None:
            used = torch.zeros(len(bad), dtype=torch.bool, device=bad.device)
            if name.startswith("w"):
                used[owned[owned >= 0]] = True
            else:
                live = owned >= 0
                used = live.any(1) if len(bad) == len(ids) else live.flatten()
            bad = bad & used.view(-1, *[1] * (bad.dim() - 1))
        if bool(bad.any()):
            raise ParityError(
                f"{stage}: the input {name} is NaN at {bad.nonzero()[0].tolist()}, and what it "
                "scales is NaN whatever a kernel does; leave it out, or say that it is meant by "
                f"the word {Values.SCALES} of the case."
            )


def _demand_said(stage: Stage[object], said: Case, case: Case) -> None:
    """Raise ParityError where the words of a case say another size or type than the tensors."""
    for field in dataclasses.fields(Case):
        wanted, own = getattr(said, field.name), getattr(case, field.name)
        if wanted not in (field.default, own):
            raise ParityError(
                f"{stage}: the case says {field.name} {wanted}, the tensors have {own}; what "
                "tensors say may be left out."
            )


def demand_chip(judged: Judged, recipes: tuple[Recipe, ...]) -> None:
    """Raise ParityError where the bits depend on a GPU whose arithmetic has no model."""
    device = judged.stage.handed(judged.inputs)[0].device
    if device.type != "cuda" or not any(r.on_chip(judged.stage.acting) for r in recipes):
        return
    major, minor = torch.cuda.get_device_capability(device)
    missing = why_not_modelled(f"sm_{major}{minor}")
    if missing is not None:
        raise ParityError(
            f"{judged.stage} cannot be judged on {device}: {missing}. Tensors that were made on "
            "another GPU can be, once they are on the CPU."
        )
