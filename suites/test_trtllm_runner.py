"""How the fused layer is compiled and called: commands, what is kept, the C interface.

A script stands for the compilers; no CUDA is needed.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from moe_parity.kernels.vendors.flashinfer.package import FAST_MATH, Build
from moe_parity.kernels.vendors.flashinfer.runner import build as building
from moe_parity.kernels.vendors.flashinfer.runner import library as libraries
from moe_parity.kernels.vendors.flashinfer.runner import sources
from moe_parity.references.errors import ParityError

# --- how it is compiled ---------------------------------------------------------------------------

SCRIPT = """#!/bin/sh
printf '%s\\n' "$*" >> "{log}"
for last in "$@"; do :; done
echo made > "$last"
case "$*" in *{bad}*) echo "some.cu(3): error: it is bad"; exit 1;; esac
"""


class Workshop:
    """A folder with compilers that note their commands, and a cache."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.log = root, root / "log"
        (root / "bin").mkdir()
        self.compilers("no such word")
        monkeypatch.setenv("CUDA_HOME", str(root))
        monkeypatch.setenv("PATH", f"{root / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv(sources.CACHE, str(root / "cache"))
        monkeypatch.setattr(sources, "data", lambda: root / "data")

    def compilers(self, bad: str) -> None:
        """Write them anew: they fail where the word is in their command."""
        for name in ("nvcc", "g++"):
            path = self.root / "bin" / name
            path.write_text(SCRIPT.format(log=self.log, bad=bad.replace(" ", "_")))
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def ran(self) -> list[str]:
        """Return the commands since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Return compilers that are scripts."""
    return Workshop(tmp_path, monkeypatch)


def test_the_builds_differ_in_one_flag_of_device_code(workshop: Workshop):
    target = Path("made.o")
    for source in sources.SOURCES:
        shipped, exact = (building.command(source, kind, target) for kind in Build)
        assert [word for word in shipped if word != FAST_MATH] == exact
        assert shipped.count(FAST_MATH) == int(source.device)
        assert Path(shipped[0]).name == ("nvcc" if source.device else "g++")


def test_each_object_is_compiled_once_and_those_of_the_host_serve_both_builds(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
):
    assert building.main(["--jobs", "2"]) == 0
    device = sum(source.device for source in sources.SOURCES)
    host = len(sources.SOURCES) - device
    ran = workshop.ran()
    assert len([line for line in ran if " -c " in f" {line} "]) == 2 * device + host
    assert len([line for line in ran if "-shared" in line]) == 2
    assert all(sources.library(kind).read_text() == "made\n" for kind in Build)
    assert building.main([]) == 0
    assert workshop.ran() == []
    capsys.readouterr()


def test_what_is_not_compiled_in_time_is_left_for_the_next_command(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
):
    assert building.main(["exact", "--seconds", "-1"]) == 3
    assert workshop.ran() == []
    assert f"{len(sources.SOURCES)} objects are left; run it again." in capsys.readouterr().out
    assert not sources.library(Build.EXACT).exists()
    assert building.main(["exact"]) == 0
    assert len(workshop.ran()) == len(sources.SOURCES) + 1
    assert not sources.library(Build.SHIPPED).exists()


def test_a_compiler_that_fails_is_one_sentence_and_leaves_no_object(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
):
    workshop.compilers("other_gemms.cu")
    assert building.main(["exact", "--jobs", "1"]) == 1
    error = capsys.readouterr().err.strip()
    assert error == "nvcc did not make other_gemms.exact.o: some.cu(3): error: it is bad"
    kept = {path.name for path in (workshop.root / "cache" / "objects").iterdir()}
    assert "other_gemms.exact.o" not in kept
    assert "runner.exact.o" in kept
    workshop.ran()
    workshop.compilers("no such word")
    assert building.main(["exact"]) == 0
    assert not any("runner.cu" in line for line in workshop.ran())


def test_a_library_is_linked_anew_when_an_object_is(workshop: Workshop):
    assert building.build([Build.EXACT], say=lambda line: None)
    workshop.ran()
    target = sources.library(Build.EXACT)
    building.object_of(sources.SOURCES[0], Build.EXACT).unlink()
    target.touch()
    os.utime(target, (1, 1))
    assert building.build([Build.EXACT], say=lambda line: None)
    assert [("-shared" in line) for line in workshop.ran()] == [False, True]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["fast"], 2, "unknown build 'fast'; builds: shipped, exact."),
        (["exact"], 1, "FlashInfer compiles its GEMM with nvcc, which is not found"),
    ],
)
def test_a_build_that_cannot_start_says_why(
    workshop: Workshop, words, status: int, said: str, capsys: pytest.CaptureFixture[str]
):
    (workshop.root / "bin" / "nvcc").unlink()
    assert building.main(words) == status
    assert capsys.readouterr().err.startswith(said)


