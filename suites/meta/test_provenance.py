"""Both sides of a report are identified: this project, and the repository a kernel comes from."""

import subprocess
from pathlib import Path

import pytest

from moe_parity.harness.session.provenance import checkout, commit
from moe_parity.reports import html, markdown
from moe_parity.reports.records import Checkout, Run, RunInfo
from moe_parity.suites.meta.outside import Suite

KERNEL = """
from moe_parity.kernels import register
@register("mine", stage="act_quant", recipes="deepgemm")
def mine(call): ...
"""


class Repository:
    """A checkout with one committed file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q")
        (folder / "mine.py").write_text(KERNEL)
        (folder / ".gitignore").write_text("venv/\n")
        self.git("add", ".")
        self.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")

    def git(self, *args: str) -> str:
        command = ["git", "-C", str(self.folder), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    @property
    def head(self) -> str:
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def theirs(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "engine")


def test_a_checkout_is_told_with_its_dirty_flag(theirs, tmp_path):
    """Clean as committed; dirty once changed, or with a file that nobody added."""
    file, clean = theirs.folder / "mine.py", (theirs.folder, theirs.head, False)
    assert checkout(file) == checkout(theirs.folder) == clean
    (theirs.folder / "__pycache__").mkdir()
    (theirs.folder / "__pycache__" / "mine.pyc").write_text("")
    (theirs.folder / "out").mkdir()
    (theirs.folder / "out" / "results.jsonl").write_text("")
    assert checkout(file, theirs.folder / "out") == checkout(file, theirs.folder / "out") == clean
    assert checkout(file, tmp_path / "elsewhere") == (*clean[:2], True)
    file.write_text(KERNEL + "#")
    assert checkout(file, theirs.folder / "out") == (*clean[:2], True)
    theirs.git("checkout", "-q", "mine.py")
    (theirs.folder / "new.py").write_text("")
    assert checkout(theirs.folder / "new.py", theirs.folder / "out") == (*clean[:2], True)


def test_what_is_in_no_checkout_has_no_commit(theirs, tmp_path):
    """Neither outside of one, nor what git ignores there, nor before its first commit."""
    assert checkout(tmp_path) is None
    (theirs.folder / "venv").mkdir()
    (theirs.folder / "venv" / "x.py").write_text("")
    assert checkout(theirs.folder / "venv" / "x.py") is None
    subprocess.run(["git", "init", "-q", str(tmp_path / "empty")], check=True)
    assert checkout(tmp_path / "empty") is None


def test_a_report_has_both_commits(theirs, tmp_path):
    """The kernel's repository beside our own, each with its own flag."""
    (tmp_path / "suite").mkdir()
    suite = Suite(tmp_path / "suite")
    suite.write("""
        @pytest.mark.moe(kernel="mine")
        def test_it(): pass
    """)
    suite.run("--parity-out=out", f"--parity-kernel={theirs.folder / 'mine.py'}")
    run = suite.results()
    assert (run.info.commit, run.info.dirty) == commit()
    engine = Checkout(name="engine", commit=theirs.head, dirty=False, kernels=("mine",))
    assert engine in run.info.checkouts
    text, page = markdown.render(run), html.render(run)
    assert f"engine (mine) commit {theirs.head[:12]} ·" in text
    assert f"engine (mine)</dt><dd><code>{theirs.head[:12]}</code> clean" in page
    if run.info.commit:
        assert f"moe-parity commit {run.info.commit[:12]}" in text
        assert f"commit of moe-parity</dt><dd><code>{run.info.commit[:12]}</code>" in page


def test_a_dirty_repository_is_marked():
    """In both reports, and one that is no checkout says so."""
    others = (
        Checkout(name="engine", commit="ab" * 20, dirty=True, kernels=("mine", "yours")),
        Checkout(name="scratch", kernels=("third",)),
    )
    run = Run(RunInfo(started="now", commit="cd" * 20, dirty=False, checkouts=others), (), None)
    text, page = markdown.render(run), html.render(run)
    assert "moe-parity commit cdcdcdcdcdcd · engine (mine, yours) commit abababababab" in text
    assert "abababababab (dirty) · scratch (third) commit unknown" in text
    assert '<code>abababababab</code> <b class="warn">! dirty</b>' in page
    assert "scratch (third)</dt><dd>not a checkout" in page
