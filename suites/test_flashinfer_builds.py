"""FlashInfer's package: what is missing in a sentence, the second build, compiling ahead."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_parity.kernels.vendors.flashinfer import __main__ as compiling
from moe_parity.kernels.vendors.flashinfer import package
from moe_parity.kernels.vendors.flashinfer.package import Build
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Why

# --- where it runs --------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Pretend that all is there, on a Hopper GPU."""
    found = {"flashinfer-python": "0.6.18", "apache-tvm-ffi": "0.1.11"}
    monkeypatch.setattr(package, "versions", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(package, "_has_nvcc", lambda: True)
    monkeypatch.setattr(package.shutil, "which", lambda name: name)
    monkeypatch.setattr(package, "base", SimpleNamespace)
    package.unavailable.cache_clear()
    yield monkeypatch
    package.unavailable.cache_clear()


def broken() -> None:
    raise ImportError("libcudart.so.13: cannot open\nand more")


LACKS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Why, str]] = {
    "flashinfer": (
        lambda patch: patch.setattr(package, "versions", lambda: {"apache-tvm-ffi": "0.1.11"}),
        Why.ABSENT, "FlashInfer is not installed; install the extra: pip install "
        "'moe-parity[flashinfer]'.",
    ),
    "tvm_ffi": (
        lambda patch: patch.setattr(package, "versions", lambda: {"flashinfer-python": "0.6.18"}),
        Why.ABSENT, "FlashInfer needs apache-tvm-ffi, which is not installed; install the extra: "
        "pip install 'moe-parity[flashinfer]'.",
    ),
    "gpu": (
        lambda patch: patch.setattr(torch.cuda, "is_available", lambda: False),
        Why.NEEDS_GPU, "FlashInfer's fp8_blockscale_gemm_sm90 needs a Hopper GPU.",
    ),
    "chip": (
        lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0)),
        Why.NEEDS_CHIP, "FlashInfer's fp8_blockscale_gemm_sm90 needs a Hopper GPU.",
    ),
    "nvcc": (
        lambda patch: patch.setattr(package, "_has_nvcc", lambda: False),
        Why.ABSENT, "FlashInfer compiles its GEMM with nvcc, which is not found; set CUDA_HOME to "
        "a CUDA toolkit of 12.8 or later.",
    ),
    "ninja": (
        lambda patch: patch.setattr(package.shutil, "which", lambda name: None),
        Why.ABSENT, "FlashInfer compiles its GEMM with ninja, which is not found; pip install "
        "ninja.",
    ),
    "import": (
        lambda patch: patch.setattr(package, "base", broken),
        Why.ABSENT, "flashinfer does not import: libcudart.so.13: cannot open",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LACKS)
def test_what_is_missing_is_said_in_one_sentence(what: str, installed: pytest.MonkeyPatch):
    change, why, sentence = LACKS[what]
    change(installed)
    found = package.unavailable()
    assert found is not None
    assert (found.why, str(found)) == (why, sentence)


def test_where_nothing_is_missing_it_runs(installed: pytest.MonkeyPatch):
    assert package.unavailable() is None


def test_nvcc_is_looked_for_where_flashinfer_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert not package._has_nvcc()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert package._has_nvcc()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(package.shutil, "which", lambda name: str(tmp_path / "bin" / name))
    assert package._has_nvcc()


# --- the second build -----------------------------------------------------------------------------


@dataclasses.dataclass
class Spec:
    """A module's description, as far as it is looked at."""

    name: str = "fp8_blockscale_gemm_90"
    extra_cflags: list[str] | None = None
    extra_cuda_cflags: list[str] | None = None
    made: list[str] = dataclasses.field(default_factory=list)

    def build_and_load(self) -> Any:
        """Return the module, whose runner says how it was compiled."""
        self.made.append(self.name)
        dirs: list[str] = []
        return SimpleNamespace(
            set_deepgemm_jit_include_dirs=dirs.extend, init=lambda: (self.extra_cuda_cflags, dirs)
        )


FLAGS = ["-std=c++17", "-use_fast_math", "-O3", "-gencode=arch=compute_90a,code=sm_90a"]


def test_the_second_build_differs_by_the_flag_and_keeps_its_names():
    spec = Spec(extra_cflags=["-O3"], extra_cuda_cflags=list(FLAGS))
    other = package.without_fast_math(spec)
    assert spec.extra_cuda_cflags == FLAGS
    assert other.name == "fp8_blockscale_gemm_90_exact"
    kept = [flag for flag in FLAGS if flag != "-use_fast_math"]
    assert other.extra_cuda_cflags == [*kept, "-Xcompiler=-fno-gnu-unique"]
    assert other.extra_cflags == ["-O3", "-fno-gnu-unique"]


def test_a_version_without_the_flag_is_refused():
    with pytest.raises(ParityError, match=r"compiles fp8_blockscale_gemm_90 without -use_fast_mat"):
        package.without_fast_math(Spec(extra_cuda_cflags=["-O3"]))


def test_the_second_build_is_made_once_and_told_where_its_headers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spec = Spec(extra_cuda_cflags=list(FLAGS))
    module = SimpleNamespace(gen_fp8_blockscale_gemm_sm90_module=lambda: spec)
    monkeypatch.setattr(package, "base", lambda: module)
    env = SimpleNamespace(FLASHINFER_CSRC_DIR=tmp_path)
    monkeypatch.setattr(importlib, "import_module", lambda name: env)
    package.exact_runner.cache_clear()
    try:
        flags, folders = package.exact_runner()
        assert package.exact_runner()[0] is flags
    finally:
        package.exact_runner.cache_clear()
    assert "-use_fast_math" not in flags
    assert folders == [str(tmp_path / "nv_internal" / "tensorrt_llm")]
    assert spec.made == ["fp8_blockscale_gemm_90_exact"]


# --- compiling ahead ------------------------------------------------------------------------------


def test_the_builds_are_compiled_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made: list[Build] = []
    monkeypatch.setattr(package, "compile_now", made.append)
    monkeypatch.setattr(package, "unavailable", lambda: None)
    for words, builds in (([], [Build.SHIPPED, Build.EXACT]), (["exact"], [Build.EXACT])):
        made.clear()
        assert compiling.main(words) == 0
        assert made == builds
    assert "exact: compiled in 0 s." in capsys.readouterr().out
    assert compiling.main(["fast"]) == 2
    assert capsys.readouterr().err == "unknown build 'fast'; builds: shipped, exact.\n"
    monkeypatch.setattr(package, "unavailable", lambda: package.HOPPER)
    assert compiling.main([]) == 1
    assert capsys.readouterr().err == f"{package.HOPPER}\n"
