"""What of the collected tests runs: kernels, shapes, a shard, what failed; what -k answers to."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_parity.references.errors import ParityError
from moe_parity.reports.results import FILE_NAME, read

SHARD = "shard"
"""Where the environment of a run says which part of the tests it was."""


def only(
    items: Iterable[pytest.Item], kernels: frozenset[str]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that are about one of the kernels, by their marker, and all others."""
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        own = {mark.kwargs.get("kernel") for mark in item.iter_markers("moe")}
        (kept if own & kernels else dropped).append(item)
    return kept, dropped


def known_words(item: pytest.Item) -> set[str]:
    """Return the words of a test's case that its id leaves out, and the name of its stage."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    kernel: Any = params.get("kernel")
    case = params.get("case")
    if not _is_kernel(kernel):
        return set()
    # Only a test that has loaded the kernels gets here: no torch for a bad option.
    from moe_parity.references.language import Case

    words = {kernel.stage.name}
    return words | set(case.words(kernel.stage.reads)) if isinstance(case, Case) else words


def case_of(item: pytest.Item) -> tuple[Any, Any] | None:
    """Return the (kernel, case) that a test is about, None where it draws them or has none."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    kernel, case = params.get("kernel"), params.get("case")
    return None if case is None or not _is_kernel(kernel) else (kernel, case)


def _is_kernel(value: Any) -> bool:
    """Whether a parameter is a kernel of a stage, not somebody's own object of that name."""
    language = sys.modules.get("moe_parity.references.language.stage")
    return language is not None and isinstance(getattr(value, "stage", None), language.Stage)


# --- shapes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shapes:
    """A filter of shapes: alternatives, each some sizes and words that a case must have, all.

    ``m33-e256,deepseek_v3_tp8`` keeps what has 33 tokens and 256 experts, and what has the sizes
    of that model, of those that its stage has.
    """

    text: str
    alternatives: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str | None) -> Shapes | None:
        """Read a filter; raises ParityError for a word that is no size, word or model."""
        if text is None:
            return None
        parts = [part.strip() for part in text.split(",")]
        for part in parts:
            for word in part.split("-"):
                if word in _models():
                    continue
                if not word:
                    raise ParityError(f"--shapes {text!r} has an empty word; expected {_EXPECTED}.")
                _parsed(word, text)
        return cls(text, tuple(tuple(part.split("-")) for part in parts))

    def keeps(self, item: pytest.Item) -> bool:
        """Whether a test is of one of the shapes."""
        about = case_of(item)
        if about is None:
            return False
        kernel, case = about
        return any(
            all(_has(kernel.stage, case, word) for word in words) for words in self.alternatives
        )


_EXPECTED = "sizes such as m33, words of ids, or models of harness/cases/shapes.py"


def _models() -> dict[str, Any]:
    # Late, as the cases import torch: only a run with --shapes needs them.
    from moe_parity.harness.cases.shapes import MODELS, ODD

    return {shape.name: shape for shape in (*MODELS, *ODD)}


def _parsed(word: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return a word of an id and the fields that it sets."""
    from moe_parity.references.language import ScaleFormat, parse_id

    scale = "" if word in set(ScaleFormat) else f"{ScaleFormat.FP32}-"
    try:
        case = parse_id(f"kernel-{scale}{word}")[1]
    except ParityError:
        known = ", ".join(_models())
        raise ParityError(f"--shapes {text!r}: {word!r} is none of {_EXPECTED}: {known}.") from None
    sizes = {m[1]: int(m[2]) for m in [re.fullmatch(r"([mekhi])(\d+)", word)] if m}
    changed = {
        field.name: getattr(case, field.name)
        for field in dataclasses.fields(case)
        if getattr(case, field.name) != field.default
    }
    return word, changed | sizes


def _has(stage: Any, case: Any, word: str) -> bool:
    shape = _models().get(word)
    if shape is not None:
        names = [name for name in ("e", "k", "h", "i") if name in stage.sizes]
        same = all(getattr(case, name) == getattr(shape, name) for name in names)
        return same and ("ep_size" not in stage.reads or case.ep_size == shape.ep_size)
    if word in case.words(stage.reads):
        return True
    fields = _parsed(word, word)[1]
    return bool(fields) and all(
        getattr(case, name) == value and (name in stage.sizes or name in stage.reads)
        for name, value in fields.items()
    )


# --- shards -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One of several parts of the tests, by their node ids; together they are all tests."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str | None) -> Shard | None:
        """Read ``2/4``; raises ParityError for what is none."""
        if text is None:
            return None
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ParityError(f"--shard is {text!r}, expected I/N with I from 1 to N, such as 2/4.")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        """Return it as it was given."""
        return f"{self.number}/{self.of}"

    def keeps(self, nodeid: str) -> bool:
        """Whether a test is of this part: by its name alone, so that new tests move no others."""
        digest = hashlib.sha256(nodeid.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.of == self.number - 1


# --- what failed --------------------------------------------------------------------------------


def failed_before(folder: Path) -> frozenset[str]:
    """Return the node ids that failed or broke in the run whose results a folder holds.

    Raises ParityError where there are no whole results.
    """
    run = read(folder / FILE_NAME)
    return frozenset(r.nodeid for r in run.records if r.verdict in ("fail", "error"))
