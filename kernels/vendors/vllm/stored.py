"""The configurations that vLLM stores for its block-FP8 GEMMs: of an H200, for blocks of 128 x 128.

A file holds an entry for each of some numbers of tokens; a call takes the entry whose number is
nearest to its own, the smaller of two (``try_get_optimal_moe_config``,
``w8a8_triton_block_scaled_mm``).  There are files of the grouped GEMM, by experts and width, and of
the dense one, by N and K.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from moe_parity.kernels.vendors.vllm import package
from moe_parity.references.errors import ParityError

FOLDER = "vllm/model_executor/layers/fused_moe/configs"
LINEAR = "vllm/model_executor/layers/quantization/utils/configs"
SIZES = {FOLDER: ("E", "N"), LINEAR: ("N", "K")}
"""The sizes in the names of a folder's files."""
OTHERS = r"device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=\[128,128\]\.json"
Config = dict[str, int]


class Stored(dict[int, Config]):
    """One file: number of tokens -> configuration."""

    def of(self, m: int) -> Config:
        """Return the configuration of a call with ``m`` tokens."""
        return self[min(sorted(self), key=lambda known: abs(known - m))]


def read(folder: str = FOLDER) -> Mapping[str, Stored]:
    """Return the files of the located package by name, ``E=256,N=256``; empty where none are.

    Raises ParityError, naming the file, for one that does not hold configurations.
    """
    found = package.located()
    if isinstance(found, str):
        return {}
    return read_files(tuple(found.folder(folder).values()), SIZES[folder])


@lru_cache(maxsize=8)
def read_files(files: tuple[Path, ...], sizes: tuple[str, str]) -> Mapping[str, Stored]:
    """Return those of some files that are of an H200 and of these sizes, in order of the sizes."""
    pattern = re.compile(rf"{sizes[0]}=(\d+),{sizes[1]}=(\d+),{OTHERS}")
    named = [(pattern.fullmatch(path.name), path) for path in files]
    found = sorted((int(m[1]), int(m[2]), path) for m, path in named if m)
    return {f"{sizes[0]}={a},{sizes[1]}={b}": _read(path) for a, b, path in found}


def _read(path: Path) -> Stored:
    try:
        entries = json.loads(path.read_bytes())
        made = {int(m): dict(entry) for m, entry in entries.items() if m.isdecimal()}
        whole = all({"BLOCK_SIZE_M", "BLOCK_SIZE_N"} <= entry.keys() for entry in made.values())
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ParityError(f"vLLM's {path.name} cannot be read: {error}") from None
    if not made or not whole:
        raise ParityError(
            f"vLLM's {path.name} must map numbers of tokens to tiles with BLOCK_SIZE_M and "
            "BLOCK_SIZE_N; it does not."
        )
    return Stored(made)
