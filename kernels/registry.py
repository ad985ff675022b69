"""The registry: what is under test, which recipe it follows, what it promises.

A kernel is a function of a :class:`Call` that returns ``(codes, scales)``::

    from moe_parity.kernels import register

    @register("mine", stage="act_quant", recipes="vllm_cuda")
    def mine(call):
        codes, scales = call.new_codes(), call.new_scales()
        my_op(call.x, codes, scales, call.case.group)
        return codes, scales

Put that in a file and name it: ``parity check --kernel file.py``.  Installed packages register
through the entry point group ``moe_parity.kernels``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_parity.kernels.errors import KernelError
from moe_parity.references.language import Case, Contract, Recipe, Stage
from moe_parity.references.language.recipes import ALL

BUILTIN = (
    "moe_parity.kernels.ours.registered",
    "moe_parity.kernels.ours.registered_layers",
    "moe_parity.kernels.vendors.deepgemm.casts",
    "moe_parity.kernels.vendors.deepgemm.gemms",
    "moe_parity.kernels.vendors.deepgemm.chain",
    "moe_parity.kernels.vendors.vllm.quant_ops",
    "moe_parity.kernels.vendors.vllm.layer_ops",
    "moe_parity.kernels.vendors.vllm.triton_gemm",
    "moe_parity.kernels.vendors.vllm.triton_quant",
    "moe_parity.kernels.vendors.vllm.triton_rows",
)
ENTRY_POINTS = "moe_parity.kernels"
Run = Callable[[Any], Any]
"""Quantization: ``Call`` -> (codes, scales).  A layer: ``LayerCall`` -> ``Trace``.  Every stage in
between: ``StageCall`` -> ``Produced``."""

RecipesOf = Callable[[Case, str], tuple[Recipe, ...]]
Supports = Callable[[Case, str], str | None]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A thing under test."""

    name: str
    stage: Stage
    run: Run
    recipes: RecipesOf
    """(case, device type) -> the recipes it may follow; more than one where a tile decides."""
    supports: Supports
    """(case, device type) -> None, or why not, in one sentence."""
    unavailable: Callable[[], str | None]
    """None, or why it cannot run here at all."""
    contract: Contract
    source: Path
    triton: bool
    """Whether a CPU runs it on the virtual GPU."""
    note: str

    def runs_on(self, device: str) -> str:
        """Return where a device type runs it: cpu, virtual_gpu or cuda."""
        return "virtual_gpu" if self.triton and device == "cpu" else device

    def why_not(self, case: Case, device: str) -> str | None:
        """Return None where the kernel runs the case on the device, else the reason."""
        return self.unavailable() or self.supports(case, device)


def _reason(ask: Callable[..., str | None]) -> Callable[..., str | None]:
    """Return ``ask`` with an exception of its own turned into a reason."""

    def safe(*args: Any) -> str | None:
        try:
            return ask(*args)
        except Exception as error:
            return f"asking it raised {type(error).__name__}: {error}".splitlines()[0]

    return safe


_KERNELS: dict[str, Kernel] = {}
_LOADED: set[str] = set()


