"""The plugin in somebody else's repository: by ``pytest_plugins``, by its entry point, not at all.

The repositories lie in folders of their own, with a configuration of their own; pytest runs there
in a process of its own.  Of the project they know the installed package.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.config import _iter_rewritable_modules

from moe_parity.harness.session.place import is_ours
from moe_parity.harness.session.recorder import whole_name
from moe_parity.harness.session.selection import case_of, known_words
from moe_parity.references.stages import STAGES
from moe_parity.reports.results import read
from moe_parity.suites.meta.outside import clean

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ROOT / "moe_parity_pytest.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

SETTINGS = """
[tool.pytest]
addopts = ["--strict-config", "--strict-markers", "--import-mode=importlib"{more}]
markers = ["moe: of a mixture of experts"]
filterwarnings = ["error"]
testpaths = ["tests"]
"""
CONFTEST = """
from hypothesis import settings
settings.register_profile("ci", max_examples=7)
settings.load_profile("ci")
"""
QUANTIZER = """
import pytest

def quantized(x, divides):
    import torch
    groups = x.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(2).clamp(1e-4) / torch.tensor(448.0)
    wide = scales[..., None]
    codes = groups / wide if divides else groups * (1 / wide)
    return codes.flatten(1).to(torch.float8_e4m3fn), scales

@pytest.mark.parametrize("divides", [False, True])
def test_codes(divides):
    import torch
    from moe_parity.harness import assert_matches
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = quantized(x, divides)
    assert_matches("act_quant", {"x": x}, {"codes": codes, "scales": scales}, recipe="deepgemm")
"""
ORDINARY = """
import os, sys, types, unittest
import pytest
from hypothesis import given, settings, strategies as st

def test_same(): assert "OMP_NUM_THREADS" not in os.environ

class TestIt:
    def test_same(self): pass

class Case(unittest.TestCase):
    def test_same(self): pass

@pytest.mark.moe
@pytest.mark.parametrize("kernel", [types.SimpleNamespace(stage="gemm"), 3])
@pytest.mark.parametrize("case", ["a-b"])
def test_of_a_kernel_of_theirs(kernel, case): pass

@given(st.integers())
def test_drawn(n): assert settings().max_examples == 7

@pytest.mark.xfail(reason="not yet")
def test_later(): assert False

