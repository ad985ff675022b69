"""What a run ran on: GPU, versions, commit, our environment variables; and one GPU per worker.

No import of torch here unless the machine shows an NVIDIA driver: a report header, a bad option
and a test of either should not take seconds. `bind_worker_gpu` must run before torch is imported.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import warnings
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib import metadata
from pathlib import Path

KNOWN_VARIABLES = (
    "MOE_PARITY_DECODE",
    "MOE_PARITY_DEVICE",
    "MOE_PARITY_FUSED_MOE",
    "MOE_PARITY_PROFILE",
    "MOE_PARITY_SEED",
    "MOE_PARITY_UE8M0",
    "MOE_PARITY_VLLM",
)
PREFIX = "MOE_PARITY_"

_ALWAYS = ("moe-parity", "torch", "triton", "numpy", "hypothesis", "pytest")
_IF_INSTALLED = ("sgl-deep-gemm", "deep-gemm", "vllm", "sglang", "flashinfer-python", "numba")


@dataclass(frozen=True)
class Gpu:
    """The GPU of this process, as CUDA and the driver name it."""

    name: str
    capability: str
    driver: str


def gpu_lost() -> bool:
    """Whether an error of a kernel, such as an access outside memory, has ended this process's GPU.

    CUDA refuses everything after such an error, whoever asks.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@lru_cache(maxsize=1)
def gpu() -> Gpu | None:
    """Return the CUDA device that torch would use, None where there is none."""
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg")):
        return None
    with warnings.catch_warnings():
        # torch warns about a driver that is too old; to us this is no GPU
        warnings.simplefilter("ignore")
        try:
            import torch

            if not torch.cuda.is_available() or torch.version.cuda is None:
                return None
            major, minor = torch.cuda.get_device_capability()
            return Gpu(torch.cuda.get_device_name(), f"sm_{major}{minor}", _driver())
        except (ImportError, RuntimeError):
            return None


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return found[1] if found else "unknown"


def bind_worker_gpu(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give an xdist worker one GPU of those that the caller made visible.

    Worker n gets entry n (modulo their number) of the caller's CUDA_VISIBLE_DEVICES: a plain n
    would take GPUs that the caller excluded. Without that variable, all GPUs count. A worker
    that torch has already been imported in is too late; elsewhere this does nothing.
    """
    worker = re.fullmatch(r"gw(\d+)", environ.get("PYTEST_XDIST_WORKER", ""))
    if worker is None:
        return
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        number = sum(bool(re.fullmatch(r"nvidia\d+", node.name)) for node in Path("/dev").iterdir())
        devices = [str(index) for index in range(number)]
    else:
        devices = [device.strip() for device in visible.split(",") if device.strip()]
    if devices:
        environ["CUDA_VISIBLE_DEVICES"] = devices[int(worker[1]) % len(devices)]


def share_cores(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give an xdist worker its share of the cores, where the caller has not set the numbers.

    Otherwise every worker starts a thread for every core, in torch and in numba, and they wait for
    each other. Must run before either is imported; elsewhere this does nothing.
    """
    workers = environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    if workers.isdigit() and int(workers) > 0:
        share = str(max(1, (os.cpu_count() or 1) // int(workers)))
        environ.setdefault("OMP_NUM_THREADS", share)
        environ.setdefault("NUMBA_NUM_THREADS", share)


def versions() -> dict[str, str]:
    """Return the versions that decide bits, by distribution name; "absent" where missing."""
    found = {"python": platform.python_version()}
    for name in (*_ALWAYS, *_IF_INSTALLED):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in _ALWAYS:
                found[name] = "absent"
    return found


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return every environment variable that looks like ours, misspelt ones too."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(PREFIX)}


def misspelt(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable with our prefix that nothing reads."""
    sentences = []
    for name in variables(environ):
        if name not in KNOWN_VARIABLES:
            close = get_close_matches(name, KNOWN_VARIABLES, n=1, cutoff=0.0)[0]
            sentences.append(
                f"the environment variable {name} is unknown and has no effect; "
                f"did you mean {close}?"
            )
    return sentences


def describe(device: str) -> dict[str, str]:
    """Return the `environment` of a run line: versions, machine, GPU, our variables."""
    found = versions()
    found["platform"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    card = gpu() if device == "cuda" else None
    if card is not None:
        found |= {"gpu": f"{card.name} ({card.capability})", "driver": card.driver}
    return found | variables()
