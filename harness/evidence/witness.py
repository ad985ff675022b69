"""Witnesses: bits that a real kernel or instruction gave on a real GPU, replayed without one.

A witness is a safetensors file: the output bits, and as metadata a schema version, the subject, the
seed, the SHA-256 of the inputs (which are made anew from the seed) and of the outputs, and the
provenance.  ``verify`` makes the inputs, checks both sums, and compares the reference's bits.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_parity.harness.calling.run import on_device
from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.session import environment
from moe_parity.harness.silicon import models
from moe_parity.kernels import Kernel
from moe_parity.references.arithmetic.formats import bits_of
from moe_parity.references.chips import CHIPS, tensor_core, unit_named
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Recipe, Stage, parse_id
from moe_parity.references.recipes import ALL, recipe_named
from moe_parity.references.stages import STAGES, stage_named

SCHEMA = "1"
SHIPPED = Path(__file__).resolve().parents[2] / "suites" / "witnesses"
SAMPLES = 4096
"""Arguments of a scalar model's witness, specials first."""


@dataclass(frozen=True, kw_only=True)
class Witness:
    """A witness in memory; ``tensors`` are int32 or uint8 bits."""

    kind: str
    """model, dot or kernel."""
    subject: str
    detail: str
    """The case: a case id for kernels, JSON of a DotCase for dots, the instruction for models."""
    recipe: str
    seed: int
    tensors: Mapping[str, Tensor]
    provenance: Mapping[str, str]