def test_skipped(): pytest.skip("not today")
"""


class Repository:
    """A folder with tests in two folders, and pytest run in it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.write("pyproject.toml", SETTINGS.format(more="".join(f', "{o}"' for o in options)))
        self.write("conftest.py", CONFTEST)

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(textwrap.dedent(text))

    def install(self) -> None:
        """Install the entry point that the project declares, as a distribution beside it."""
        entries = PROJECT["project"]["entry-points"]["pytest11"]
        lines = "\n".join(f"{name} = {module}" for name, module in entries.items())
        info = "site/parity_entry-1.dist-info"
        self.write(f"{info}/METADATA", "Metadata-Version: 2.1\nName: parity-entry\nVersion: 1\n")
        self.write(f"{info}/entry_points.txt", f"[pytest11]\n{lines}\n")
        self.write(f"site/{ENTRY.name}", ENTRY.read_text())

    def pytest(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run it; nothing of ours may break pytest."""
        variables = clean(PYTHONPATH=str(self.folder / "site"), CI="true")
        variables.pop("OMP_NUM_THREADS", None)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-pno:cacheprovider", *args], cwd=self.folder,
            env=variables, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert "INTERNALERROR" not in done.stdout + done.stderr, done.stdout
        return done


def test_the_plugin_by_its_name(tmp_path: Path):
    """Records of `assert_matches` and of ordinary tests, the header, the report, workers."""
    theirs = Repository(tmp_path)
    theirs.write("conftest.py", f'pytest_plugins = ["moe_parity.harness.plugin"]\n{CONFTEST}')
    theirs.write("tests/a/test_quantizer.py", QUANTIZER)
    theirs.write("tests/a/test_plain.py", ORDINARY)
    theirs.write("tests/b/test_plain.py", ORDINARY)
    done = theirs.pytest("--parity-out=out", "--parity-report", "-n2", "--dist=loadfile")
    assert done.returncode == 1, done.stdout
    assert "moe-parity: cpu (virtual GPU); profile ci, seed None; python 3." in done.stdout
    assert "1 failed, 13 passed, 2 skipped, 2 xfailed" in done.stdout
    assert "several tests are called" not in done.stdout
    sentence = "quant.apply=divide instead of mul_recip in act_quant of the given tensors: at token"
    assert f"E       AssertionError: {sentence}" in done.stdout
    run = read(tmp_path / "out" / "results.jsonl")
    checks = {r.nodeid.rpartition("::")[2]: r for r in run.checks}
    green, red = checks["test_codes[False]"], checks["test_codes[True]"]
    assert (green.verdict, green.compared, green.recipe) == ("pass", 64 * 516, "deepgemm")
    assert (red.verdict, red.cause_kind, red.cause) == ("fail", "decision", "quant.apply=divide")
    assert red.id == "tests/a/test_quantizer.py/test_codes:True:exact_act_quant"
    assert red.message.startswith(sentence)
    assert red.repro == "pytest 'tests/a/test_quantizer.py::test_codes[True]'"
    assert len({record.id for record in run.records}) == len(run.records) == 20
    assert (run.end.collected, run.end.ran, run.end.exitstatus) == (18, 14, 1)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "quant.apply=divide" in page
    assert "quant.apply=divide" in (tmp_path / "out" / "summary.md").read_text()


ASKS = """
def test_it(parity_recorder, parity_device, parity_seed):
    assert (parity_device, parity_seed) == ("cpu", 3)
    parity_recorder.add({"check": "exact", "verdict": "pass", "compared": 5})
"""
UNASKED = """
import sys

def test_it(pytestconfig):
    manager = pytestconfig.pluginmanager
    assert manager.get_plugin("moe_parity") is sys.modules["moe_parity_pytest"]
    ours = {name for name in sys.modules if name.startswith(("moe_parity.", "torch", "numba"))}
    assert not ours
    assert not [name for name in vars(pytestconfig.option) if "parity" in name]
    assert not [line for line in pytestconfig.getini("markers") if "untouched" in line]
    assert not manager.hasplugin("moe_parity.harness.plugin")
"""


def test_the_entry_point_where_it_is_asked_for(tmp_path: Path):
    """By `addopts`, in the workers too, before the options that only the plugin knows are read."""
    theirs = Repository(tmp_path, "--parity", "--parity-seed=3")
    theirs.install()
    theirs.write("tests/test_it.py", ASKS)
    theirs.write("tests/test_other.py", ORDINARY)
    done = theirs.pytest("--parity-out", "out", "-n1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "moe-parity: cpu (virtual GPU); profile ci, seed 3; python 3." in done.stdout
    run = read(tmp_path / "out" / "results.jsonl")
    assert [(r.check, r.compared) for r in run.checks] == [("exact", 5)]
    assert (run.end.collected, run.end.ran) == (9, 7)


def test_the_entry_point_does_nothing_where_it_is_not(tmp_path: Path):
    """No option, no line, no module of ours, no torch; exit status and output as without it."""
    theirs = Repository(tmp_path)
    theirs.install()
    theirs.write("tests/test_it.py", UNASKED)
    done = theirs.pytest()
    assert done.returncode == 0, done.stdout
    assert "moe-parity:" not in done.stdout
    refused = theirs.pytest("--pariti-out=x")
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --pariti-out=x" in refused.stderr


@pytest.mark.parametrize(
    ("args", "asked"),
    [
        (["tests", "-x"], False),
        (["--pariti"], False),
        (["-k", "parity"], False),
        (["--parity"], True),
        (["-x", "--parity-out=out"], True),
    ],
)
def test_an_option_of_the_plugin_asks_for_it(args: list[str], asked: bool):
    spec = spec_from_file_location("entry", ENTRY)
    assert spec is not None
    assert spec.loader is not None
    entry = module_from_spec(spec)
    spec.loader.exec_module(entry)
    loaded: list[str] = []

    class Config:
        """Takes the name of what is loaded."""

        pluginmanager = type("", (), {"import_plugin": staticmethod(loaded.append)})

    entry.pytest_load_initial_conftests(Config, args)
    assert loaded == ["moe_parity.harness.plugin"] * asked


def test_pytest_rewrites_the_entry_point_and_nobodys_package():
    """Of a namespace it would take the folders, such as `kernels`, for packages of that name."""
    setup = PROJECT["tool"]["setuptools"]
    files = [f"{package.replace('.', '/')}/__init__.py" for package in setup["packages"]]
    assert "kernels" in set(_iter_rewritable_modules(files))
    files += [f"{module}.py" for module in setup["py-modules"]]
    assert set(_iter_rewritable_modules(files)) == {ENTRY.stem}
    assert PROJECT["project"]["entry-points"]["pytest11"] == {"moe_parity": ENTRY.stem}


def test_our_suites_are_known_by_their_folder(tmp_path: Path):
    assert is_ours(ROOT)
    (tmp_path / "suites").mkdir()
    assert not is_ours(tmp_path)


def test_their_kernels_are_not_ours():
    """An object of that name, with a stage of that name, once our stages are loaded too."""
    params = {"kernel": SimpleNamespace(stage="gemm"), "case": "a-b"}
    item: Any = SimpleNamespace(callspec=SimpleNamespace(params=params))
    assert known_words(item) == set()
    assert case_of(item) is None
    params["kernel"] = SimpleNamespace(stage=STAGES["fc1"])
    assert known_words(item) == {"fc1"}


def test_names_of_their_tests_have_the_file():
    assert whole_name("tests/test_a.py::TestX::test_y[a-b]") == (
        "tests/test_a.py", "tests/test_a.py/TestX.test_y:a-b",
    )  # fmt: skip
