"""A process that fuzzes for another one: its orders are its argument, its events lines of a pipe.

What a kernel prints, what it does to stdout and how it dies is then its own affair: the other
process reads events, and where they end without the last one, what was running.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_parity.harness.fuzz.loop import Alone, Fuzzer, Limits
from moe_parity.harness.fuzz.reason import Reason
from moe_parity.harness.session.watch import Watch, install
from moe_parity.kernels import Kernel, find, load_file
from moe_parity.kernels.registry import builtin
from moe_parity.references.language import Case


def claiming(folder: Path) -> Callable[[Reason], bool]:
    """Return a claim that only the first process of a run to make it is granted."""

    def claim(reason: Reason) -> bool:
        name = hashlib.sha256(str(reason).encode()).hexdigest()[:16]
        try:
            os.close(os.open(folder / f"reason-{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        except OSError:
            return True  # a full disk: rather twice than never
        return True

    return claim


def in_a_process(kernel: Kernel, device: str, seconds: float) -> Alone:
    """Return a judge that runs ``parity repro`` on a case: it knows of no other call."""

    def alone(case: Case) -> bool | None:
        command = [sys.executable, "-m", "moe_parity.harness", "repro", f"{kernel.name}-{case.id}"]
        command += ["--seed", str(case.seed), "--device", device]
        command += [] if builtin(kernel) else ["--kernel", str(kernel.source)]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                command, capture_output=True, timeout=60 + seconds if seconds else None, check=False
            )
            return {0: False, 1: True}.get(done.returncode)
        return None

    return alone


def main(orders: dict[str, Any], pipe: int) -> None:
    """Fuzz as told; the last event is ``end``, also after an interrupt."""

    def send(event: dict[str, Any]) -> None:
        os.write(pipe, json.dumps(event).encode() + b"\n")

    try:
        folder = Path(orders["folder"])
        if orders["file"]:
            load_file(orders["file"])
        kernel = find(orders["kernel"])
        install(Watch(orders["timeout"], folder, orders["name"]))
        fuzzer = Fuzzer(
            kernel=kernel,
            device=orders["device"],
            seed=orders["seed"],
            limits=Limits(cases=orders["cases"], seconds=orders["seconds"]),
            send=send,
            claim=claiming(folder),
            alone=in_a_process(kernel, orders["device"], orders["timeout"]),
            known={Reason(*reason) for reason in orders["known"]},
        )
        fuzzer.replay(map(Path, orders["entries"]))
        send({"kind": "drawing"})
        fuzzer.run()
    except KeyboardInterrupt:
        pass
    send({"kind": "end"})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