def register(
    name: str,
    *,
    stage: Stage | str,
    recipes: str | Recipe | RecipesOf,
    supports: Supports | None = None,
    unavailable: Callable[[], str | None] | None = None,
    contract: Contract | None = None,
    triton: bool = False,
    note: str = "",
) -> Callable[[Run], Run]:
    """Register the decorated function as a kernel.

    ``recipes`` is a recipe, the name of one, or a function of (case, device type); ``triton`` says
    that a CPU runs it on the virtual GPU (``moe_parity.kernels.virtual_gpu.dispatch``).  Raises
    KernelError for an unknown recipe or stage and for a name that is taken by another file.
    """
    if not name or not set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_"):
        raise KernelError(f"kernel name {name!r}: use lower-case letters, digits and _.")
    if stage not in set(Stage):
        raise KernelError(f"kernel {name}: unknown stage {stage!r}; stages: {', '.join(Stage)}.")
    chosen = recipes if callable(recipes) else _fixed(name, Stage(stage), recipes)

    def decorate(run: Run) -> Run:
        code = getattr(run, "__code__", None)
        if code is None:
            raise KernelError(f"kernel {name}: register a function, not {type(run).__name__}.")
        source = Path(code.co_filename)
        taken = _KERNELS.get(name)
        if taken is not None and taken.source != source:
            raise KernelError(f"kernel {name} is registered twice: {taken.source} and {source}.")
        _KERNELS[name] = Kernel(
            name=name,
            stage=Stage(stage),
            run=run,
            recipes=chosen,
            supports=_reason(supports) if supports else (lambda case, device: None),
            unavailable=_reason(unavailable) if unavailable else (lambda: None),
            contract=contract or Contract(),
            source=source,
            triton=triton,
            note=note or (run.__doc__ or "").strip().partition("\n")[0],
        )
        return run

    return decorate


def _fixed(name: str, stage: Stage, recipe: object) -> RecipesOf:
    if isinstance(recipe, str):
        if recipe not in ALL:
            raise KernelError(
                f"kernel {name}: unknown recipe {recipe!r}; `parity recipes` lists: "
                f"{', '.join(ALL)}."
            )
        recipe = ALL[recipe]
    if not isinstance(recipe, Recipe):
        raise KernelError(f"kernel {name}: recipes must be a recipe, a name or a function.")
    if not recipe.says(stage):
        raise KernelError(f"kernel {name}: recipe {recipe.name} says nothing about stage {stage}.")
    value = (recipe,)
    return lambda case, device: value


def _load_builtin() -> None:
    for module in BUILTIN:
        if module not in _LOADED:
            _LOADED.add(module)
            importlib.import_module(module)
    if ENTRY_POINTS not in _LOADED:
        _LOADED.add(ENTRY_POINTS)
        for point in entry_points(group=ENTRY_POINTS):
            try:
                point.load()
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                raise KernelError(f"entry point {point.value} does not import: {text}") from error


def all_kernels(stage: Stage | None = None) -> list[Kernel]:
    """Return the registered kernels, in order of name."""
    _load_builtin()
    chosen = (k for k in _KERNELS.values() if stage is None or k.stage is stage)
    return sorted(chosen, key=lambda kernel: kernel.name)


def find(name: str) -> Kernel:
    """Return a kernel by name; raises KernelError, listing the known names."""
    _load_builtin()
    if name not in _KERNELS:
        raise KernelError(f"unknown kernel {name!r}; known: {', '.join(sorted(_KERNELS))}.")
    return _KERNELS[name]


def builtin(kernel: Kernel) -> bool:
    """Whether a kernel comes with this package."""
    return Path(__file__).resolve().parent in kernel.source.resolve().parents


def load_file(path: str | Path) -> list[Kernel]:
    """Import a user's file and return the kernels it registered.

    Raises KernelError, in one sentence, where the file is missing, does not import, or registers
    nothing.
    """
    _load_builtin()
    path = Path(path).resolve()
    if not path.is_file():
        raise KernelError(f"kernel file {path} does not exist.")
    before = set(_KERNELS)
    try:
        _import_path(path)
    except KernelError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise KernelError(f"kernel file {path} does not import: {text}") from error
    added = [k for k in _KERNELS.values() if k.source == path or k.name not in before]
    if not added:
        raise KernelError(f"kernel file {path} registers no kernel; see `parity kernels --help`.")
    return added


def _import_path(path: Path) -> ModuleType:
    name = f"moe_parity_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise KernelError(f"kernel file {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def select(names: Iterable[str]) -> list[Kernel]:
    """Return the kernels of a list of names and files (``*.py``)."""
    chosen: list[Kernel] = []
    for name in names:
        chosen += load_file(name) if name.endswith(".py") else [find(name)]
    return chosen
