"""A vendor that crashes, hangs or raises is one failed line, and the others go on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moe_parity.harness.calling import isolate
from moe_parity.harness.evidence import witness, witness_set
from moe_parity.kernels import find, load_file


@pytest.mark.parametrize(
    ("code", "what", "error"),
    [
        ("print('fine')", "exited with 0", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV", ""),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV", ""),
        ("raise RuntimeError('CUDA error: an illegal access')", "exited with 1", "illegal access"),
        ("import os; os._exit(7)", "exited with 7", ""),
    ],
    ids=["fine", "killed", "segfault", "raises", "exits"],
)
def test_how_a_child_ends(code: str, what: str, error: str):
    ended = isolate.run_python(code, seconds=60)
    assert ended.what == what
    assert ended.ok == (what == "exited with 0")
    assert error in ended.error
    assert ended.output == ("fine\n" if ended.ok else "")


def test_a_hang_is_ended_with_its_children():
    start = time.monotonic()
    code = "import subprocess, sys, time; print('begun', flush=True)\n"
    code += "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    ended = isolate.run_python(code, seconds=3)
    assert not ended.ok
    assert ended.what == "ran longer than 3 s"
    assert ended.output == "begun\n"
    assert time.monotonic() - start < 30


VENDORS = """
import os, signal
from moe_parity.kernels import register

def recorded(call):
    raise AssertionError("the harness records on a GPU only")

@register("vendor_that_crashes", stage="act_quant", recipes="ours")
def crashes(call):
    os.kill(os.getpid(), signal.SIGSEGV)

@register("vendor_that_is_absent", stage="act_quant", recipes="ours", unavailable=lambda: "gone.")
def absent(call):
    raise NotImplementedError
"""


def test_recording_goes_on_past_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The real recorder, each kernel in its process: one dies, the next is still asked."""
    file = tmp_path / "vendors.py"
    # Without a GPU the child would stop at the inputs; the crash comes when the kernel is run.
    file.write_text(VENDORS + "\nfrom moe_parity.harness.evidence import witness as w\nw.of_kernel = lambda k, *a: k.run(None)\n")  # fmt: skip  # noqa: E501
    load_file(file)
    monkeypatch.setattr(witness, "provenance", lambda extra=None: {})
    status = witness_set.record(tmp_path, ["vendor_that_crashes", "vendor_that_is_absent"])
    printed = capsys.readouterr().out
    assert status == 1
    assert "failed vendor_that_crashes: its process was killed by SIGSEGV" in printed
    assert "skipped vendor_that_is_absent: gone." in printed
    assert "1 kernels failed" in printed
    assert find("vendor_that_crashes").source == file
