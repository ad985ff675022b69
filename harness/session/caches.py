"""Where compilers keep what they compile, on a machine whose home cannot be written.

numba and torch find a place, or none, by themselves; Triton ends every launch with an error where
its folder cannot be made.  No import of Triton here: its folder is that of its documentation.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "TRITON_CACHE_DIR"


def provide(environ: MutableMapping[str, str] = os.environ) -> Path | None:
    """Give Triton a folder for this process and its children, where its own cannot be written.

    Returns the folder, which only this user can read and which goes when the process ends; None
    where nothing was to be done, also where the variable is set.  Call it before Triton compiles.
    """
    if environ.get(VARIABLE):
        return None
    home = environ.get("TRITON_HOME") or os.path.expanduser("~")
    if _can_be_written(Path(home) / ".triton" / "cache"):
        return None
    try:
        made = Path(tempfile.mkdtemp(prefix="moe-parity-triton-"))
    except OSError:
        return None  # Triton says it, where it is needed at all
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    environ[VARIABLE] = str(made)
    return made


def _can_be_written(folder: Path) -> bool:
    """Whether a folder takes files, or could be made."""
    # only the attempt says it: access(2) grants a superuser what the file system refuses
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
