"""Which commit it was: of this project, and of the tests and kernels that come from elsewhere."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from moe_parity.reports.records import Checkout

OURS = Path(__file__).resolve().parent


_NO_SOURCES = ("__pycache__", ".hypothesis")
"""Folders that a run makes where it finds sources; they make no checkout dirty."""


def checkout(path: Path, out: Path | None = None) -> tuple[Path, str, bool] | None:
    """Return (top folder, commit, dirty) of the checkout that holds a file or a folder.

    None outside of one, for what git ignores there (a virtual environment), and where git is absent
    or refuses.  A file that is not yet added makes its checkout dirty; what is written to ``out``
    does not.
    """
    folder = path if path.is_dir() else path.parent

    def git(*args: str) -> str:
        command = ["git", "-C", str(folder), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        top = Path(git("rev-parse", "--show-toplevel"))
        if _ignored(path):
            return None
        left_out = [f":(exclude,glob)**/{name}/**" for name in _NO_SOURCES]
        if out is not None and out.is_relative_to(top):
            left_out.append(f":(exclude){out}")
        changed = git("status", "--porcelain", "--untracked-files=all", "--", ":/", *left_out)
        return top, git("rev-parse", "HEAD"), bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None


def _ignored(path: Path) -> bool:
    folder = path if path.is_dir() else path.parent
    command = ["git", "-C", str(folder), "check-ignore", "--quiet", str(path)]
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0


def commit() -> tuple[str | None, bool | None]:
    """Return (commit, dirty) of the checkout of this project, None and None where installed."""
    found = checkout(OURS)
    return (None, None) if found is None else found[1:]


def checkouts(
    tests: Path, names: frozenset[str] | None, out: Path | None = None
) -> tuple[Checkout, ...]:
    """Return where the tests and the kernels come from, as far as it is not this project.

    ``names`` are the kernels that run, None for all that are known; ``out`` is where results go.
    """
    ours = checkout(OURS)
    groups: dict[tuple[Path, str | None, bool | None], list[str]] = {}
    for path, name in [(tests.resolve(), ""), *_foreign(names)]:
        found = checkout(path, out)
        if found is not None and ours is not None and found[0] == ours[0]:
            continue
        if found is None and (not name or OURS.parents[1] == path):
            continue  # suites that are installed with this project
        groups.setdefault(found or (path.parent, None, None), []).append(name)
    return tuple(
        Checkout(
            name=folder.name, commit=commit, dirty=dirty,
            kernels=tuple(sorted(filter(None, found))), tests="" in found,
        )
        for (folder, commit, dirty), found in groups.items()
    )  # fmt: skip


def _foreign(names: frozenset[str] | None) -> Iterable[tuple[Path, str]]:
    """Yield (file, name) of the kernels that do not come with this project."""
    if names is None and not entry_points(group="moe_parity.kernels"):
        return  # without loading torch
    from moe_parity.kernels.registry import all_kernels, builtin

    for kernel in all_kernels():
        if not builtin(kernel) and (names is None or kernel.name in names):
            yield kernel.source.resolve(), kernel.name
