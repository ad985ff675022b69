"""Packages of any version: whose recipes are taken, from which folders the files come.

The vLLMs here are made of the files of the one at hand, with a line or two changed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_parity.harness.checks.expect import fields
from moe_parity.harness.checks.flow import bits, check
from moe_parity.harness.cli.listing import kernels_table
from moe_parity.harness.session import guesses
from moe_parity.harness.session.skips import skip_test
from moe_parity.kernels import Kernel, find
from moe_parity.kernels.vendors.deepgemm import api as deep_gemm
from moe_parity.kernels.vendors.deepgemm import casts
from moe_parity.kernels.vendors.signatures import Wanted
from moe_parity.kernels.vendors.vllm import files, folders, package
from moe_parity.references.language import Case, Values
from moe_parity.references.versions import guess, nearest

KNOWN = ("0.26.0", "0.33.0")
CASE = Case(m=24, h=512, values=Values.AIMED)
QUANT = "vllm_triton_per_token_group"
DIVIDES = ("tl.clamp(y / y_s, fp8_min", "tl.clamp(tl.math.div_rn(y, y_s), fp8_min")


# --- the nearest known version --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "want"),
    [
        ("0.33.0", "0.33.0"),
        ("0.34.1", "0.33.0"),  # newer than all
        ("1.0.0", "0.33.0"),
        ("0.30.0", "0.33.0"),  # between
        ("0.29.9", "0.26.0"),
        ("0.1.0", "0.26.0"),  # older than all
        ("0.34.1.dev5+gabcdef0", "0.33.0"),
        ("0.27.0rc1", "0.26.0"),
        ("v0.26.0-12-gabcdef0-dirty", "0.26.0"),
        ("0.26.0+cu129", "0.26.0"),
        ("0.1.dev1+gabcdef0", "0.33.0"),  # no tag in the checkout
        ("0.0.0", "0.33.0"),
        ("4ba787ec9", "0.33.0"),
        ("4ba787ec9-dirty", "0.33.0"),
        ("unknown", "0.33.0"),
        ("", "0.33.0"),
        (None, "0.33.0"),
    ],
)
def test_the_nearest_known_version(version: str | None, want: str):
    assert nearest(version, KNOWN) == want
    assert nearest(version, KNOWN[::-1]) == want


def test_of_two_as_near_the_later_is_taken_and_without_any_it_is_an_error():
    assert nearest("0.3.0", ("0.2.0", "0.4.0")) == "0.4.0"
    assert nearest("0.3.1", ("0.3.0", "0.4.0")) == "0.3.0"
    with pytest.raises(ValueError, match="empty"):
        nearest("0.3.0", ())


def test_what_is_known_is_no_guess_and_neither_is_what_is_not_ours():
    assert guess("vllm", "0.34.0") == "vLLM 0.33.0, the nearest known to 0.34.0"
    assert guess("sgl-deep-gemm", "0.2.5") == (
        "sgl-deep-gemm 0.1.5.post1, the nearest known to 0.2.5"
    )
    for version in ("0.33.0", "v0.33.0", "0.33.0+cu129", "0.33.0+cpu"):
        assert guess("vllm", version) == ""
    assert guess("vllm", "0.33.0+mine") != ""
    assert guess("numpy", "9.9") == ""


# --- folders --------------------------------------------------------------------------------------


def located() -> package.Package:
    found = package.located()
    if isinstance(found, str) or not found.file(files.FP8).is_file():
        skip_test(find(QUANT).unavailable())
    return found


def vllm(monkeypatch: pytest.MonkeyPatch, *roots: Path) -> None:
    monkeypatch.setenv(folders.VARIABLE, os.pathsep.join(map(str, roots)))
    folders._located.cache_clear()


def written(folder: Path, path: str, *changes: tuple[str, str], inside: bool = False) -> Path:
    """Write a file of the vLLM at hand into a folder, with changes; return the folder."""
    text = located().file(path).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    target = folder / (path.removeprefix("vllm/") if inside else path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return folder


@pytest.fixture
def base() -> Path:
    """Return the folder that holds the vLLM at hand."""
    return located().roots[0].parent


@pytest.mark.parametrize("inside", [False, True])
def test_an_overlay_is_run_named_and_said(
    inside: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A changed rounding in a folder of one file, laid out from ``vllm/`` on or from inside."""
    over = written(tmp_path / "my_branch", files.FP8, DIVIDES, inside=inside)
    vllm(monkeypatch, base, over)
    kernel = find(QUANT)
    verdict = bits(kernel, CASE, "cpu")
    assert verdict.message.startswith("quant.apply=divide instead of divide_full in act_quant of")
    said = "recipe vllm_triton_quant (of vLLM 0.33.0, the nearest known to 0.33.0+my.branch)"
    assert said in verdict.message
    used = fields(kernel, CASE, "cpu", verdict)["sources"]
    assert list(used)[1] == f"my_branch:{files.FP8}"
    assert find("vllm_fused_moe_fc1").files().keys() == {
        f"{base.name}:{files.MOE}", f"{base.name}:{files.UTILS}",
    }  # fmt: skip
    (over / (files.FP8[5:] if inside else files.FP8)).unlink()
    again = fields(kernel, CASE, "cpu", verdict)["sources"]
    assert list(again)[1] == f"{base.name}:{files.FP8}"
    assert list(again.values())[1] != list(used.values())[1]


