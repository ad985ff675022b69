"""The modules beside a kernel file: its own, as `python FILE` has it, and nobody else's."""

from __future__ import annotations

import sys
from pathlib import Path

from moe_parity.references.errors import ParityError

_FOLDERS: list[Path] = []
"""Of the kernel files that were loaded."""


def importable(file: Path) -> None:
    """Make what lies beside a kernel file importable; ``file`` is absolute.

    Raises ParityError where a module of that name came from beside another file: a process has one
    module of a name, and the second file would run with the first one's.
    """
    folder = file.parent
    if folder in _FOLDERS:
        return
    for other in _FOLDERS:
        for mine in sorted(folder.glob("*.py")):
            taken = getattr(sys.modules.get(mine.stem), "__file__", None)
            if taken is not None and Path(taken).resolve().parent == other:
                raise ParityError(
                    f"{file} has {mine.name} beside it, and {taken} is loaded under that name: "
                    "give the two files a run each, or compare them (`parity compare`)."
                )
    _FOLDERS.append(folder)
    sys.path.insert(0, str(folder))
