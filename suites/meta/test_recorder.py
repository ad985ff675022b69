"""The parts of a session that need no process of their own: names, folding, a worker's GPU."""

import itertools

import pytest

from moe_parity.harness.session import environment
from moe_parity.harness.session.recorder import Recorder, item_name
from moe_parity.reports.records import Record


def test_names_of_items():
    """The suite and the part of an id that names the test."""
    assert item_name("suites/test_quant.py::test_bits[a-b]") == ("quant", "test_bits:a-b")
    assert item_name("test_quant.py::TestX::test_y") == ("quant", "TestX.test_y:")
    assert item_name("suites/meta/test_x.py::test_y") == ("meta/x", "meta/x/test_y:")


def _recorded(*calls: dict[str, object]) -> object:
    taken = []
    recorder = Recorder(device="cpu", seed=None, sink=taken.append)
    recorder.start("test_x.py::test_y", {"kernel": "mine"})
    for call in calls:
        recorder.add({"check": "exact", "verdict": "pass"} | call)
    recorder.finish()
    return taken[0]


def test_examples_fold():
    """Extremes are kept, labels that vary are joined, and the weakest mutant is named."""
    folded = _recorded(
        {"dtype": "bf16", "max_ulp": 2, "mutant_distance": 9, "nearest_mutant": "a", "graph": True},
        {"dtype": "fp16", "max_ulp": 1, "mutant_distance": 4, "nearest_mutant": "b"},
        {"dtype": "bf16", "rel_err_f64": 0.5, "mutant_distance": 5, "nearest_mutant": "c"},
    )
    assert (folded.dtype, folded.max_ulp, folded.rel_err_f64) == ("bf16+fp16", 2, 0.5)
    assert (folded.mutant_distance, folded.nearest_mutant, folded.examples) == (18, "b", 3)
    skipped = _recorded({"verdict": "skip", "reason": "odd K"}, {"compared": 3}, {"compared": 4})
    assert (skipped.verdict, skipped.compared) == ("pass", 7)


VERDICTS = ("skip", "pass", "fail", "error")


@pytest.mark.parametrize("calls", list(itertools.product(VERDICTS, repeat=3)), ids="-".join)
def test_the_worst_of_several_calls_stands(calls):
    """In whatever order; of several as bad the last one speaks, and all outputs are summed."""
    folded = _recorded(
        *({"verdict": v, "message": f"{v} {n}", "compared": 1} for n, v in enumerate(calls))
    )
    worst = max(calls, key=VERDICTS.index)
    assert folded.verdict == worst
    assert folded.compared == folded.examples == 3
    if worst in ("fail", "error"):
        said = [f"{v} {n}" for n, v in enumerate(calls) if v == worst]
        assert folded.message == said[-1]


def test_an_expected_failure_is_no_failure():
    """Its red checks are skips with the reason, its green ones stay, and so does what broke."""
    taken: list[Record] = []
    recorder = Recorder(device="cpu", seed=None, sink=taken.append)
    item = recorder.start("test_x.py::test_y", {})
    recorder.add({"check": "exact", "verdict": "fail", "message": "differs"})
    recorder.add({"check": "finite", "verdict": "pass"})
    item.expected_failure, item.skipped = True, "expected failure: issue 3"
    recorder.finish()
    assert [(r.check, r.verdict, r.reason) for r in taken] == [
        ("exact", "skip", "expected failure: issue 3"),
        ("finite", "pass", ""),
        ("test", "skip", "expected failure: issue 3"),
    ]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param({"nosuch": 1}, id="unknown-field"),
        pytest.param({"id": "mine"}, id="own-id"),
        pytest.param({"verdict": "ok"}, id="verdict"),
        pytest.param({"check": "test"}, id="test"),
        pytest.param({"check": ""}, id="no-check"),
    ],
)
def test_a_check_that_records_nonsense_is_told(call):
    """A typo in a check is an error in the check, not a silent record."""
    with pytest.raises(TypeError):
        _recorded(call)
    with pytest.raises(RuntimeError, match="no test is running"):
        Recorder(device="cpu", seed=None, sink=print).add({"check": "a", "verdict": "pass"})


@pytest.mark.parametrize(
    ("visible", "worker", "bound"),
    [
        pytest.param("4,6,7", "gw1", "6", id="entry"),
        pytest.param("4,6,7", "gw3", "4", id="wraps"),
        pytest.param("GPU-abc, GPU-def", "gw1", "GPU-def", id="names"),
        pytest.param("", "gw1", "", id="none-visible"),
        pytest.param("4,6", "", "4,6", id="no-worker"),
    ],
)
def test_a_worker_is_bound_to_a_gpu_of_the_caller(visible, worker, bound):
    """A worker takes an entry of the caller's list, never a GPU that the caller excluded."""
    environ = {"CUDA_VISIBLE_DEVICES": visible, "PYTEST_XDIST_WORKER": worker}
    environment.bind_worker_gpu(environ)
    environment.bind_worker_gpu(environ)  # a second plugin that loads us changes nothing
    assert environ["CUDA_VISIBLE_DEVICES"] == bound