def test_of_overlays_the_last_lies_on_top(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    below = written(tmp_path / "one", files.FP8, DIVIDES)
    above = written(tmp_path / "two", files.FP8)
    vllm(monkeypatch, base, below, above)
    assert package.package().version == "0.33.0+one.two"
    assert not bits(find(QUANT), CASE, "cpu").failed
    vllm(monkeypatch, base, above, below)
    assert bits(find(QUANT), CASE, "cpu").failed


def test_three_decisions_at_once_are_named(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """More than a search of neighbours tries: the recipe is identified."""
    over = written(
        tmp_path / "mine", files.FP8, DIVIDES,
        ("_absmax * (1.0 / fp8_max)", "tl.math.div_rn(_absmax, fp8_max)"),
        ("tl.maximum(tl.max(tl.abs(y)), eps)", "tl.maximum(tl.max(tl.abs(y)), 1e-4)"),
    )  # fmt: skip
    vllm(monkeypatch, base, over)
    verdict = bits(find(QUANT), CASE, "cpu")
    assert verdict.cause_kind == "decision"
    named = {verdict.cause, *verdict.alternatives}
    assert any(
        {"quant.scale_form=div_448", "quant.apply=divide"} <= set(one.split(" and "))
        and len(one.split(" and ")) == 3
        for one in named
    ), verdict.message


def test_a_checkout_says_its_version_by_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tags where there are some, else the commit; without git's word it is unknown."""
    top = written(tmp_path / "vllm", files.FP8)

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(top), *who, *words], check=True, capture_output=True)

    def version() -> str:
        vllm(monkeypatch, top)
        return package.package().version

    assert version() == "unknown"
    assert find(QUANT).guess == "vLLM 0.33.0, the nearest known to unknown"
    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    assert len(version()) >= 7
    assert package.package().nearest == "0.33.0"
    git("tag", "v0.26.0")
    assert version() == "v0.26.0"
    assert find(QUANT).guess == ""
    (top / files.FP8).write_text((top / files.FP8).read_text() + "\n")
    assert version() == "v0.26.0-dirty"
    assert find(QUANT).guess == "vLLM 0.26.0, the nearest known to v0.26.0-dirty"
    (top / "vllm" / "_version.py").write_text("__version__ = version = '0.34.0'\n")
    assert version() == "v0.26.0-dirty"
    (top / ".git").rename(tmp_path / "away")
    assert version() == "0.34.0"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda at: at / "none", "none is no folder."),
        (lambda at: at, "holds no folder vllm, and none of model_executor, envs.py"),
    ],
)
def test_a_folder_that_is_no_vllm_is_refused_in_a_sentence(
    make: Callable[[Path], Path], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    vllm(monkeypatch, make(tmp_path))
    reason = package.located()
    assert isinstance(reason, str)
    assert said in reason
    assert find(QUANT).unavailable() is not None


def test_a_checkout_that_is_installed_to_be_edited_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "branch" / "vllm").mkdir(parents=True)
    url = f'{{"url": "file://{tmp_path}/branch", "dir_info": {{"editable": true}}}}'
    installed = SimpleNamespace(
        version="0.34.0.dev1+gabc", locate_file=lambda name: tmp_path / "site" / name,
        read_text=lambda name: url,
    )  # fmt: skip
    monkeypatch.setattr(folders, "distribution", lambda name: installed)
    vllm(monkeypatch)
    assert package.located() == package.Package((tmp_path / "branch" / "vllm",), installed.version)
    folders._located.cache_clear()


