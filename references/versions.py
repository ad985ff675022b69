"""Which versions of a project the recipes are stated for, and which of them another one is nearest.

A version that nobody has read follows the recipes of the nearest that somebody has.  That is a
guess, so it is said wherever a result is: what the kernel really computes is identified when its
bits differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project whose recipes are stated."""

    name: str
    versions: tuple[str, ...]
    """Those whose source was read, or whose kernels were run, for the recipes."""


_DEEPGEMM = Project(name="DeepGEMM", versions=("2.5.0.post20260629", "2.6.1", "2.8.1"))
STATED: Mapping[str, Project] = {
    "vllm": Project(name="vLLM", versions=("0.26.0", "0.33.0")),
    "sgl-deep-gemm": Project(name="sgl-deep-gemm", versions=("0.1.5.post1",)),
    "deep-gemm": _DEEPGEMM,
    "tokenspeed-deepgemm": _DEEPGEMM,
    "flashinfer-python": Project(name="FlashInfer", versions=("0.6.18",)),
    "torch": Project(name="torch", versions=("2.11.0",)),
}
"""Projects by the name of their distribution."""

_RELEASE = re.compile(r"v?(\d+(?:\.\d+)+)")
_NO_TAG = re.compile(r"0(\.0)+|0\.1\.dev\d+")
"""What setuptools_scm makes up where git has no tag: it says nothing of the source."""
_BUILD = re.compile(r"\+(cu\d+|cpu)$")
"""A release's build for another CUDA has the release's source."""


def release(version: str) -> tuple[int, ...] | None:
    """Return the numbers of a release, four or more; None where a version tells none.

    ``0.34.1.dev5+gabcdef0``, ``v0.34.1-5-gabcdef0-dirty`` and ``0.34.1rc1`` are 0.34.1; a hash,
    ``unknown`` and what stands in for a missing tag (``0.1.dev5+gabcdef0``) are none.
    """
    found = _RELEASE.match(version.strip())
    if found is None or _NO_TAG.match(version.strip()):
        return None
    numbers = [int(n) for n in found[1].split(".")]
    return tuple(numbers + [0] * (4 - len(numbers)))


def nearest(version: str | None, known: Sequence[str]) -> str:
    """Return the known version that is nearest to another one.

    That is the last of those before it or the first of those after it: the one whose numbers,
    compared from the first on, are less far; of two as near the later.  A version that tells no
    release is nearest to the last of all: a checkout is more often of today than of last year.
    Raises ValueError where nothing is known.
    """
    ordered = sorted(known, key=_numbers)
    at = release(version or "")
    before = [name for name in ordered if at is None or _numbers(name) <= at]
    after = [name for name in ordered if name not in before]
    if not before or not after or at is None:
        return before[-1] if before else min(after, key=_numbers)
    return min((after[0], before[-1]), key=lambda name: _distance(_numbers(name), at))


def _numbers(known: str) -> tuple[int, ...]:
    return release(known) or (0, 0, 0, 0)


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> list[int]:
    return [abs(a - b) for a, b in zip(one, other, strict=False)]


def stated(version: str, known: Sequence[str]) -> bool:
    """Whether a version is one of those known, another build of its source, or its tag."""
    return _BUILD.sub("", version).removeprefix("v") in known or version in known


def guess(distribution: str, version: str) -> str:
    """Return whose recipes are taken, as ``vLLM 0.33.0, the nearest known to 0.34.1``, or nothing.

    Nothing is said of a version that is stated, and of a distribution that is no project of ours.
    """
    project = STATED.get(distribution)
    if project is None or stated(version, project.versions):
        return ""
    taken = nearest(version, project.versions)
    return f"{project.name} {taken}, the nearest known to {version or 'no version'}"