def test_the_cache_lies_where_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(sources.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert sources.library(Build.EXACT) == Path(
        "/some/where/moe-parity/flashinfer-0.6.18/fused_moe_exact.so"
    )
    monkeypatch.setenv(sources.CACHE, "/other")
    assert sources.library(Build.SHIPPED) == Path("/other/fused_moe_shipped.so")


# --- how it is called -----------------------------------------------------------------------------


def test_the_fields_of_a_call_are_those_of_the_source():
    """In the order of ``MoeLayer``, each of its size: a field of another place is another one."""
    text = (sources.OURS / "runner.cu").read_text()
    body = re.sub(r"//.*", "", text.partition("struct MoeLayer {")[2].partition("};")[0])
    wanted = []
    for line in body.split(";"):
        if not line.strip():
            continue
        if "*" in line:
            names, size = line.partition("*")[2], ctypes.c_void_p
        else:
            kind, _, names = line.strip().partition(" ")
            size = {"int64_t": ctypes.c_int64, "int": ctypes.c_int}[kind]
        wanted += [(name.strip(), size) for name in names.split(",")]
    assert [tuple(field) for field in libraries.Layer._fields_] == wanted
    assert len(wanted) == 20


class Functions:
    """The C interface, of which one function fails."""

    def __init__(self, failing: str) -> None:
        self.seen: list[str] = []

        def function(name: str, answer: int):
            def call(*given):
                self.seen.append(name)
                if name == "moe_runner_workspace" and not answer:
                    given[2]._obj.value = 4096
                return answer

            return call

        for name in ("moe_runner_create", "moe_runner_workspace", "moe_runner_run"):
            setattr(self, name, function(name, int(name == failing)))

        self.moe_runner_error = Said()


class Said:
    """Why a function failed; ctypes asks what it returns."""

    restype: Any = None

    def __call__(self) -> bytes:
        return b"CUDA says no\nand more"


@pytest.mark.parametrize("failing", ["", "create", "workspace", "run"])
def test_what_the_library_says_is_a_sentence(failing: str, monkeypatch: pytest.MonkeyPatch):
    functions = Functions(f"moe_runner_{failing}")
    opened = []

    def load(name, mode):
        opened.append((str(name), mode))
        return functions

    monkeypatch.setattr(ctypes, "CDLL", load)

    def use() -> int:
        made = libraries.Library(Path("some.so"), Path("headers"))
        size = made.workspace(libraries.Layer())
        made.run(libraries.Layer(), 5)
        return size

    if failing:
        with pytest.raises(ParityError, match=r"^FlashInfer's fused layer: CUDA says no$"):
            use()
        assert functions.seen[-1] == f"moe_runner_{failing}"
    else:
        assert use() == 4096
    # The driver first, where the library finds its open functions.
    assert [name for name, _ in opened] == [libraries.DRIVER, "some.so"]
    assert opened[0][1] == ctypes.RTLD_GLOBAL


def test_a_library_that_does_not_load_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(libraries, "DRIVER", str(tmp_path / "none.so"))
    with pytest.raises(ParityError, match=r"fused layer does not load: .*none\.so"):
        libraries.Library(tmp_path / "other.so", tmp_path)
