"""The inputs of a captured case in a file: what the base was called with, the candidate is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_parity.harness.captured.feed import named
from moe_parity.harness.captured.file import read as read_capture
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, parse_id
from moe_parity.references.language.stage import Stage


def written(capture: Path, kernel: Kernel, device: str, file: Path) -> Case:
    """Write the inputs of a kernel on a capture; return the case.

    Raises ParityError, in a sentence, for a bad capture, and for a kernel that it does not feed.
    """
    words, tensors = named(read_capture(capture), kernel, device)
    kept = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(kept, file, {"words": words.id})
    return kernel.stage.given(words, kept)[0]


def read(file: Path, stage: Stage[Any], device: str = "cpu") -> tuple[Case, Any]:
    """Return the case and the inputs that a file of ``written`` holds."""
    with safe_open(file, "pt") as opened:
        words = opened.metadata()["words"]
    tensors = {name: tensor.to(device) for name, tensor in load_file(file).items()}
    return stage.given(parse_id(f"it-{words}")[1], tensors)
