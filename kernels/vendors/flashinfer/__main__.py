"""Compile FlashInfer's GEMM ahead of its first call: ``python -m ...flashinfer [shipped|exact]``.

Each build takes about two minutes of a machine with a GPU; both may run at once.
"""

from __future__ import annotations

import sys
import time

from moe_parity.kernels.vendors.flashinfer import package
from moe_parity.kernels.vendors.flashinfer.package import Build


def main(words: list[str]) -> int:
    """Compile the builds named, by default both; return the exit status."""
    unknown = sorted(set(words) - set(Build))
    if unknown:
        print(f"unknown build {unknown[0]!r}; builds: {', '.join(Build)}.", file=sys.stderr)
        return 2
    missing = package.unavailable()
    if missing:
        print(missing, file=sys.stderr)
        return 1
    for build in [Build(word) for word in words] or list(Build):
        start = time.monotonic()
        package.compile_now(build)
        print(f"{build}: compiled in {time.monotonic() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
