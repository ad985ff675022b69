"""The workflows that users copy, our own and the action, as what their YAML says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which the extra dev brings")

ROOT = Path(__file__).resolve().parents[2]
COPIED = sorted(ROOT.glob("docs/ci/*.yml"))
OURS = sorted(ROOT.glob(".github/workflows/*.yml"))
ACTION = ROOT / "action.yml"
EMPTY: dict[str, Any] = {}


def load(path: Path) -> dict[Any, Any]:
    flow: dict[Any, Any] = yaml.safe_load(path.read_text())
    return flow


def triggers(flow: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = flow[True]
    return found  # YAML 1.1 takes the key `on` for a truth value


def steps(path: Path) -> Iterator[dict[str, Any]]:
    flow = load(path)
    for job in flow.get("jobs", {}).values():
        yield from job["steps"]
    yield from flow.get("runs", {}).get("steps", [])


def scripts(path: Path) -> Iterator[str]:
    for step in steps(path):
        yield from filter(None, (step.get("run"), step.get("with", EMPTY).get("script")))


def copied(name: str) -> dict[Any, Any]:
    return load(ROOT / "docs/ci" / f"{name}.yml")


def named(path: Path, name: str) -> dict[str, Any]:
    (step,) = [step for step in steps(path) if step.get("name") == name]
    return step
