"""Captured tensors: every kernel that a file feeds, on that file.

Named by `parity check --case-from FILE`, collected by nothing else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_parity.harness.captured.expect import expect_captured
from moe_parity.harness.captured.feed import feeds
from moe_parity.harness.captured.file import Captured, read
from moe_parity.harness.checks.expect import Recorder
from moe_parity.harness.plugin import OPTIONS, SELECTED
from moe_parity.kernels import Kernel, all_kernels
from moe_parity.references.errors import ParityError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take the kernels that are asked for, of stages that the file feeds."""
    path: Path | None = metafunc.config.stash[OPTIONS].case_from
    if path is None:
        raise pytest.UsageError("say the file: --parity-case-from=FILE.")
    try:
        captured = read(path)
    except ParityError as error:
        raise pytest.UsageError(str(error)) from None
    selected = metafunc.config.stash[SELECTED]
    kernels = [k for k in all_kernels() if selected is None or k.name in selected]
    # a kernel that is asked for by name says why it cannot be fed
    fed = [k for k in kernels if selected is not None or feeds(captured, k.stage)]
    metafunc.parametrize(
        ("kernel", "captured", "alone"),
        [
            pytest.param(
                kernel, captured, len(fed) == 1, id=f"{kernel.name}-{captured.case.id}",
                marks=pytest.mark.moe(kernel=kernel.name, stage=kernel.stage.name),
            )
            for kernel in fed
        ],
    )  # fmt: skip


def test_captured(
    kernel: Kernel, captured: Captured, alone: bool, parity_device: str, parity_recorder: Recorder
):
    """The kernel's whole contract on the captured inputs; what is red is made small."""
    expect_captured(kernel, captured, parity_device, parity_recorder, alone=alone)
