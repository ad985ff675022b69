"""Ours, transformers with its package ``kernels``, and a vLLM-like one, imported in any order."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = {
    "kernels": "def get_kernel(name):\n    return name\n",
    "references": "here = 'theirs'\n",
    "harness": "here = 'theirs'\n",
    "suites": "here = 'theirs'\n",
    "transformers": "import kernels\nassert kernels.get_kernel('x') == 'x'\n",
    # What vllm does on import: its own ops, Triton's JIT, a module of its tests called suites.
    "vllm": (
        "import torch, triton, triton.language as tl\n"
        "LIB = torch.library.Library('vllm_like', 'DEF')\n"
        "LIB.define('twice(Tensor x) -> Tensor')\n"
        "LIB.impl('twice', lambda x: 2 * x, 'CPU')\n"
        "@triton.jit\n"
        "def copy(x, y, N: tl.constexpr):\n"
        "    i = tl.arange(0, N)\n"
        "    tl.store(y + i, tl.load(x + i))\n"
    ),
}
OURS = "from moe_parity.kernels import all_kernels; assert len(all_kernels()) > 20"
USE = """
import kernels, references, harness, suites, torch
assert kernels.get_kernel('a') == 'a' and references.here == harness.here == suites.here == 'theirs'
assert torch.ops.vllm_like.twice(torch.ones(1)).item() == 2
import vllm
assert type(vllm.copy).__name__ == 'JITFunction'
from moe_parity.kernels.ours import quant
x = torch.ones(4, 128, dtype=torch.bfloat16)
codes, scales = quant.act_quant(x)
assert set(codes.flatten().tolist()) == {0x7e}
from moe_parity.kernels.virtual_gpu import launch
y = torch.zeros(128, dtype=torch.bfloat16)
launch(vllm.copy, (1,), x, y, N=128)
assert torch.equal(y, x[0])
print('fine')
"""


@pytest.mark.parametrize("order", list(itertools.permutations(("ours", "transformers", "vllm"))))
def test_every_order_of_import(order: tuple[str, ...], tmp_path: Path):
    pytest.importorskip("triton", reason="needs Triton")
    for name, text in PACKAGES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    lines = [OURS if name == "ours" else f"import {name}" for name in order]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines) + USE], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},  # noqa: E501
        cwd=tmp_path, timeout=300, check=False,
    )  # fmt: skip
    assert ended.stdout == "fine\n", ended.stderr[-2000:]
