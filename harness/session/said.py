"""What pytest says of a test, as a record says it: labels, the line of an exception, a reason."""

from __future__ import annotations

from typing import Any

import pytest

from moe_parity.harness.session.recorder import LABELS, as_label
from moe_parity.harness.session.watch import Overrun

_FLAGS = ("graph", "poison")


def labels_of(item: pytest.Item) -> dict[str, Any]:
    """Return the record fields that a test's parameters and its `moe` marker set."""
    callspec = getattr(item, "callspec", None)
    values: dict[str, Any] = {
        name: value
        for name, value in (callspec.params.items() if callspec else ())
        if isinstance(value, str | int | float)
    }
    for mark in reversed(list(item.iter_markers("moe"))):
        values |= mark.kwargs
    labels: dict[str, Any] = {name: as_label(values[name]) for name in LABELS if name in values}
    return labels | {name: bool(values[name]) for name in _FLAGS if name in values}


def one_line(error: BaseException) -> str:
    """Return an exception as one line: its first line, and its type where that says more."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    ours = isinstance(error, AssertionError | pytest.fail.Exception | Overrun)
    kind = "" if ours else type(error).__name__
    return ": ".join(part for part in (kind, text.strip()) if part)[:2000] or type(error).__name__


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a report was skipped."""
    if hasattr(report, "wasxfail"):
        return f"expected failure: {report.wasxfail}".rstrip(": ")
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