# --- what a version no longer has -----------------------------------------------------------------


def test_one_kernel_whose_function_is_gone_is_unavailable_and_the_others_run(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    over = written(tmp_path / "mine", files.FP8, ("_packed_triton(", "_packed_into("))
    vllm(monkeypatch, base, over)
    reason = str(find("vllm_silu_mul_packed_ends").unavailable())
    assert reason == (
        f"vLLM 0.33.0+mine: {over / files.FP8} has no function silu_mul_quant_fp8_packed_triton; "
        "expected silu_mul_quant_fp8_packed_triton(input, output_q=, clamp_limit=, alpha=, beta=, "
        "expert_ends=, expert_alignment=)."
    )
    assert find("vllm_silu_mul_colmajor").unavailable() is None
    assert not bits(find(QUANT), CASE, "cpu").failed
    table = kernels_table()
    assert reason in table
    assert table.splitlines().count(
        "recipes are those of vLLM 0.33.0, the nearest known to 0.33.0+mine."
    ) == 1  # fmt: skip


SOURCE = "def f(a, b, *, c, d=1):\n    pass\n\ndef g(*rest, **named):\n    pass\n"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Wanted("k.py", "f", ("a", "b"), ("c",)), ""),
        (Wanted("k.py", "f", ("a", "B"), ("c", "d")), ""),  # a name of a place may change
        (Wanted("k.py", "f"), ""),
        (Wanted("k.py", "g", ("a",), ("c",)), ""),
        (Wanted("k.py", "f", ("b", "a"), ("c",)), "f has b as parameter 2, not 1; expected f(b, a"),
        (Wanted("k.py", "f", ("a", "b")), "(missing a required argument: 'c')"),
        (Wanted("k.py", "f", ("a", "b"), ("c", "e")), "(got an unexpected keyword argument 'e')"),
        (Wanted("k.py", "f", ("a", "b", "x"), ("c",)), "(too many positional arguments)"),
        (Wanted("k.py", "h", ("a",)), "k.py has no function h; expected h(a)."),
    ],
)
def test_a_function_is_held_to_the_call_of_it(wanted: Wanted, said: str, tmp_path: Path):
    (tmp_path / "k.py").write_text(SOURCE)
    reason = wanted.refusal(tmp_path / "k.py")
    assert (said in reason) if said else reason == ""


def test_a_file_that_is_gone_or_no_python_is_said(tmp_path: Path):
    wanted = Wanted("k.py", "f", ("a",))
    assert wanted.refusal(tmp_path / "k.py").endswith("k.py does not exist; expected f(a) in it.")
    (tmp_path / "k.py").write_text("def f(:\n")
    assert "k.py is no Python that can be read: " in wanted.refusal(tmp_path / "k.py")


