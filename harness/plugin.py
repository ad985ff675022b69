"""The pytest plugin: options, header, kernel selection and fixtures of a parity run.

Loaded by the root conftest.py, by `parity check`, and in any repository by `pytest_plugins`, by
`-p moe_parity.harness.plugin`, or by the option `--parity`, which the installed entry point
(`moe_parity_pytest.py`) waits for. An option on the command line beats the environment variable,
which beats the ini setting:

| option                | environment       | ini setting        | default |
|-----------------------|-------------------|--------------------|---------|
| --parity-out          |                   | parity_out         | none: nothing is written |
| --parity-report       |                   | parity_report      | off     |
| --parity-device       | MOE_PARITY_DEVICE | parity_device      | auto    |
| --parity-require-gpu  |                   | parity_require_gpu | off     |
| --parity-kernel       |                   | parity_kernel      | all     |
| --parity-seed         | MOE_PARITY_SEED   | parity_seed        | none: new cases every time |
| --parity-timeout      |                   | parity_timeout     | 120 s (CPU), 300 (GPU) |
| --parity-shapes       |                   | parity_shapes      | all     |
| --parity-shard        |                   | parity_shard       | all     |
| --parity-last-failed  |                   | parity_last_failed | off     |
| --parity-case-from    |                   | parity_case_from   | none    |
| --hypothesis-profile  | MOE_PARITY_PROFILE|                    | dev; ci under CI |

Elsewhere is any repository but this one: tests that are not ours keep their hypothesis profile,
their time (no timeout), the GPUs, threads and restarts of their workers (`session/place.py`).

Fixtures, all of them for the session: `parity_recorder`, `parity_device`, `parity_seed`,
`parity_gpu`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings

from moe_parity.harness.session import caches, environment, guesses
from moe_parity.harness.session import profiles as settings
from moe_parity.harness.session.hooks import Session
from moe_parity.harness.session.place import is_ours
from moe_parity.harness.session.recorder import Recorder
from moe_parity.harness.session.selection import (
    SHARD,
    Shapes,
    Shard,
    failed_before,
    known_words,
    only,
)
from moe_parity.harness.session.skips import NO_GPU, skip_test
from moe_parity.harness.session.watch import ON_CPU, ON_GPU, Overrun, Watch
from moe_parity.references.chips import why_not_modelled
from moe_parity.references.errors import ParityError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run, resolved; `device` is `cpu` or `cuda`, `out` absolute."""

    out: Path | None
    report: bool
    device: str
    require_gpu: bool
    kernels: tuple[str, ...]
    seed: int | None
    timeout: float
    shapes: Shapes | None = None
    shard: Shard | None = None
    failed: frozenset[str] | None = None
    """The node ids of tests that failed before, where only those are asked for."""
    case_from: Path | None = None
    """The captured tensors that suites/captured.py is about, absolute."""