def sha256(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 over the bytes of the tensors, in order."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def provenance(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return who measured: GPU, driver, versions, date."""
    card = environment.gpu()
    if card is None:
        raise ParityError("a witness is recorded on a GPU, and torch finds none here.")
    versions = environment.versions()
    named = {name: versions[name] for name in ("python", "torch", "triton") if name in versions}
    cuda = str(torch.version.cuda)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = {"gpu": card.name, "driver": card.driver, "cuda": cuda, "date": today}
    return machine | named | dict(extra or {})


def inputs_of(witness: Witness) -> list[Tensor]:
    """Make the inputs of a witness anew, on the CPU."""
    if witness.kind == "model":
        model = models.MODELS[witness.subject]
        return list(models.arguments(model, SAMPLES, witness.seed))
    if witness.kind == "dot":
        dot = models.DotCase(**json.loads(witness.detail))
        return [t for t in models.operands(dot, witness.seed) if t is not None]
    stage, case = kernel_case(witness)
    return stage.sealed(stage.inputs(case))


def expected_of(witness: Witness, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Compute the bits of a witness with the references, on the CPU."""
    if witness.kind == "model":
        model = models.MODELS[witness.subject]
        return {"out": models.result_bits(model.model(*inputs))}
    if witness.kind == "dot":
        unit = unit_named(witness.subject)
        return {"out": bits_of(tensor_core.dot(*inputs, unit=unit))}
    stage, case = kernel_case(witness)
    return _bits(stage.reference(case, stage.inputs(case), recipe_named(witness.recipe)))


def kernel_case(witness: Witness) -> tuple[Stage[Any], Case]:
    """Return the stage and the case of a kernel's witness."""
    stage, _, identity = witness.detail.partition("/")
    return stage_named(stage), parse_id(identity, witness.seed)[1]


def _bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the bits of a stage's tensors, every NaN the same, in as few bytes as they had."""
    narrow = {torch.uint8: torch.uint8, torch.bfloat16: torch.int16}
    return {
        name: comparable(t.cpu()).to(narrow.get(t.dtype, torch.int32)).contiguous()
        for name, t in tensors.items()
    }


def of_kernel(kernel: Kernel, case: Case, recipe: Recipe, extra: Mapping[str, str]) -> Witness:
    """Run a kernel on the GPU and keep its bits."""
    return Witness(
        kind="kernel",
        subject=kernel.name,
        detail=f"{kernel.stage}/{kernel.name}-{case.id}",
        recipe=recipe.name,
        seed=case.seed,
        tensors=_bits(on_device(kernel, case, "cuda")),
        provenance=provenance(extra),
    )


def of_model(name: str, seed: int) -> Witness:
    """Run an instruction on the GPU and keep its bits."""
    from moe_parity.harness.silicon import instructions

    model = models.MODELS[name]
    arguments = tuple(t.cuda() for t in models.arguments(model, SAMPLES, seed))
    bits = instructions.run(model, arguments)
    return Witness(
        kind="model", subject=name, detail=model.instruction, recipe="", seed=seed,
        tensors={"out": bits.cpu()}, provenance=provenance(),
    )  # fmt: skip


def of_dot(case: models.DotCase, seed: int) -> Witness:
    """Run a tensor-core unit on the GPU and keep its bits; raises where another unit was used."""
    from moe_parity.harness.silicon import instructions

    a, b, c = (None if t is None else t.cuda() for t in models.operands(case, seed))
    assert a is not None
    assert b is not None
    bits, unit = instructions.run_dot(case, a, b, c)
    if unit != case.unit:
        raise ParityError(f"{case.name}: Triton compiled the dot to {unit}, not to {case.unit}.")
    return Witness(
        kind="dot", subject=case.unit, detail=json.dumps(asdict(case), sort_keys=True), recipe="",
        seed=seed, tensors={"out": bits.cpu()}, provenance=provenance(),
    )  # fmt: skip


def write(witness: Witness, path: Path) -> None:
    """Write a witness file; the folder is made."""
    tensors = {name: tensor.contiguous() for name, tensor in witness.tensors.items()}
    metadata = {
        "schema": SCHEMA,
        "kind": witness.kind,
        "subject": witness.subject,
        "detail": witness.detail,
        "recipe": witness.recipe,
        "seed": str(witness.seed),
        "inputs_sha256": sha256(inputs_of(witness)),
        "outputs_sha256": sha256(tensors[name] for name in sorted(tensors)),
        "provenance": json.dumps(dict(witness.provenance), sort_keys=True),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata=metadata)
    except OSError as error:
        raise ParityError(f"cannot write {path}: {error.strerror}.") from error


def opened(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a safetensors file, or raise ParityError."""
    if not path.is_file():
        raise ParityError(f"{path} does not exist or is not a file.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            return metadata, {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, OSError) as error:
        raise ParityError(f"{path} is not a safetensors file: {error}.") from error


def read(path: Path) -> tuple[Witness, dict[str, str]]:
    """Read a witness file; raises ParityError for anything that is not one, or was changed."""
    metadata, tensors = opened(path)
    schema = metadata.get("schema")
    if schema != SCHEMA:
        raise ParityError(f"{path} has witness schema {schema!r}, this version reads {SCHEMA!r}.")
    found = sha256(tensors[name] for name in sorted(tensors))
    if found != metadata.get("outputs_sha256"):
        raise ParityError(
            f"{path}: the output bits were changed: their SHA-256 is {found[:16]}..., recorded was "
            f"{str(metadata.get('outputs_sha256'))[:16]}...; record the witness anew."
        )
    return _witness(path, metadata, tensors), metadata


def _witness(path: Path, metadata: dict[str, str], tensors: dict[str, Tensor]) -> Witness:
    try:
        witness = Witness(
            kind=metadata["kind"],
            subject=metadata["subject"],
            detail=metadata["detail"],
            recipe=metadata["recipe"],
            seed=int(metadata["seed"]),
            tensors=tensors,
            provenance=json.loads(metadata["provenance"]),
        )
    except (KeyError, ValueError) as error:
        raise ParityError(f"{path}: broken metadata: {error}.") from error
    known = {
        "model": set(models.MODELS),
        "dot": {unit.name for chip in CHIPS.values() for unit in chip.units},
    }
    known["kernel"] = {witness.subject}
    if witness.subject not in known.get(witness.kind, ()):
        raise ParityError(f"{path}: no reference for {witness.kind} {witness.subject!r}.")
    if witness.kind == "kernel" and witness.recipe not in ALL:
        raise ParityError(f"{path}: unknown recipe {witness.recipe!r}.")
    if not _consistent(witness):
        raise ParityError(
            f"{path}: the metadata contradict each other: {witness.kind} {witness.subject!r} with "
            f"detail {witness.detail!r} and recipe {witness.recipe!r}."
        )
    return witness


def _consistent(witness: Witness) -> bool:
    """Whether subject, detail and recipe speak of one thing."""
    if witness.kind == "model":
        instruction = models.MODELS[witness.subject].instruction
        return witness.detail == instruction and not witness.recipe
    if witness.kind == "dot":
        return f'"unit": "{witness.subject}"' in witness.detail and not witness.recipe
    return witness.detail.partition("/")[2].startswith(f"{witness.subject}-")


def check(path: Path) -> int:
    """Verify one witness; return how many outputs were compared, or raise ParityError."""
    witness, metadata = read(path)
    try:
        inputs = inputs_of(witness)
        found = sha256(inputs)
        if found != metadata.get("inputs_sha256"):
            raise ParityError(
                f"{path}: the inputs of seed {witness.seed} have SHA-256 {found[:16]}..., recorded "
                f"was {str(metadata.get('inputs_sha256'))[:16]}...; the generator has changed."
            )
        expected = expected_of(witness, inputs)
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        text = (str(error).splitlines() or [""])[0]
        raise ParityError(f"{path}: the case cannot be replayed: {text}") from error
    if _may_hold_some(witness) and list(expected)[-1] in witness.tensors:
        expected = {name: want for name, want in expected.items() if name in witness.tensors}
    if expected.keys() != witness.tensors.keys():
        raise ParityError(f"{path} holds {sorted(witness.tensors)}, expected {sorted(expected)}.")
    for name, want in expected.items():
        _compare(path, witness, name, witness.tensors[name], want)
    compared = sum(t.numel() for t in expected.values())
    if not compared:
        raise ParityError(f"{path} holds no output, so it witnesses nothing.")
    return compared


def _may_hold_some(witness: Witness) -> bool:
    """Whether a kernel of this stage may return its last output and any of the others."""
    stage = witness.detail.partition("/")[0]
    return witness.kind == "kernel" and stage in STAGES and STAGES[stage].partial


def _compare(path: Path, witness: Witness, name: str, got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ParityError(
            f"{path}: {name} is {got.dtype} {list(got.shape)}, expected {want.dtype} "
            f"{list(want.shape)}."
        )
    wrong = got != want
    if bool(wrong.any()):
        at = [int(n) for n in wrong.nonzero()[0]]
        seen, right = (int(t[tuple(at)]) & 0xFFFFFFFF for t in (got, want))
        raise ParityError(
            f"{path}: {witness.kind} {witness.subject} gave 0x{seen:x} at {name}{at} on the GPU, "
            f"the reference gives 0x{right:x}; {int(wrong.sum())} of {wrong.numel()} differ."
        )


def paths_of(paths: Iterable[str | Path]) -> list[Path]:
    """Return the witness files of files and folders; the shipped ones for an empty list."""
    found: list[Path] = []
    for path in [Path(p) for p in paths] or [SHIPPED]:
        if not path.exists():
            raise ParityError(f"{path} does not exist.")
        found += sorted(path.glob("**/*.safetensors")) if path.is_dir() else [path]
    if not found:
        raise ParityError("no witness file (*.safetensors) found; name one, or a folder of them.")
    return found
