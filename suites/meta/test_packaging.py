"""What is built: a wheel with all that the packages need and no generic name, an sdist that builds.

The wheel is built for real, without a network and without an environment of its own, where the
installed setuptools can; what stands in ``pyproject.toml`` is held against the folders everywhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

from moe_parity.harness.cli.check import NOT_CHECKS
from moe_parity.harness.session import caches

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("references", "kernels", "harness", "suites", "reports")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
IMPORT = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
TO_COME = {"corpus/*.json"}
"""Patterns of what there may be: a failure that was found, once there is one."""
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


def needed() -> set[str]:
    """Return every file of the five folders, as a path in the wheel."""
    found = (path for top in TOPS for path in (ROOT / top).rglob("*") if path.is_file())
    kept = [path for path in found if "__pycache__" not in path.parts and path.name[0] != "."]
    return {f"moe_parity/{path.relative_to(ROOT).as_posix()}" for path in kept}


def declared() -> set[str]:
    """Return what the project's file puts into a wheel."""
    folders = {name: ROOT.joinpath(*name.split(".")[1:]) for name in SETUPTOOLS["packages"]}
    found = {file for folder in folders.values() for file in folder.glob("*.py")}
    for name, patterns in SETUPTOOLS["package-data"].items():
        found |= {file for one in patterns for file in folders[name].glob(one) if file.is_file()}
    return {f"moe_parity/{path.relative_to(ROOT).as_posix()}" for path in found}


def test_every_file_of_the_packages_is_declared():
    assert not needed() - declared()


def test_every_package_says_that_it_has_types():
    typed = {name for name in needed() if name.endswith("/py.typed")}
    assert typed == {f"moe_parity/{top}/py.typed" for top in TOPS if top != "suites"}


def test_every_pattern_finds_something():
    for name, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT.joinpath(*name.split(".")[1:])
        assert all(list(folder.glob(one)) for one in set(patterns) - TO_COME), name


def imported() -> set[str]:
    """Return the first names of what our modules import, whenever they do."""
    paths = (path for top in TOPS if top != "suites" for path in (ROOT / top).rglob("*.py"))
    return {name for path in paths for name in IMPORT.findall(path.read_text())}


def test_what_is_required_is_used():
    names = {"pytest-xdist": "xdist"}
    required = [
        line.split(">")[0].split("=")[0].strip() for line in PROJECT["project"]["dependencies"]
    ]
    unused = {name for name in required if names.get(name, name) not in imported()}
    assert unused <= {"pytest-xdist"}  # a plugin: `-n` asks for it, nothing imports it


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[zipfile.ZipFile, list[str]]:
    """Return the wheel and the names in the sdist, built in a copy of the tree."""
    try:
        new = int(metadata.version("setuptools").partition(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        new = False
    if not new:
        pytest.skip("setuptools 77 is not installed, and a build may not use the network.")
    tree = tmp_path_factory.mktemp("tree")
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "witnesses", "measurements")
    for top in (*TOPS, "docs", "examples", ".ci", ".github"):
        shutil.copytree(ROOT / top, tree / top, ignore=skipped, symlinks=True)
    for file in ROOT.iterdir():
        if file.is_file() and file.name[0] != ".":
            shutil.copy(file, tree)
    environment = {**os.environ, "SETUPTOOLS_USE_DISTUTILS": "local"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=tree, env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,), (sdist,) = tree.glob("dist/*.whl"), tree.glob("dist/*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    return zipfile.ZipFile(wheel), names


def test_the_wheel_holds_the_packages_and_no_generic_name(built):
    names = built[0].namelist()
    top = {name.partition("/")[0].split("-")[0] for name in names}
    assert top == {"moe_parity", "moe_parity_pytest.py"}
    missing = {name for name in needed() if "/witnesses/" not in name} - set(names)
    assert not missing
    assert "moe_parity/__init__.py" not in names  # a namespace: another package may add to it


def test_the_wheel_says_what_it_is(built):
    wheel = built[0]
    (file,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    said = Parser().parsestr(wheel.read(file).decode())
    assert said["Name"] == "moe-parity"
    assert said["Requires-Python"] == ">=3.11"
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)}
    assert versions <= set(said.get_all("Classifier"))
    assert any(name.endswith("LICENSE") for name in wheel.namelist())
    (points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "parity = moe_parity.harness.cli:main" in wheel.read(points).decode()


def test_the_sdist_holds_what_its_tests_read(built):
    names = set(built[1])
    for file in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "conftest.py",
                 "docs/stages.md", "examples/torch_layer.py", "constraints.txt", ".ci/run",
                 "harness/cli/starters/fc1.torch.txt"):  # fmt: skip
        assert file in names
    assert {
        name.removeprefix("moe_parity/") for name in needed() if "/witnesses/" not in name
    } <= names


# --- a machine whose home cannot be written ------------------------------------------------------


def test_triton_gets_a_folder_where_no_home_can_be_written(tmp_path: Path, monkeypatch):
    file = tmp_path / "home"
    file.write_text("not a folder")  # a superuser may write everywhere else
    monkeypatch.setenv("HOME", str(file))
    given: dict[str, str] = {}
    made = caches.provide(given)
    assert made is not None
    assert given == {"TRITON_CACHE_DIR": str(made)}
    assert made.stat().st_mode & 0o077 == 0
    assert caches.provide(given) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    other: dict[str, str] = {}
    assert caches.provide(other) is None
    assert caches.provide({"TRITON_HOME": str(file)}) is not None
    assert not other


def test_the_compiled_model_needs_no_place_for_what_it_compiled(monkeypatch):
    from moe_parity.references.chips import tensor_core_numba

    def nowhere(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: ("compiled", function, options)

    monkeypatch.setattr(tensor_core_numba.numba, "njit", nowhere)
    made = tensor_core_numba._compiled(inline="always")(len)
    assert made == ("compiled", len, {"inline": "always"})


def test_the_suites_of_a_wheel_are_collected_without_a_checkout(built, tmp_path: Path):
    """What `parity check` begins with: a suite that reads what only a checkout has ends it."""
    built[0].extractall(tmp_path)
    code = (
        "import sys, pytest\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import moe_parity\n"
        f"moe_parity.__path__ = [{str(tmp_path / 'moe_parity')!r}]\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    suites = tmp_path / "moe_parity" / "suites"
    options = ["--collect-only", "-q", "-c", os.devnull, "--import-mode=importlib"]
    # as the command leaves the harness's own tests out
    options += [f"--ignore={suites / name}" for name in NOT_CHECKS]
    done = subprocess.run(
        [sys.executable, "-c", code, *options, "-p", "moe_parity.harness.plugin", str(suites)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "test_act_quant.py::" in done.stdout