OPTIONS = pytest.StashKey[Options]()
SELECTED = pytest.StashKey[frozenset[str] | None]()
SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add each option and its ini twin."""
    group = parser.getgroup("moe-parity", "bit-exact parity of MoE kernels")

    def add(name: str, ini: Any, text: str, **keywords: Any) -> None:
        option = f"--parity-{name}"
        group.addoption(option, dest=f"parity_{name.replace('-', '_')}", help=text, **keywords)
        parser.addini(f"parity_{name.replace('-', '_')}", f"{option}: {text}", ini, default=None)

    group.addoption(
        "--parity",
        action="store_true",
        help="load this plugin, where neither a conftest.py nor -p does",
    )
    add("out", "string", "write results.jsonl to this folder", metavar="DIR", default=None)
    add(
        "report",
        "bool",
        "also write report.html, summary.md and tolerances.csv there",
        action="store_true",
        default=None,
    )
    add("device", "string", "cpu, cuda or auto (default)", metavar="DEVICE", default=None)
    add(
        "require-gpu",
        "bool",
        "a missing GPU, or a skip for want of one, is an error",
        action="store_true",
        default=None,
    )
    add(
        "kernel",
        "linelist",
        "test this kernel, or those that this file registers, and no other (repeatable)",
        action="append",
        metavar="NAME|FILE.py",
        default=None,
    )
    add("seed", "int", "base seed of inputs and drawn cases", metavar="N", default=None)
    add(
        "timeout",
        "string",
        f"seconds that one case may take, 0 for any (default: {ON_CPU:g} on a CPU, {ON_GPU:g} on a "
        "GPU; in other repositories any)",
        metavar="S",
        default=None,
    )
    add(
        "shapes",
        "string",
        "tests of these shapes: m33-e256,deepseek_v3_tp8",
        metavar="FILTER",
        default=None,
    )
    add("shard", "string", "one of N parts of all tests", metavar="I/N", default=None)
    add(
        "case-from", "string", "captured tensors (suites/captured.py)", metavar="FILE", default=None
    )
    add(
        "last-failed",
        "bool",
        "what failed in the run whose results are in --parity-out, all where nothing did",
        action="store_true",
        default=None,
    )


def _resolve(config: pytest.Config, ours: bool) -> Options:
    def value(name: str, variable: str = "") -> Any:
        given = config.getoption(f"parity_{name}")
        if given is None and variable:
            given = os.environ.get(variable) or None
        return config.getini(f"parity_{name}") if given is None else given

    out, report = value("out"), bool(value("report"))
    if report and not out:
        raise ParityError("--parity-report needs --parity-out=DIR to write to.")
    require_gpu = bool(value("require_gpu"))
    seed = value("seed", "MOE_PARITY_SEED")
    try:
        seed = None if seed is None else int(seed)
    except ValueError:
        raise ParityError(f"the seed is {seed!r}, expected a whole number.") from None
    if (last := bool(value("last_failed"))) and not out:
        raise ParityError("--parity-last-failed needs the --parity-out=DIR of the run before.")
    folder = (config.invocation_params.dir / out).resolve() if out else None
    device = choose_device(value("device", "MOE_PARITY_DEVICE") or "auto", require_gpu)
    return Options(
        out=folder,
        report=report,
        device=device,
        require_gpu=require_gpu,
        kernels=tuple(value("kernel") or ()),
        seed=seed,
        timeout=_seconds(value("timeout"), (ON_CPU if device == "cpu" else ON_GPU) * ours),
        shapes=Shapes.parse(value("shapes")),
        shard=Shard.parse(value("shard")),
        failed=failed_before(folder) if last and folder else None,
        case_from=(config.invocation_params.dir / of).resolve()
        if (of := value("case_from"))
        else None,
    )


def _seconds(given: object, default: float) -> float:
    try:
        seconds = default if given is None else float(str(given))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ParityError(
            f"the timeout is {given!r}, expected seconds for a case, or 0 for no limit."
        )
    return seconds


def choose_device(wanted: str, require_gpu: bool = False) -> str:
    """Return `cpu` or `cuda` for a wish of cpu, cuda or auto; raise ParityError if it cannot be."""
    if wanted not in ("cpu", "cuda", "auto"):
        raise ParityError(f"the device is {wanted!r}, expected cpu, cuda or auto.")
    if wanted == "cpu":
        if require_gpu:
            raise ParityError("a GPU is required and the device is cpu: ask for one of the two.")
        return "cpu"
    card = environment.gpu()
    if card is not None:
        missing = why_not_modelled(card.capability)
        if require_gpu and missing:
            raise ParityError(f"a GPU is required whose bits are modelled: {missing}.")
        return "cuda"
    if wanted == "cuda" or require_gpu:
        asked = "the device is cuda" if wanted == "cuda" else "a GPU is required"
        raise ParityError(
            f"{asked}, but torch finds no CUDA GPU here: check the driver, CUDA_VISIBLE_DEVICES "
            "and that torch is a CUDA build, or use the device cpu."
        )
    return "cpu"


def load_kernels(names: tuple[str, ...], seconds: float = 0.0) -> frozenset[str] | None:
    """Return the names of the kernels to test, None for all.

    An entry that ends in .py is a file: it is loaded, and the kernels it registers are meant.
    Raises ParityError for an unknown one, and for files that take longer than ``seconds``.
    """
    if not names:
        return None
    # Late: the registry imports torch, and a bad option should not take seconds.
    from moe_parity.kernels import registry

    try:
        with Watch(seconds).limit():
            return frozenset(kernel.name for kernel in registry.select(names))
    except Overrun:
        raise ParityError(
            f"loading the kernels {', '.join(names)} took longer than the limit of {seconds:g} s; "
            "--timeout sets it."
        ) from None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Resolve the options, or refuse them in one sentence."""
    config.addinivalue_line(
        "markers",
        "moe(kernel, stage, scale, layout, dtype, clamp, ep, graph, poison, ...): what the test "
        "is about; select exactly with -m \"moe(scale='ue8m0')\"",
    )
    config.addinivalue_line("markers", "untouched: runs first, on kernels that no test has called")
    ours = is_ours(config.rootpath)
    if ours:
        # before anything imports torch: a worker of xdist sees one GPU and its share of the cores
        environment.bind_worker_gpu()
        environment.share_cores()
    caches.provide()
    try:
        options = _resolve(config, ours)
        # hypothesis itself loads --hypothesis-profile after this
        if ours or os.environ.get(settings.VARIABLE):
            settings.activate(times=settings.CHOSEN if options.kernels else 1)
        config.stash[SELECTED] = load_kernels(options.kernels, options.timeout)
    except ParityError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[OPTIONS] = options
    if options.seed is not None and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(options.seed)
    session = Session(
        config,
        out=options.out,
        report=options.report,
        device=options.device,
        require_gpu=options.require_gpu,
        seed=options.seed,
        selected=config.stash[SELECTED],
        timeout=options.timeout,
        ours=ours,
        chosen={
            option: str(value)
            for option, value in (
                ("--shapes", options.shapes and options.shapes.text),
                (f"--{SHARD}", options.shard),
                ("--lf", "what failed before" if options.failed else ""),
                ("--case-from", options.case_from and options.case_from.name),
            )
            if value
        },
    )
    session.notes.extend(environment.misspelt())
    config.stash[SESSION] = session
    if ours and getattr(config.option, "maxworkerrestart", "") is None:
        # a kernel that crashes is left alone after some cases: no need to end the run for it
        config.option.maxworkerrestart = "1000"
    config.pluginmanager.register(session, "moe-parity-session")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """State the run before it starts."""
    return header(config)


