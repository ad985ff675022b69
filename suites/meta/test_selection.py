"""What -k, -m and --parity-kernel choose, seen from outside."""

from pathlib import Path

import pytest

from moe_parity.references.language import Case
from moe_parity.references.stages import STAGES
from moe_parity.suites.meta.outside import Suite

TESTS = """
from moe_parity.harness.cases.grid import each, param
from moe_parity.kernels import find
from moe_parity.references.language import Case, InputDtype
from moe_parity.references.stages import ACT_QUANT
QUANT, LAYER = find("ours_act_quant"), find("ours_decode")
CASES = [
    param(QUANT, Case(m=3)), param(QUANT, Case(m=3, dtype=InputDtype.FP32)), param(LAYER, Case(m=3))
]
@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_case(kernel, case): pass
@pytest.mark.parametrize("kernel", each(ACT_QUANT))
def test_each(kernel): pass
@pytest.mark.moe(stage="act_quant")
def test_of_no_kernel(): pass
def test_plain(): pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    made = Suite(tmp_path)
    made.write(TESTS)
    return made


def chosen(suite: Suite, *args: str) -> set[str]:
    done = suite.run("--collect-only", "-q", *args)
    return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}


QUANT = "test_case[ours_act_quant-fp32-m3-h128]"
IN_F32 = "test_case[ours_act_quant-fp32-f32-m3-h128]"
LAYER = "test_case[ours_decode-fp32-m3-h128]"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("bf16", {QUANT}),
        ("uniform", {LAYER}),
        ("not bf16 and test_case", {IN_F32, LAYER}),
    ],
)
def test_a_word_that_an_id_leaves_out_selects(suite, expression, expected):
    """By -k, in both directions, and by -m where the marker has it."""
    assert chosen(suite, "-k", expression) == expected
    if expression == "bf16":
        assert chosen(suite, "-m", "moe(dtype='bf16')") == expected


def test_only_the_tests_of_a_kernel_run(suite):
    """Neither what is about no kernel, nor about another one, by name or by file."""
    own = {QUANT, IN_F32, "test_each[ours_act_quant]"}
    assert chosen(suite, "--parity-kernel=ours_act_quant") == own
    (suite.folder / "mine.py").write_text(
        "from moe_parity.kernels import register\n"
        "@register('mine', stage='act_quant', recipes='deepgemm')\n"
        "def mine(call): ...\n"
    )
    assert chosen(suite, "--parity-kernel=mine.py") == {"test_each[mine]"}


@pytest.mark.parametrize("name", STAGES)
def test_every_default_is_a_word(name):
    """The words of a case are those of its id and those that an id leaves out, and no others."""
    reads = STAGES[name].reads
    words = Case().words(reads)
    for field in ("scale", "gate", "layout", "dtype", "routing", "values", "hazard"):
        assert (getattr(Case(), field).value in words) == (field in reads)
    assert ("g128" in words) == ("group" in reads)
    assert ("pool1" in words) == ("pool" in reads)