def test_helpers_and_constants_that_a_version_adds_are_taken_along(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A kernel that calls a new one of its file, which reads a new constant."""
    helper = "FLOOR = tl.constexpr(1e-10)\n\n\n@triton.jit\ndef _floored(y, eps):\n    "
    helper += "return tl.maximum(tl.maximum(tl.max(tl.abs(y)), eps), FLOOR)\n\n\n"
    over = written(
        tmp_path / "mine", files.FP8,
        ("tl.maximum(tl.max(tl.abs(y)), eps)", "_floored(y, eps)"),
        ("@triton.jit\ndef _per_token_group_quant_fp8(", f"{helper}@triton.jit\n"
         "def _per_token_group_quant_fp8("),
    )  # fmt: skip
    vllm(monkeypatch, base, over)
    verdict = bits(find(QUANT), CASE, "cpu")
    assert not verdict.failed, verdict.message
    assert verdict.compared


def test_a_launcher_that_needs_another_file_accuses_nobody(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    over = written(
        tmp_path / "mine", files.FP8, ("M, N = input.size()", "M, N = checked(input).size()")
    )
    vllm(monkeypatch, base, over)
    case = Case(m=128, e=2, i=128)
    (verdict,) = check(find("vllm_silu_mul_colmajor"), case, "cpu")
    assert verdict.verdict == "skip"
    assert "fp8_utils.py now uses checked, which the adapter does not stand in for" in (
        verdict.reason
    )


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (None, "has no op per_token, expected one of 9 or 10 arguments."),
        (7, "per_token takes 7 arguments, expected 9 or 10."),
        (10, ""),
    ],
)
def test_an_op_is_held_to_its_number_of_arguments(
    count: int | None, said: str, monkeypatch: pytest.MonkeyPatch
):
    schema = SimpleNamespace(arguments=[None] * (count or 0))
    op = SimpleNamespace(default=SimpleNamespace(_schema=schema))
    space = SimpleNamespace() if count is None else SimpleNamespace(per_token=op)
    monkeypatch.setattr(torch.ops, "_C", space)
    found = package.lacking("_C", "per_token", (9, 10))
    assert str(found or "").endswith(said)
    assert (found is None) is (said == "")


# --- DeepGEMM -------------------------------------------------------------------------------------


def test_a_deepgemm_without_one_helper_has_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "math.py").write_text("def per_block_cast_to_fp8(x, use_ue8m0): ...\n")
    monkeypatch.setattr(casts, "_math_file", lambda: tmp_path / "math.py")
    assert find("deepgemm_per_block").unavailable() is None
    reason = str(find("deepgemm_per_token").unavailable())
    assert (
        "math.py has no function per_token_cast_to_fp8; expected per_token_cast_to_fp8(x, use"
        in (reason)
    )


def test_a_deepgemm_without_one_gemm_has_the_others(monkeypatch: pytest.MonkeyPatch):
    made = SimpleNamespace(__file__="deep_gemm/__init__.py", fp8_gemm_nt=print)
    monkeypatch.setattr(deep_gemm, "unavailable", lambda: None)
    monkeypatch.setattr(deep_gemm, "module", lambda: made)

    def why(kernel: Kernel) -> str:
        return str(kernel.unavailable() or "")

    assert why(find("deepgemm_dense")) == ""
    assert why(find("deepgemm_masked")).startswith(
        "deep_gemm/__init__.py has no GEMM of the masked layout, expected one of m_grouped_fp8_gemm"
    )


# --- where it is said -----------------------------------------------------------------------------


def test_a_run_says_the_version_and_whose_recipes(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    vllm(monkeypatch, base, written(tmp_path / "mine", files.FP8))
    assert guesses.packages(frozenset({QUANT})) == {
        "vllm": "0.33.0+mine", "recipes of": "vLLM 0.33.0, the nearest known to 0.33.0+mine",
    }  # fmt: skip
    vllm(monkeypatch, base)
    assert guesses.packages(frozenset({QUANT})) == {"vllm": "0.33.0"}
    assert guesses.packages(frozenset({"ours_act_quant"})) == {}
