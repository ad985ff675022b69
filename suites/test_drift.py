"""Version drift: 0.26.0 and 0.33.0 of vLLM on the same cases, from their witnesses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.cli.commands import main
from moe_parity.harness.evidence import drift
from moe_parity.harness.evidence.witness import SHIPPED
from moe_parity.references.errors import ParityError

BEFORE, AFTER = SHIPPED / "vllm-0.26.0", SHIPPED / "vllm-0.33.0"
DIVISION = ("quant.apply: divide -> mul_recip",)


def test_the_quantizer_stopped_dividing(parity_recorder: Recorder):
    """X / s became x * (1 / s): named, with the number of codes; nothing else moved."""
    found = {d.case: d for d in drift.drifts(BEFORE, AFTER)}
    moved = {case: d for case, d in found.items() if any(n for n, _ in d.differing.values())}
    assert {case: d.differing["codes"] for case, d in moved.items()} == {
        "vllm_per_token_group-fp32-aimed-m24-h512": (5, 12288),
        "vllm_per_token_group-fp32-f32-aimed-m24-h512": (90, 12288),
    }
    for case, one in moved.items():
        assert one.decisions == DIVISION
        assert one.differing["scales"][0] == 0
        assert one.versions == ("vllm 0.26.0", "vllm 0.33.0")
        wrong, compared = one.differing["codes"]
        claim(
            parity_recorder, "drift", kernel=case.partition("-")[0], stage="act_quant",
            device="reference", compared=compared, could_show=wrong, cause=DIVISION[0],
        )  # fmt: skip
    assert len(found) >= 20


def test_the_command(capsys: pytest.CaptureFixture[str]):
    assert main(["witness", "drift", str(BEFORE), str(AFTER)]) == 0
    printed = capsys.readouterr().out
    assert "5 of 12288 codes differ between vllm 0.26.0 and vllm 0.33.0" in printed
    assert "quant.apply: divide -> mul_recip." in printed
    assert "2 of 27 cases differ, in 95 outputs" in printed


def test_folders_without_a_common_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copy(next(SHIPPED.glob("model-*.safetensors")), tmp_path)
    with pytest.raises(ParityError, match="hold no witness of the same kernel"):
        list(drift.drifts(BEFORE, tmp_path))
    assert main(["witness", "drift", str(BEFORE), str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
