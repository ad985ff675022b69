"""Compile the fused layer: ``python -m moe_parity.kernels.vendors.flashinfer.runner.build``.

``[shipped|exact] [--jobs N] [--seconds S]``.  What is compiled is kept in a cache folder
(``MOE_PARITY_FUSED_MOE``) and not compiled again, so that a machine with a limit on commands needs
as many as it takes: an object is started only while ``--seconds`` have not passed.  No GPU is
needed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moe_parity.kernels.vendors.flashinfer.package import NVCC, Build
from moe_parity.kernels.vendors.flashinfer.runner import sources
from moe_parity.kernels.vendors.flashinfer.runner.sources import SOURCES, Source
from moe_parity.references.errors import ParityError

Say = Callable[[str], None]


def _said(line: str) -> None:
    # At once: what is stopped later has said how far it came.
    print(line, flush=True)


def compiler() -> Path:
    """Return nvcc; raises ParityError where there is none."""
    found = sources.nvcc()
    if found is None:
        raise ParityError(NVCC)
    return found


def object_of(source: Source, build: Build) -> Path:
    """Return where an object lies or would lie; those of the host alone serve both builds."""
    kind = f"{build}" if source.device else "host"
    return sources.cache() / "objects" / f"{source.name}.{kind}.o"


def command(source: Source, build: Build, target: Path) -> list[str]:
    """Return the command that compiles an object to ``target``."""
    root, nvcc = sources.data(), compiler()
    made = [*sources.flags(source, build), *sources.includes(root)]
    head = [str(nvcc)] if source.device else ["g++"]
    if not source.device:
        made += ["-isystem", str(nvcc.parent.parent / "include")]
    return [*head, *made, "-c", str(source.located(root / "csrc")), "-o", str(target)]


def link_command(build: Build, target: Path) -> list[str]:
    """Return the command that makes a library of the objects.

    Only the C interface is seen from outside.  The driver's functions stay open: the process that
    loads the library has them (:mod:`.library`).
    """
    objects = [str(object_of(source, build)) for source in SOURCES]
    hidden = f"-Xlinker=--version-script={sources.OURS / 'exported.map'}"
    whole = ("-Xcompiler=-static-libstdc++,-static-libgcc", "-cudart=static")
    lazy = "-Xlinker=-z,lazy"
    return [str(compiler()), "-shared", *whole, hidden, lazy, *objects, "-ldl", "-o", str(target)]


def ran(words: Sequence[str], target: Path) -> None:
    """Run a command whose last word is a temporary target, and put what it made in place.

    Raises ParityError with the first error of the compiler.
    """
    done = subprocess.run(list(words), capture_output=True, text=True, check=False)
    made = Path(words[-1])
    if done.returncode or not made.is_file():
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "rror" in line]
        reason = lines[0] if lines else f"exit status {done.returncode}"
        raise ParityError(f"{Path(words[0]).name} did not make {target.name}: {reason}")
    # A command that is stopped half-way leaves no object that looks whole.
    os.replace(made, target)


def build(
    builds: Sequence[Build], *, jobs: int = 1, seconds: float = float("inf"), say: Say = _said
) -> bool:
    """Compile what is missing and link; return whether the libraries are complete.

    Up to ``jobs`` compilers run at once, each with up to 4.3 GB of memory.  After ``seconds`` no
    other is started.  Raises ParityError where a compiler fails.
    """
    sources.data()  # says at once that it is not there
    folder = sources.cache() / "objects"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    wanted = {object_of(source, kind): (source, kind) for source in SOURCES for kind in builds}
    missing = [path for path in wanted if not path.is_file()]

    def compiled(path: Path) -> bool:
        if time.monotonic() - start > seconds:
            return False
        began = time.monotonic()
        ran(command(*wanted[path], path.with_suffix(".part")), path)
        say(f"{path.name}: {time.monotonic() - began:.0f} s, {path.stat().st_size} bytes.")
        return True

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        left = len(missing) - sum(pool.map(compiled, missing))
    if left:
        say(f"{left} objects are left; run it again.")
        return False
    for kind in builds:
        target = sources.library(kind)
        newest = max(object_of(source, kind).stat().st_mtime for source in SOURCES)
        if not target.is_file() or target.stat().st_mtime < newest:
            ran(link_command(kind, target.with_suffix(".part")), target)
        say(f"{target}: {target.stat().st_size} bytes.")
    return True


def main(words: Sequence[str]) -> int:
    """Build what is asked for, by default both; return the exit status, 3 for some left."""
    asked = argparse.ArgumentParser(prog="build", description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("builds", nargs="*", metavar="shipped|exact")
    asked.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    asked.add_argument("--seconds", type=float, default=float("inf"))
    given = asked.parse_args(list(words))
    unknown = sorted(set(given.builds) - set(Build))
    if unknown:
        print(f"unknown build {unknown[0]!r}; builds: {', '.join(Build)}.", file=sys.stderr)
        return 2
    if shutil.which("g++") is None:
        print("g++ is not found; the host's parts are compiled with it.", file=sys.stderr)
        return 1
    try:
        kinds = [Build(word) for word in given.builds] or list(Build)
        return 0 if build(kinds, jobs=given.jobs, seconds=given.seconds) else 3
    except ParityError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
