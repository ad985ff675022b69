"""`parity identify`: what does a kernel compute? From its outputs alone.

A kernel is run on cases that tell decisions apart, in every format that it takes; outputs may also
come from a file: a witness, or somebody's own tensors.  The recipe that a kernel states is not
looked at.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_parity.harness.calling.canonical import BadOutput
from moe_parity.harness.calling.run import run as call
from moe_parity.harness.checks.flow import BROKEN, first_line
from moe_parity.harness.diagnosis.answer import Answer, Nearest, identify_each
from moe_parity.harness.diagnosis.cause import opened
from moe_parity.harness.diagnosis.identify import Probe, Seen
from moe_parity.harness.evidence.dump import read_dump
from moe_parity.harness.session import environment
from moe_parity.kernels import Kernel, load_file, select
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, ScaleFormat

GROUPS = (128, 64, 32, 256)
"""Groups that a kernel is asked for, until it takes one."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `parity identify`."""

    targets: tuple[str, ...]
    """Names of kernels, kernel files (.py), and files of outputs (.safetensors)."""
    files: tuple[str, ...] = ()
    """Kernel files to load first."""
    device: str | None = None
    stage: str | None = None
    case: str | None = None
    """Of a file that does not say it: the stage, and the words of the case."""
    seed: int = 0
    case_from: Path | None = None
    """Captured tensors that kernels are run on, instead of probes."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What belongs together: a stage's outputs in one format."""

    who: str
    words: str
    seen: tuple[Seen, ...]
    inside: bool = False
    """Whether it is a stage inside a layer."""


