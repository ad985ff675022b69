"""The pytest plugin, seen from outside: each test runs pytest in a process of its own.

What a green run could hide is planted here: a lost worker, a test without a record, a check that
failed in a test that passed, a run in which nothing ran.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings

from moe_parity.suites.meta.outside import Suite


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


MIXED = """
@pytest.mark.parametrize("scale", [
    pytest.param(s, id=f"mine-{s}", marks=pytest.mark.moe(kernel="mine", scale=s, clamp=7.0))
    for s in ("fp32", "ue8m0")
])
@given(m=st.integers(0, 4096))
def test_bits(parity_recorder, scale, m):
    bad = scale == "ue8m0" and m > 99
    fields = dict(check="exact", compared=10, differing=int(bad), shape=f"m{m}", max_ulp=m)
    parity_recorder.add(fields | dict(verdict="pass" if not bad else "fail",
                                      message=f"differs at {m}" if bad else ""))
    parity_recorder.add(dict(check="finite", verdict="pass", compared=10))
    assert not bad, f"differs at {m}"

def test_plain(): pass
def test_skipped(): pytest.skip("needs a CUDA GPU")
def test_broken(): raise ValueError("broken\\nat length")
@pytest.mark.xfail(reason="issue 3", strict=True)
def test_known(): assert False
@pytest.fixture
def bad(): raise OSError("no setup")
def test_setup(bad): pass
"""


def test_every_test_leaves_a_record(suite):
    """One record for each test, with its reason or message, besides those of its checks."""
    suite.write(MIXED)
    done = suite.run("--parity-out=out", "--parity-seed=3", "--junitxml=j.xml")
    assert done.returncode == 1
    run = suite.results()
    own = {r.id.split(":")[0] + r.scale: r for r in run.tests}
    assert {name: r.verdict for name, r in own.items()} == {
        "test_bitsfp32": "pass",
        "test_bitsue8m0": "fail",
        "test_plain": "pass",
        "test_skipped": "skip",
        "test_broken": "error",
        "test_known": "skip",
        "test_setup": "error",
    }
    assert own["test_skipped"].reason == "needs a CUDA GPU"
    assert own["test_known"].reason == "expected failure: issue 3"
    assert own["test_broken"].message == "ValueError: broken"
    assert own["test_setup"].message == "OSError: no setup"
    assert (run.end.collected, run.end.ran, run.end.exitstatus) == (7, 5, 1)
    assert (run.info.seed, run.info.profile, run.info.device) == (3, "dev", "cpu")
    assert not (suite.folder / "out" / "parts").exists()
    assert 'name="parity.exact" value="pass' in (suite.folder / "j.xml").read_text()


def test_examples_of_one_check_are_one_record(suite):
    """Outputs add up, and of the failing examples the last one speaks: the minimal one."""
    suite.write(MIXED)
    suite.run("--parity-out=out", "-k", "bits")
    checks = {(r.scale, r.check): r for r in suite.results().checks}
    good, bad = checks["fp32", "exact"], checks["ue8m0", "exact"]
    assert good.examples == 40
    assert good.compared == 200
    assert (good.kernel, good.clamp, good.shape) == ("mine", "7", "drawn")
    assert (bad.verdict, bad.message, bad.shape) == ("fail", "differs at 100", "m100")
    assert bad.differing > 1
    assert bad.compared == 10 * bad.examples
    assert bad.repro == "pytest 'test_it.py::test_bits[mine-ue8m0]'"
    assert checks["ue8m0", "finite"].verdict == "pass"


def test_workers_lose_nothing(suite):
    """Two workers leave the same records as none, in the same order."""
    suite.write(MIXED + "@pytest.mark.parametrize('i', range(99))\ndef test_many(i): pass\n")
    seeded = "--parity-seed=1"
    suite.run("--parity-out=serial", seeded, "-q")
    suite.run("--parity-out=spread", seeded, "-q", "-n2", "--dist=worksteal")
    serial, spread = suite.results("serial"), suite.results("spread")
    assert [(r.id, r.verdict, r.message, r.compared) for r in serial.records] == [
        (r.id, r.verdict, r.message, r.compared) for r in spread.records
    ]
    assert serial.end.collected == spread.end.collected == 106


@pytest.mark.parametrize("workers", ["n0", "n1"])
def test_nothing_ran_is_a_failure(suite, workers):
    """Neither an empty selection nor a run of skips is green."""
    suite.write("def test_it(): pytest.skip('not today')")
    done = suite.run("--parity-out=out", f"-{workers}")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "nothing ran: 1 test chosen, all skipped" in done.stdout
    done = suite.run("-k", "nosuch", f"-{workers}")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "nothing ran: no test matches -k 'nosuch'; -k takes words of ids" in done.stdout
    assert "left no record" not in done.stdout


def test_a_failed_check_fails_the_run_even_if_its_test_passes(suite):
    """Green is not believed against a record."""
    suite.write("""
        def test_it(parity_recorder):
            parity_recorder.add(dict(check="exact", verdict="fail", message="3 differ"))
    """)
    done = suite.run("--parity-out=out")
    assert done.returncode == 1
    own = suite.results().tests[0]
    assert own.verdict == "fail"
    assert own.message == "the test passed although a check failed: 3 differ"


def test_a_test_without_a_record_fails_the_run(suite):
    """A record that got lost on its way is noticed."""
    suite.write("def test_a(): pass\ndef test_b(): pass")
    suite.write(
        """
        from moe_parity.harness.session.recorder import Recorder
        finish = Recorder.finish
        def lose(self):
            if "test_b" not in self.item.nodeid:
                finish(self)
        Recorder.finish = lose
        """,
        "conftest.py",
    )
    done = suite.run("--parity-out=out")
    assert done.returncode == 1
    assert "1 of 2 collected tests left no record, the first is test_it.py::test_b" in done.stdout


def test_two_tests_of_one_name_are_refused(suite):
    """Records are found by id, so an id belongs to one test."""
    suite.write("def test_same(): pass", "test_a.py")
    suite.write("def test_same(): pass", "test_b.py")
    done = suite.run()
    assert done.returncode == 1
    assert "several tests are called test_same:" in done.stdout


def test_a_file_that_cannot_be_collected_is_recorded(suite):
    """A suite that does not import is an error with its reason, not a shorter run."""
    suite.write("def test_a(): pass", "test_a.py")
    suite.write("import nosuchmodule", "test_b.py")
    done = suite.run("--parity-out=out", "--continue-on-collection-errors")
    assert done.returncode == 1
    bad = [r for r in suite.results().records if r.verdict == "error"]
    assert [r.nodeid for r in bad] == ["test_b.py"]
    assert "No module named 'nosuchmodule'" in bad[0].message


def test_an_interrupt_keeps_what_has_finished(suite):
    """Ctrl-C: the finished tests are in the file, the one it hit is not."""
    suite.write("""
        def test_a(): pass
        def test_b(): raise KeyboardInterrupt
        def test_c(): pass
    """)
    done = suite.run("--parity-out=out")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    run = suite.results()
    assert [r.id for r in run.records] == ["test_a::test"]
    assert (run.end.collected, run.end.exitstatus) == (3, 2)


def test_the_header_says_what_this_run_is(suite):
    """Device, versions, profile, seed and our variables; a misspelt one gets a hint."""
    suite.write(
        "def test_it(parity_seed, parity_device): assert (parity_seed, parity_device) == "
        "(11, 'cpu')"
    )
    done = suite.run(MOE_PARITY_SEDE="5", MOE_PARITY_SEED="11", MOE_PARITY_DEVICE="cpu")
    assert done.returncode == 0
    line = next(line for line in done.stdout.splitlines() if line.startswith("moe-parity: cpu"))
    for word in ("virtual GPU", "profile dev", "seed 11", "python ", "torch ", "triton ", "numpy "):
        assert word in line
    assert "moe-parity: MOE_PARITY_SEDE=5" in done.stdout
    assert "MOE_PARITY_SEDE is unknown" in done.stdout
    assert "did you mean MOE_PARITY_SEED?" in done.stdout


@pytest.mark.parametrize(
    ("variables", "args", "profile"),
    [
        pytest.param({}, (), "dev 20 False", id="default"),
        pytest.param({"CI": "true"}, (), "ci 20 True", id="in-ci"),
        pytest.param({"MOE_PARITY_PROFILE": "nightly"}, (), "nightly 500 False", id="variable"),
        pytest.param({"CI": "1"}, ("--hypothesis-profile=fuzz",), "fuzz 10000 False", id="option"),
    ],
)
def test_profiles_are_ours(suite, variables, args, profile):
    """Also where CI is set, which makes hypothesis load a profile of its own."""
    suite.write(f"""
        from hypothesis import settings
        def test_it():
            s = settings()
            name = settings.get_current_profile_name()
            assert f"{{name}} {{s.max_examples}} {{s.derandomize}}" == {profile!r}
            assert s.deadline is None
    """)
    assert suite.run(*args, **variables).returncode == 0


BAD_OPTIONS = {
    "device": (["--parity-device=gpu"], "the device is 'gpu', expected cpu, cuda or auto."),
    "no-gpu": (["--parity-device=cuda"], "torch finds no CUDA GPU here"),
    "required": (["--parity-require-gpu"], "a GPU is required, but torch finds no CUDA GPU"),
    "both": (["--parity-require-gpu", "--parity-device=cpu"], "ask for one of the two"),
    "seed": (["--parity-seed=x"], "the seed is 'x', expected a whole number."),
    "timeout": (["--parity-timeout=-1"], "the timeout is '-1', expected seconds for a case"),
    "no-time": (["--parity-timeout=nan"], "the timeout is 'nan', expected seconds for a case"),
    "report": (["--parity-report"], "--parity-report needs --parity-out=DIR"),
    "out": (["--parity-out=test_it.py/out"], "cannot write results to"),
    "profile": (["-pno:nothing"], "unknown profile 'nigthly'"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_bad_option_is_one_sentence(suite, name):
    """Nothing has run by then, and no traceback is shown."""
    args, phrase = BAD_OPTIONS[name]
    suite.write("def test_it(): open('ran', 'w')")
    variables = {"MOE_PARITY_PROFILE": "nigthly"} if name == "profile" else {}
    done = suite.run(*args, **variables)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert phrase in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (suite.folder / "ran").exists()


def test_settings_may_stand_in_the_ini_file(suite):
    """Each option has an ini twin; the command line beats it."""
    suite.write("def test_it(parity_seed): assert parity_seed == int(os.environ['WANTED'])")
    ini = suite.folder / "pytest.ini"
    ini.write_text("[pytest]\nparity_out = out\nparity_seed = 4\nparity_device = cpu\n")
    config = f"--config-file={ini}"
    assert suite.run(config, WANTED="4").returncode == 0
    assert suite.results().info.seed == 4
    assert suite.run(config, WANTED="6", MOE_PARITY_SEED="6").returncode == 0
    assert suite.run(config, "--parity-seed=5", WANTED="5", MOE_PARITY_SEED="6").returncode == 0


FAKE_GPU = """
from moe_parity.harness.session import environment
environment.gpu = lambda: environment.Gpu('Fake', '{}', '1.0')
"""


def test_a_required_gpu_makes_its_skips_errors(suite):
    """Only skips of that kind, whatever a sentence says: others are still skips."""
    suite.write(FAKE_GPU.format("sm_90"), "conftest.py")
    suite.write("""
        from moe_parity.harness.session.skips import skip_test
        from moe_parity.references.skip import Skip, Why
        def test_run(parity_gpu): assert parity_gpu == "cuda"
        def test_lost(): skip_test(Skip(Why.NEEDS_GPU, "no device is left"))
        def test_chip(): skip_test(Skip(Why.NEEDS_CHIP, "needs Hopper"))
        def test_absent(): skip_test(Skip(Why.ABSENT, "the GPU package vllm is not installed"))
        def test_other(): pytest.skip("a CUDA graph takes its place on a GPU")
    """)
    done = suite.run("--parity-require-gpu", "--parity-out=out")
    assert done.returncode == 1
    assert "Fake, driver 1.0" in done.stdout
    verdicts = {r.id: (r.verdict, r.why, r.message or r.reason) for r in suite.results().tests}
    required = "a GPU is required, and the test was skipped: "
    assert verdicts == {
        "test_run::test": ("pass", "", ""),
        "test_lost::test": ("error", "", f"{required}no device is left"),
        "test_chip::test": ("error", "", f"{required}needs Hopper"),
        "test_absent::test": ("skip", "absent", "the GPU package vllm is not installed"),
        "test_other::test": ("skip", "", "a CUDA graph takes its place on a GPU"),
    }


def test_a_required_gpu_must_be_of_a_chip_that_is_modelled(suite):
    """One sentence that says which chip it is and why; without the requirement nothing is said."""
    suite.write(FAKE_GPU.format("sm_89"), "conftest.py")
    suite.write("def test_run(): pass")
    done = suite.run("--parity-require-gpu")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    sentence = "sm_89: the FP8 unit of Ada takes 16 products a step, its model is not here."
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert suite.run().returncode == 0


def test_the_plugin_starts_without_torch():
    """A worker is bound to its GPU and its share of the cores before torch is imported."""
    code = "import sys, moe_parity.harness.plugin; print({'torch', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_this_session_has_one_of_our_profiles():
    """The conftest of this checkout loads the plugin."""
    assert hypothesis_settings().deadline is None
