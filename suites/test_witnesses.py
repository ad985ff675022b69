"""The shipped witnesses replay on a CPU; a changed one does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.evidence import witness
from moe_parity.harness.evidence.witness import SHIPPED
from moe_parity.references.errors import ParityError

FILES = sorted(SHIPPED.glob("**/*.safetensors"))


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: "-".join(path.relative_to(SHIPPED).with_suffix("").parts)
)
def test_replays(path: Path, parity_recorder: Recorder):
    """The reference gives the bits that the GPU gave."""
    compared = witness.check(path)
    kept, _ = witness.read(path)
    claim(
        parity_recorder, "witness", recipe=kept.recipe, device="reference", compared=compared,
        kernel=kept.subject if kept.kind == "kernel" else f"model_{kept.subject}",
        stage=kept.detail.partition("/")[0] if kept.kind == "kernel" else "",
    )  # fmt: skip


def test_they_are_small():
    """All witnesses together stay under 5 MB."""
    assert sum(path.stat().st_size for path in FILES) < 5_000_000


def _copy(tmp_path: Path, change) -> Path:
    """Copy a witness, its tensors and metadata changed by ``change(tensors, metadata)``."""
    with safe_open(FILES[0], framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    change(tensors, metadata)
    path = tmp_path / "changed.safetensors"
    save_file(tensors, path, metadata=metadata)
    return path


def _flip(tensors, metadata):
    name = sorted(tensors)[0]
    tensors[name].view(-1)[7] ^= 1


def _flip_and_reseal(tensors, metadata):
    _flip(tensors, metadata)
    metadata["outputs_sha256"] = witness.sha256(tensors[name] for name in sorted(tensors))


def _schema(tensors, metadata):
    metadata["schema"] = "99"


def _sum(tensors, metadata):
    metadata["inputs_sha256"] = "0" * 64


def _subject(tensors, metadata):
    metadata["kind"], metadata["subject"] = "model", "tanh"


def _no_seed(tensors, metadata):
    del metadata["seed"]


def _other_recipe(tensors, metadata):
    metadata["recipe"] = "ours" if metadata["kind"] != "kernel" else metadata["recipe"]
    metadata["subject"] = "zzz" if metadata["kind"] == "kernel" else metadata["subject"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_other_recipe, "the metadata contradict each other"),
        (_flip, "output bits were changed"),
        (_flip_and_reseal, r"gave 0x\w+ at .* on the GPU, the reference gives 0x\w+; 1 of"),
        (_schema, "witness schema '99', this version reads '1'"),
        (_sum, "the generator has changed"),
        (_subject, "no reference for model 'tanh'"),
        (_no_seed, "broken metadata"),
    ],
)
def test_a_changed_witness_is_refused(change, sentence: str, tmp_path: Path):
    with pytest.raises(ParityError, match=sentence):
        witness.check(_copy(tmp_path, change))


@pytest.mark.parametrize("content", [b"", b"not safetensors", json.dumps({}).encode()])
def test_a_foreign_file_is_refused(content: bytes, tmp_path: Path):
    path = tmp_path / "foreign.safetensors"
    path.write_bytes(content)
    with pytest.raises(ParityError, match="is not a safetensors file"):
        witness.check(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ParityError, match="does not exist"):
        witness.check(tmp_path / "absent.safetensors")
    with pytest.raises(ParityError, match="no witness file"):
        witness.paths_of([tmp_path])
    with pytest.raises(ParityError, match="does not exist"):
        witness.paths_of([tmp_path / "absent"])


def test_the_sum_covers_every_bit():
    x = torch.arange(5, dtype=torch.int32)
    y = x.clone()
    y[4] ^= 1 << 30
    assert witness.sha256([x]) != witness.sha256([y])