def run(request: Request) -> int:
    """Identify all targets and print an answer for each setting; return 0, or 1 for a ``none``.

    Raises ParityError for a target that cannot be read or run.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for file in request.files:
        load_file(file)
    missing = outputs = 0
    start = time.perf_counter()
    said: list[tuple[tuple[str, ...], list[str]]] = []
    whole: dict[str, set[str]] = {}
    for setting in settings_of(request):
        outputs += sum(bits.numel() for one in setting.seen for bits in one.bits.values())
        for seen, answer in identify_each(setting.seen, setting.who):
            missing += not answer.recipes
            if setting.inside:
                named = set(answer.names)
                whole[setting.who] = whole.get(setting.who, named) & named
            words = setting.words
            if len(seen) < len(setting.seen):
                words = ", ".join(one.probe.case.id for one in seen)
            lines = (f"{answer.stage} of {setting.who}", *told(answer))
            if said and said[-1][0] == lines:
                said[-1][1].append(words)
                continue
            _print(console, said)
            said = [(lines, [words])]
    _print(console, said)
    for who, names in whole.items():
        console.print(f"all stages of {who}: {' or '.join(sorted(names)) or 'no named recipe'}")
    console.print(f"{outputs:,} outputs, {time.perf_counter() - start:.1f} s", style="dim")
    return 1 if missing else 0


def _print(console: Console, said: list[tuple[tuple[str, ...], list[str]]]) -> None:
    """Print what was found, of settings with the same answer once."""
    for (head, *lines), words in said:
        console.print(f"{head}, {', '.join(words)}")
        for line in lines:
            console.print(f"  {line}")


def settings_of(request: Request) -> Iterator[Setting]:
    """Yield the settings of every target."""
    for target in request.targets:
        if target.endswith(".safetensors"):
            if request.case_from is not None:
                raise ParityError(f"--case-from runs kernels, and {target} is a file of outputs.")
            yield from _of_file(Path(target), request)
        else:
            for kernel in select([target]):
                if request.case_from is None:
                    yield from of_kernel(kernel, request.device)
                else:
                    yield from _captured(kernel, request.case_from, request.device)


# --- kernels ------------------------------------------------------------------------------------


def of_kernel(kernel: Kernel, device: str | None = None) -> Iterator[Setting]:
    """Run a kernel on the probes of its stage, once for each scale format and input type.

    Raises ParityError where it cannot run here, takes no probe, or raises.
    """
    device = device or ("cuda" if environment.gpu() else "cpu")
    reason = kernel.unavailable()
    if reason:
        raise ParityError(
            f"{kernel.name} cannot run here: {reason} Its outputs from elsewhere can be read: "
            "`parity identify FILE.safetensors`."
        )
    count = 0
    faults: list[str] = []
    for words, cases in _formats(kernel, device, faults):
        ran = (_run(kernel, case, device, faults) for case in cases)
        found = tuple(one for one in ran if one is not None)
        for setting in _inside(kernel.name, words, found) if found else ():
            count += 1
            yield setting
    if not count:
        why = faults[0] if faults else f"it takes no case that {kernel.stage} is probed by."
        raise ParityError(f"{kernel.name} ran on no probe: {why}")


def _captured(kernel: Kernel, path: Path, device: str | None) -> Iterator[Setting]:
    """Run a kernel on captured tensors; raises ParityError where it takes none, or raises."""
    from moe_parity.harness.captured.feed import fed
    from moe_parity.harness.captured.file import read

    device = device or ("cuda" if environment.gpu() else "cpu")
    captured = read(path)
    case, inputs = fed(captured, kernel, device)
    faults: list[str] = []
    ran = _run(kernel, case, device, faults, inputs, fed(captured, kernel, device, "cpu")[1])
    if ran is None:
        raise ParityError(f"{kernel.name} did not run on {path}: {faults[0]}")
    yield from _inside(kernel.name, f"{path.name}, {case.id}", [ran])


def _formats(kernel: Kernel, device: str, faults: list[str]) -> Iterator[tuple[str, list[Case]]]:
    """Yield the cases that a kernel takes, by what its recipe may depend on.

    A kernel that takes no group of 128 is asked for others.
    """
    for group in GROUPS if "group" in kernel.stage.reads else GROUPS[:1]:
        found: dict[str, list[Case]] = {}
        for scale, probe in itertools.product(ScaleFormat, kernel.stage.probes()):
            case = dataclasses.replace(probe, scale=scale, group=group)
            refusal = kernel.declines(case, device)
            if refusal is None:
                words = scale.value + (f" groups of {group}" if group != GROUPS[0] else "")
                words += f" from {case.dtype.value}" if "dtype" in kernel.stage.reads else ""
                found.setdefault(words, []).append(case)
            elif kernel.stage.refusal(case) is None:
                faults.append(f"it declines {case.id}: {refusal}")
        if found:
            yield from found.items()
            return


def _run(
    kernel: Kernel, case: Case, device: str, faults: list[str], inputs: Any = None, own: Any = None
) -> Seen | None:
    """Run a kernel on a probe; one that it fails on is said, and left out.

    ``inputs`` replace the probe's, and ``own`` are the same on a CPU.
    """
    try:
        given = kernel.stage.inputs(case, device) if inputs is None else inputs
        outputs = call(kernel, case, given).outputs
    except BROKEN as error:
        own = isinstance(error, BadOutput)
        text = str(error) if own else f"{type(error).__name__}: {first_line(error)}"
        faults.append(f"it fails on {case.id}: {text}")
        print(f"parity: {kernel.name} fails on {case.id}, left out: {text}", file=sys.stderr)
        return None
    # recipes are tried on a CPU, where many small steps take less than on a GPU
    got = {name: tensor.cpu() for name, tensor in outputs.items()}
    own = kernel.stage.inputs(case) if own is None else own
    return Seen(Probe(stage=kernel.stage, case=case, inputs=own), got)


def _inside(who: str, words: str, found: Sequence[Seen]) -> Iterator[Setting]:
    """Yield a stage as it is; a layer that shows what is inside, stage by stage."""
    stage = found[0].probe.stage
    inner: dict[str, list[Seen]] = {}
    for one in found:
        for own in stage.inner(one.probe.case, one.probe.inputs, one.got):
            probe = Probe(stage=own.stage, case=own.case, inputs=own.inputs)
            inner.setdefault(own.stage.name, []).append(Seen(probe, own.got))
    if not inner or "fc1" not in inner:
        yield Setting(who=who, words=words, seen=tuple(found))
    else:
        for seen in inner.values():
            yield Setting(who=who, words=words, seen=tuple(seen), inside=True)


# --- files --------------------------------------------------------------------------------------


def _of_file(path: Path, request: Request) -> Iterator[Setting]:
    dump = read_dump(path, stage=request.stage, case=request.case, seed=request.seed)
    seen = Seen(Probe(stage=dump.stage, case=dump.case, inputs=dump.inputs), dump.outputs)
    yield from _inside(path.name, dump.case.id, [seen])


# --- words --------------------------------------------------------------------------------------


def told(answer: Answer) -> Iterator[str]:
    """Yield the lines that say an answer."""
    if answer.nearest is not None:
        yield from _none(answer.nearest)
        return
    names = " or ".join(answer.names)
    count = len(answer.recipes)
    yield names or f"no named recipe, but {count} explain{'s' * (count == 1)} every bit"
    yield from answer.changed
    yield from _wrapped(f"{name}={option}" for name, option in answer.fixed.items())
    for name, options in answer.open.items():
        yield f"open: {name} ({', '.join(options)})"
    if answer.not_asked:
        yield f"not asked for: {', '.join(answer.not_asked)}"


def _none(near: Nearest) -> Iterator[str]:
    share = 100.0 * near.equal / max(near.of, 1)
    yield "none: no recipe explains every bit"
    yield f"nearest: {near.recipe}, with {near.equal:,} of {near.of:,} outputs ({share:.2f} %)"
    alone = ", in a row that no recipe tried gives" if near.alone else ""
    yield f"first unexplained: {near.place}{alone}"
    yield f"the difference: {opened(near.cause.phrase).rstrip(',')}"


def _wrapped(words: Iterable[str], width: int = 96) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line) + len(word) + 2 > width:
            yield line
            line = ""
        line = f"{line}  {word}" if line else word
    if line:
        yield line
