"""docs/api.md lists the public names: each is there, and what a module offers is listed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from moe_parity.harness import plugin
from moe_parity.harness.cli import new_kernel
from moe_parity.references.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/api.md").read_text()
SECTION = re.compile(r"^### `([\w.]+)`\n(.*?)(?=^##)", re.DOTALL | re.MULTILINE)
ROW = re.compile(r"^\| (`.*?`) \|", re.MULTILINE)
LISTED = {
    module: re.findall(r"`(\w+)`", " ".join(ROW.findall(text)))
    for module, text in SECTION.findall(PAGE)
}
IMPORT = re.compile(r"^from (moe_parity[\w.]*) import (.+)$", re.MULTILINE)


@pytest.mark.parametrize("module", LISTED)
def test_a_listed_name_is_there_and_an_exported_one_is_listed(module: str):
    if "virtual_gpu" in module or "ours" in module:
        pytest.importorskip("triton", reason="needs Triton")
    found = importlib.import_module(module)
    names = LISTED[module]
    assert names
    assert len(names) == len(set(names))
    assert not [name for name in names if not hasattr(found, name)]
    assert set(getattr(found, "__all__", names)) == set(names)


def test_the_page_lists_the_modules_that_say_what_they_export():
    exporting = {"moe_parity.kernels", "moe_parity.kernels.virtual_gpu"}
    exporting |= {f"moe_parity.references.{name}" for name in ("language", "stages")}
    assert exporting | {"moe_parity.reports.results"} <= LISTED.keys()
    harness = importlib.import_module("moe_parity.harness")
    assert "moe_parity.harness" in LISTED or not hasattr(harness, "__all__")


def test_a_kernel_of_the_docs_imports_public_names_alone():
    texts = [page.read_text() for page in (ROOT / "docs").glob("your-kernel.md")]
    texts += [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    texts += [new_kernel.starter("mine", stage) for stage in STAGES]
    used = {
        (module, name.strip())
        for text in texts
        for module, names in IMPORT.findall(text)
        for name in names.split(",")
    }
    assert len(used) >= 6
    assert not {(m, n) for m, n in used if n not in LISTED.get(m, ())}


def test_the_plugin_has_the_options_and_fixtures_of_the_page(pytestconfig: pytest.Config):
    said = PAGE.partition("## pytest")[2].partition("## The command")[0]
    source = Path(str(plugin.__file__)).read_text()
    options = set(re.findall(r"--parity-[\w-]+", source))
    assert set(re.findall(r"`(--parity-[\w-]+)`", said)) == options
    for fixture in re.findall(r"`(parity_\w+)`", said):
        assert f"def {fixture}(" in source
