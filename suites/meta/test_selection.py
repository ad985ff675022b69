"""What -k, -m and --parity-kernel choose, seen from outside."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_parity.harness.session.selection import Shapes, Shard
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, InputDtype
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


def test_what_needs_untouched_kernels_runs_first(suite: Suite):
    suite.write("""
        def test_a(): pass
        @pytest.mark.untouched
        @pytest.mark.parametrize("n", [2, 1])
        def test_b(n): pass
        def test_c(): pass
    """)
    done = suite.run("--collect-only", "-q")
    names = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert names == ["test_b[2]", "test_b[1]", "test_a", "test_c"]


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


# --- shapes, shards, what failed -----------------------------------------------------------------


class Item:
    """What a filter asks of a test."""

    def __init__(self, stage: str, case: Case) -> None:
        params = {"kernel": SimpleNamespace(stage=STAGES[stage]), "case": case}
        self.callspec = SimpleNamespace(params=params)


CASES = {
    "quant": Item("act_quant", Case(m=3)),
    "in_f32": Item("act_quant", Case(m=3, dtype=InputDtype.FP32)),
    "layer": Item("layer", Case(m=3)),
    "v3_quant": Item("act_quant", Case(m=5, h=7168)),
    "v3": Item("layer", Case(m=5, e=256, k=8, h=7168, i=256)),
    "v3_of_two": Item("layer", Case(m=5, e=256, k=8, h=7168, i=256, ep_size=2)),
}


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ("m3", {"quant", "in_f32", "layer"}),
        ("m4,e1", {"layer"}),
        ("m3-f32", {"in_f32"}),
        ("m3-bf16,m3-e1", {"quant", "layer"}),
        ("deepseek_v3_tp8", {"v3_quant", "v3"}),
        ("deepseek_v3_tp8-m4", set()),
        ("e256-ep0of2", {"v3_of_two"}),
    ],
)
def test_shapes_keep_what_has_all_words_of_one_of_them(shapes, expected):
    """A size that a stage does not have is no match; a model is known by those that it has."""
    found = Shapes.parse(shapes)
    assert {name for name, item in CASES.items() if found.keeps(item)} == expected


def test_shapes_choose_among_tests(suite):
    """And leave out those that draw their cases, or have none."""
    assert chosen(suite, "--parity-shapes=m3-f32") == {IN_F32}


@pytest.mark.parametrize("text", ["q9", "m3-", "no_model", ""])
def test_a_word_that_is_no_shape_is_refused(text):
    with pytest.raises(ParityError, match="--shapes"):
        Shapes.parse(text)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0"])
def test_a_shard_that_does_not_exist_is_refused(text):
    with pytest.raises(ParityError, match="--shard is"):
        Shard.parse(text)


def test_all_shards_together_are_all_tests(suite):
    """Each test is in one of them, and none is empty here."""
    parts = [chosen(suite, f"--parity-shard={n}/2") for n in (1, 2)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] > {QUANT, IN_F32, LAYER, "test_plain"}
    assert all(parts)


def test_a_shard_moves_no_other_test():
    """Which part a test is in is decided by its own name."""
    assert [Shard(n, 4).keeps("suites/test_a.py::test_b") for n in (1, 2, 3, 4)].count(True) == 1
    many = [sum(Shard(n, 4).keeps(f"test_{i}") for i in range(400)) for n in (1, 2, 3, 4)]
    assert sum(many) == 400
    assert min(many) > 60


def test_what_failed_runs_again(suite):
    """And nothing else; the results say how the tests were chosen."""
    suite.write("def test_good(): pass\ndef test_bad(): assert not os.environ.get('FAULT')\n")
    assert suite.run("--parity-out=out", FAULT="1").returncode == 1
    assert suite.run("--parity-out=out", "--parity-last-failed").returncode == 0
    run = suite.results()
    assert [record.id for record in run.tests] == ["test_bad::test"]
    assert run.info.environment["lf"] == "what failed before"
    assert suite.run("--parity-out=out", "--parity-last-failed").returncode == 0
    assert len(suite.results().tests) == 2


def test_results_say_which_shard_they_are(suite):
    suite.write("def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n")
    assert suite.run("--parity-out=out", "--parity-shard=1/2").returncode in (0, 5)
    assert suite.results().info.environment["shard"] == "1/2"
