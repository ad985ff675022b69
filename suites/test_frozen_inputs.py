"""An id keeps its inputs for ever: every stage, every word, one at a time, to the bit.

``frozen_inputs.json`` holds the hashes.  After a stage, a word or a pool was added, write the new
lines with ``python suites/test_frozen_inputs.py``; it never changes a line that is there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_parity.harness.calling.run import WHOLE
from moe_parity.references.language import (
    Arrival,
    Case,
    Gate,
    Hazard,
    InputDtype,
    Routing,
    ScaleFormat,
    ScaleLayout,
    Values,
)
from moe_parity.references.stages import STAGES
from moe_parity.references.stages.quant.aims import POOLS
from moe_parity.references.stages.swiglu.pools import VERSIONS
from moe_parity.suites.aimed import decided

FILE = Path(__file__).with_name("frozen_inputs.json")
BASES = {
    "act_quant": (Case(m=70, h=512),),
    "weight_quant": (Case(i=200, h=300),),
    "align": (Case(m=37, e=6, k=3), Case(m=5, e=1, k=1)),
    "permute": (Case(m=21, e=6, k=3, h=256),),
    "fc1": (Case(m=9, e=6, k=3, h=384, i=128),),
    "swiglu": (Case(m=70, i=256, e=3),),
    "swiglu_quant": (Case(m=70, i=256, e=3),),
    "fc2": (Case(m=9, e=6, k=3, h=128, i=384),),
    "combine": (Case(m=70, e=8, k=8, h=256), Case(m=3, e=6, k=1, h=256)),
    "layer": (
        Case(m=5, e=6, k=3, h=256, i=128),
        Case(m=40, e=4, k=4, h=128, i=128),
        Case(m=3, e=4, k=2, h=256, i=256),
    ),
    "quant_gemm": (Case(m=21, h=384, i=192), Case(m=21, h=512, i=130)),
}
CHANGES: tuple[dict[str, Any], ...] = (
    {}, {"seed": 5}, {"m": 0}, {"m": 1}, {"ep_size": 2, "ep_rank": 1}, {"clamp": 9.97},
    {"group": 64}, *({"values": v} for v in Values), *({"routing": r} for r in Routing),
    *({"gate": g} for g in Gate), *({"hazard": h} for h in Hazard),
    *({"dtype": d} for d in InputDtype),
    *({"values": Values.AIMED, "pool": pool} for pool in {*POOLS, *VERSIONS}),
    *({"values": Values.SPECIAL, "pool": pool} for pool in {*POOLS, *VERSIONS}),
    {"values": Values.AIMED, "clamp": 9.97},
    {"values": Values.AIMED, "routing": Routing.HOLES, "ep_size": 2, "ep_rank": 1},
    {"values": Values.SPECIAL, "dtype": InputDtype.FP32, "m": 300},
    {"hazard": Hazard.STRIDED, "dtype": InputDtype.FP32}, {"routing": Routing.HOLES, "m": 0},
    {"routing": Routing.REPEATED, "seed": 5},
    *({"layout": one} for one in ScaleLayout),
    {"layout": ScaleLayout.TMA, "hazard": Hazard.GAPS, "values": Values.SCALES},
    {"layout": ScaleLayout.TMA, "hazard": Hazard.OFFSET2, "values": Values.SCALES},
    {"values": Values.SCALES, "scale": ScaleFormat.UE8M0, "m": 40, "seed": 5},
    {"values": Values.SCALES, "routing": Routing.HOLES, "ep_size": 2, "ep_rank": 1},
    {"arrives": Arrival.QUANTIZED},
    {"arrives": Arrival.QUANTIZED, "scale": ScaleFormat.UE8M0, "values": Values.AIMED},
)  # fmt: skip


def cases() -> Iterator[tuple[str, str, Case]]:
    """Yield (key, stage, case): every change of every base that the stage reads."""
    seen = set()
    for stage, bases in BASES.items():
        for base in bases:
            for change in CHANGES:
                case = dataclasses.replace(base, **change)
                key = f"{stage}-{case.id}-seed{case.seed}"
                shared = case.e % case.ep_size == 0
                if shared and STAGES[stage].refusal(case) is None and key not in seen:
                    seen.add(key)
                    yield key, stage, case


def aims() -> Iterator[tuple[str, Any]]:
    """Yield (key, inputs) of every decision."""
    for name, decision in sorted(decided().items()):
        for seed in (0, 5):
            yield f"{name}-aim-seed{seed}", decision.aim(seed)


def digest(value: Any) -> str:
    """Hash all that a dataclass of inputs holds: tensors with geometry, and plain values."""
    total = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            total.update(f"{value.dtype} {tuple(value.shape)} {value.stride()}".encode())
            storage = value.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            if storage.nbytes() > WHOLE:  # few of its pages are in use
                total.update(f"{storage.nbytes()} from {value.storage_offset()}".encode())
                flat = value.contiguous().view(torch.uint8)
            total.update(flat.numpy().tobytes())
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                total.update(field.name.encode())
                take(getattr(value, field.name))
        else:
            total.update(getattr(value, "__name__", repr(value)).encode())

    take(value)
    return total.hexdigest()[:16]


def frozen() -> dict[str, str]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


@pytest.mark.parametrize("stage", STAGES)
def test_inputs_are_what_they_were(stage: str):
    known = frozen()
    changed = [
        key
        for key, name, case in cases()
        if name == stage and digest(STAGES[name].inputs(case)) != known.get(key)
    ]
    assert not changed, f"other inputs than before: {changed}"


def test_the_inputs_of_every_decision_are_what_they_were():
    """Those that are made for it alone, of two seeds."""
    known = frozen()
    changed = [key for key, value in aims() if digest(value) != known.get(key)]
    assert not changed, f"other inputs than before: {changed}"


def test_every_case_is_frozen():
    """No line is left over, and none is missing."""
    assert set(frozen()) == {key for key, _, _ in cases()} | {key for key, _ in aims()}


if __name__ == "__main__":
    known = frozen()
    for key, name, case in cases():
        known.setdefault(key, digest(STAGES[name].inputs(case)))
    for key, value in aims():
        known.setdefault(key, digest(value))
    FILE.write_text(json.dumps(known, indent=0) + "\n")