def header(config: pytest.Config) -> list[str]:
    """Return the lines that say what this run is."""
    options = config.stash[OPTIONS]
    card = environment.gpu() if options.device == "cuda" else None
    device = f"{card.name}, driver {card.driver}" if card else "cpu (virtual GPU)"
    versions = ", ".join(
        f"{name} {version}"
        for name, version in environment.versions().items()
        if name in ("python", "torch", "triton", "numpy", "hypothesis")
    )
    profile = hypothesis_settings.get_current_profile_name()
    lines = [
        f"moe-parity: {device}; profile {profile}, seed {options.seed}; {versions}",
        *(f"moe-parity: {name}={value}" for name, value in environment.variables().items()),
        *(f"moe-parity: warning: {sentence}" for sentence in environment.misspelt()),
    ]
    whose = guesses.packages(config.stash[SELECTED]).get("recipes of")
    if whose is not None:
        lines.append(f"moe-parity: recipes are those of {whose}")
    if options.shard is not None:
        lines.append(f"moe-parity: shard {options.shard}")
    if options.kernels:
        lines.append(f"moe-parity: only {', '.join(sorted(config.stash[SELECTED] or ()))}")
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the kernels asked for, those that must run first at the front.

    -k finds words left out of ids.
    """
    for item in items:
        item.extra_keyword_matches |= known_words(item)
    selected = config.stash[SELECTED]
    if selected is not None:
        kept, dropped = only(items, selected)
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    # a workspace that another test made grow is large enough for all that follows
    items.sort(key=lambda item: item.get_closest_marker("untouched") is None)
    narrow(config, items)


def narrow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what failed before, what is of the shapes, and this run's shard."""
    options = config.stash[OPTIONS]
    kept = list(items)
    if options.failed:
        # a file that could not be collected failed as a whole
        kept = [i for i in kept if {i.nodeid, i.nodeid.partition("::")[0]} & options.failed]
    if options.shapes is not None:
        kept = [item for item in kept if options.shapes.keeps(item)]
    if options.shard is not None:
        kept = [item for item in kept if options.shard.keeps(item.nodeid)]
    if len(kept) < len(items):
        left = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
        items[:] = kept


@pytest.fixture(scope="session")
def parity_recorder(request: pytest.FixtureRequest) -> Recorder:
    """Return the recorder of this run; a check calls its `add`."""
    return request.config.stash[SESSION].recorder


@pytest.fixture(scope="session")
def parity_device(request: pytest.FixtureRequest) -> str:
    """Return the device that kernels run on: `cpu` (the virtual GPU) or `cuda`."""
    return request.config.stash[OPTIONS].device


@pytest.fixture(scope="session")
def parity_seed(request: pytest.FixtureRequest) -> int:
    """Return the base seed of inputs, 0 where none was given."""
    return request.config.stash[OPTIONS].seed or 0


@pytest.fixture(scope="session")
def parity_gpu(parity_device: str) -> str:
    """Return `cuda`, or skip the test for want of a GPU; the report lists such skips."""
    if parity_device != "cuda":
        skip_test(NO_GPU)
    return parity_device
