"""Where vLLM's files are: an unpacked wheel, a source checkout, folders of changed files over one.

``MOE_PARITY_VLLM`` names folders, as ``PATH`` does; a later one lies over the earlier ones, so its
files are taken where it has them.  A folder holds ``vllm/``, or what is inside of that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

from moe_parity.references.versions import STATED, nearest, release

VARIABLE = "MOE_PARITY_VLLM"
PACKAGE = "vllm"
INSIDE = ("model_executor", "envs.py", "_custom_ops.py", "version.py")
"""What tells a folder that lies inside of ``vllm/``."""
KNOWN = STATED[PACKAGE].versions
"""The versions whose recipes are stated."""
UNKNOWN = "unknown"
"""The version of files that nothing says the version of."""


@dataclass(frozen=True)
class Package:
    """A vLLM on disk."""

    roots: tuple[Path, ...]
    """Folders that stand for ``vllm/``; a later one lies over the earlier ones."""
    version: str

    @property
    def nearest(self) -> str:
        """The known version whose recipes are taken."""
        return nearest(self.version, KNOWN)

    @property
    def divides(self) -> bool:
        """Whether per_token_group_fp8_quant computes x / s; later versions x * (1 / s)."""
        return (release(self.nearest) or ()) < (0, 27)

    def file(self, path: str) -> Path:
        """Return where a file is, by its path from ``vllm/`` on; it may be nowhere."""
        below = path.removeprefix(f"{PACKAGE}/")
        places = [root / below for root in self.roots]
        return next((place for place in reversed(places) if place.exists()), places[0])

    def named(self, path: str) -> str:
        """Return a file's path with the folder that it comes from, where there are several."""
        found = self.file(path)
        owner = next(root for root in reversed(self.roots) if found.is_relative_to(root))
        return f"{_called(owner)}:{path}" if len(self.roots) > 1 else path

    def folder(self, path: str) -> dict[str, Path]:
        """Return the files of a folder by name, each from the last root that has it."""
        below = path.removeprefix(f"{PACKAGE}/")
        return {file.name: file for root in self.roots for file in sorted((root / below).glob("*"))}


def _called(root: Path) -> str:
    """Return what a root is called: its folder's name, or that of what holds ``vllm/``."""
    return root.resolve().parent.name if root.name == PACKAGE else root.resolve().name


def located() -> Package | str:
    """Return the package, or why there is none, in one sentence."""
    return _located(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=8)
def _located(named: str) -> Package | str:
    if named:
        return _of_folders([Path(part) for part in named.split(os.pathsep) if part])
    try:
        found = distribution(PACKAGE)
    except PackageNotFoundError:
        return f"vLLM is not installed and {VARIABLE} names no unpacked wheel and no checkout."
    installed = Path(str(found.locate_file(PACKAGE)))
    if not installed.is_dir():
        installed = _edited(found.read_text("direct_url.json") or "{}") or installed
    return Package((installed,), found.version)


def _edited(direct_url: str) -> Path | None:
    """Return ``vllm/`` of the checkout that was installed with ``pip install -e``."""
    url = urlparse(str(json.loads(direct_url).get("url", "")))
    found = Path(unquote(url.path)) / PACKAGE
    return found if url.scheme == "file" and found.is_dir() else None


def _of_folders(folders: list[Path]) -> Package | str:
    roots = []
    for folder in folders:
        if not folder.is_dir():
            return f"{VARIABLE}: {folder} is no folder."
        root = folder / PACKAGE
        # a checkout's own folder may be called vllm as well: what it holds decides
        if not root.is_dir():
            root = folder
            if not any((folder / name).exists() for name in INSIDE):
                return (
                    f"{VARIABLE}: {folder} holds no folder vllm, and none of {', '.join(INSIDE)}, "
                    "which lie inside of it; name an unpacked wheel, a checkout, or files laid out "
                    "as there."
                )
        roots.append(root)
    if not roots:
        return f"{VARIABLE} names no folder."
    version = next(filter(None, map(_version, roots)), UNKNOWN)
    over = [re.sub(r"[^A-Za-z0-9]+", ".", _called(root)).strip(".") for root in roots[1:]]
    # as PEP 440 marks a changed version, so that it is no known one
    for name in over:
        version += f"{'.' if '+' in version else '+'}{name}"
    return Package(tuple(roots), version)


def _version(root: Path) -> str | None:
    return next(_versions(root), None)


def _versions(root: Path) -> Iterator[str]:
    """Yield what a folder says of its version, the surest first."""
    for info in sorted(root.parent.glob("vllm-*.dist-info")):
        yield info.name.removeprefix("vllm-").removesuffix(".dist-info")
    checkout = root.parent
    if (checkout / ".git").exists():
        # the file that a build leaves in a checkout is of the day of the build
        yield from _described(checkout)
    written = root / "_version.py"
    if written.is_file():
        found = re.search(r"version\s*=\s*['\"]([^'\"]+)", written.read_text(errors="replace"))
        yield from (found[1],) if found else ()


def _described(checkout: Path) -> Iterator[str]:
    """Yield what git says: the last tag and what came after, or the commit alone."""
    command = ["git", "-C", str(checkout), "describe", "--tags", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return
    yield from filter(None, (done.stdout.strip(),))
