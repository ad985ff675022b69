"""The registry: what is under test, which recipe it follows, what it promises.

A kernel is a function of a :class:`Call` that returns its stage's outputs::

    from moe_parity.kernels import register

    @register("mine", stage="act_quant", recipes="vllm_cuda")
    def mine(call):
        codes, scales = call.new("codes"), call.new("scales")
        my_op(call.inputs.x, codes, scales, call.case.group)
        return codes, scales

Put that in a file and name it: ``parity check --kernel file.py``.  Installed packages register
through the entry point group ``moe_parity.kernels``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_parity.kernels import beside
from moe_parity.kernels.call import Call
from moe_parity.kernels.choice import chosen
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Arrival, Case, Contract, Recipe, Skip, Stage, Why
from moe_parity.references.recipes import ALL, recipe_named
from moe_parity.references.stages import stage_named
from moe_parity.references.versions import guess

BUILTIN = (
    "ours", "vendors.deepgemm", "vendors.vllm", "vendors.torch_ops", "vendors.flashinfer",
)  # fmt: skip
"""Packages here whose table ``REGISTERED`` names the modules that register kernels."""

ENTRY_POINTS = "moe_parity.kernels"
Run = Callable[[Call], Any]
RecipesOf = Callable[[Case, str], tuple[Recipe, ...]]
RecipesBy = Callable[[Case, str, Any], tuple[Recipe, ...]]
"""The same, of a configuration."""
Supports = Callable[[Case, str], Skip | str | None]
ConfigsOf = Callable[[Case, str], Mapping[str, Any]]
Cost = Callable[[Case], int]
Available = Callable[[], Skip | str | None]
Versions = Callable[[], Mapping[str, str]]
Files = Callable[[], Mapping[str, Path]]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A thing under test."""

    name: str
    stage: Stage[Any]
    run: Run
    recipes: RecipesOf
    """(case, device type) -> the recipes it may follow; more than one where a tile decides."""
    supports: Callable[[Case, str], Skip | None]
    """(case, device type) -> None, or why not."""
    unavailable: Callable[[], Skip | None]
    """None, or why it cannot run here at all."""
    contract: Contract
    source: Path
    triton: bool
    """Whether a CPU runs it on the virtual GPU."""
    needs_gpu: bool
    note: str
    versions: Versions
    """The versions of the package that it belongs to, for provenance."""
    cost: Cost
    """About how many programs, times blocks of K, a call costs the virtual GPU."""
    configs: ConfigsOf
    """(case, device type) -> its configurations by name, the first by default; often none."""
    stored: ConfigsOf = lambda case, device: {}
    """The same, of configurations that are too many to be swept: who names one gets it."""
    files: Files = dict
    """The package's own files that it is taken from, by the name that records give them."""
    takes_quantized: bool = False
    """Whether activations may arrive as codes and scales, where its stage knows that."""

    def config(self, case: Case, device: str) -> Any:
        """Return the configuration of a call: the chosen one, else the first, else None.

        Raises ParityError, listing those that there are, for a name that the case does not have.
        """
        return _picked(self.name, _together(self.configs, self.stored), case, device)

    @property
    def guess(self) -> str:
        """Whose recipes are taken where its package's version is not known, for sentences."""
        return " and ".join(filter(None, (guess(*one) for one in self.versions().items())))

    def runs_on(self, device: str) -> str:
        """Return where a device type runs it: cpu, virtual_gpu or cuda."""
        return "virtual_gpu" if self.triton and device == "cpu" else device

    def declines(self, case: Case, device: str) -> Skip | None:
        """Return None where the kernel takes the case on some machine of this device type."""
        refusal = self.stage.refusal(case)
        if refusal is not None:
            return Skip(Why.UNSUPPORTED, f"{refusal}.")
        if self.needs_gpu and device != "cuda":
            return Skip(Why.NEEDS_GPU, "it needs a GPU.")
        if case.arrives is Arrival.QUANTIZED and not self.takes_quantized:
            return Skip(Why.UNSUPPORTED, "it quantizes the activations itself.")
        try:
            return self.supports(case, device)
        except Exception:
            return None  # the checks say it, with the kernel's own line

    def why_not(self, case: Case, device: str) -> Skip | None:
        """Return None where the kernel runs the case here on the device, else the reason."""
        return self.unavailable() or self.declines(case, device)

    def on_chip(self, case: Case, device: str) -> bool:
        """Whether its bits come from a chip's own units or tables."""
        try:
            recipes = self.recipes(case, device)
        except Exception:
            return False  # the checks say it, with the kernel's own line
        return any(recipe.on_chip(self.stage.acting) for recipe in recipes)


def _unavailable(ask: Available) -> Callable[[], Skip | None]:
    """Return ``ask`` with a sentence made a reason, and an exception of its own too."""

    def safe() -> Skip | None:
        try:
            return Skip.of(ask(), Why.ABSENT)
        except Exception as error:
            text = f"asking it raised {type(error).__name__}: {error}".splitlines()[0]
            return Skip(Why.ABSENT, text)

    return safe


def _together(configs: ConfigsOf, stored: ConfigsOf) -> ConfigsOf:
    """Return the configurations of two functions; none is the default where only ``stored`` are."""

    def both(case: Case, device: str) -> Mapping[str, Any]:
        choice = chosen()
        known = configs(case, device)
        if choice is None or choice.registered is None or choice.registered in known:
            return known
        return {**known, **stored(case, device)}

    return both


def _picked(name: str, configs: ConfigsOf, case: Case, device: str) -> Any:
    known = configs(case, device)
    choice = chosen()
    wanted = choice.registered if choice is not None else None
    if wanted is None:
        return next(iter(known.values()), None)
    if wanted not in known:
        raise ParityError(
            f"{name} has no configuration {wanted!r} on {case.id}; it has "
            f"{', '.join(known) or 'none'}."
        )
    return known[wanted]


def _configs(name: str, configs: object) -> ConfigsOf:
    """Return configurations as a function; raises ParityError for what are none."""

    def checked(case: Case, device: str) -> Mapping[str, Any]:
        found = configs(case, device) if callable(configs) else configs
        if not isinstance(found, Mapping) or not all(isinstance(n, str) and n for n in found):
            raise ParityError(f"kernel {name}: configs must map names to anything, got {found!r}.")
        return found

    if configs is None:
        return lambda case, device: {}
    if not callable(configs):
        checked(Case(), "cpu")
    return checked


def _follows(
    name: str, stage: Stage[Any], recipes: Callable[..., Any], configs: ConfigsOf
) -> RecipesOf:
    """Return ``recipes`` with its answer checked; it raises ParityError for no recipes at all."""
    try:
        by_config = len(inspect.signature(recipes).parameters) == 3
    except (TypeError, ValueError):
        by_config = False

    def checked(case: Case, device: str) -> tuple[Recipe, ...]:
        asked = (_picked(name, configs, case, device),) if by_config else ()
        found = recipes(case, device, *asked)
        several = isinstance(found, tuple | list) and found
        if not several or not all(isinstance(recipe, Recipe) for recipe in found):
            raise ParityError(
                f"kernel {name}: its function of recipes returned {found!r} for {case.id}, "
                "expected a tuple of recipes, at least one."
            )
        for recipe in found:
            if not stage.described_by(recipe):
                raise ParityError(
                    f"kernel {name}: recipe {recipe.name} says nothing about {stage}."
                )
        return tuple(found)

    return checked


_KERNELS: dict[str, Kernel] = {}
_LOADED: set[str] = set()


def register(
    name: str,
    *,
    stage: Stage[Any] | str,
    recipes: str | Recipe | RecipesOf | RecipesBy,
    supports: Supports | None = None,
    unavailable: Available | None = None,
    contract: Contract | None = None,
    triton: bool = False,
    needs_gpu: bool = False,
    note: str = "",
    versions: Versions | None = None,
    cost: Cost | None = None,
    configs: Mapping[str, Any] | ConfigsOf | None = None,
    stored: Mapping[str, Any] | ConfigsOf | None = None,
    takes_quantized: bool = False,
    files: Files | None = None,
) -> Callable[[Run], Run]:
    """Register the decorated function as a kernel.

    ``recipes`` is a recipe, the name of one, or a function of (case, device type), and of the
    configuration if it takes three arguments.  ``configs`` are configurations by name, or a
    function of (case, device type) that returns them: ``call.config`` is one of them; ``stored``
    are more, which only ``parity map`` and a caller who names them take.  ``supports``
    and ``unavailable`` return None, or why not: a sentence or a :class:`Skip`.  ``triton`` says
    that a CPU runs it on the virtual GPU (``moe_parity.kernels.virtual_gpu.dispatch``),
    ``needs_gpu`` that only a GPU does; ``cost`` counts the programs of a case where they are not
    those that the stage expects, ``takes_quantized`` lets activations arrive as codes and scales
    (the word ``quantized`` of a case).  ``versions`` are those of its package by distribution,
    ``files`` those of the package's files that it is taken from: both are recorded.  Raises
    ParityError for an unknown recipe or stage and for a name that is taken by another file.
    """
    if not name or not set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_"):
        raise ParityError(f"kernel name {name!r}: use lower-case letters, digits and _.")
    owner = stage_named(stage) if isinstance(stage, str) else stage
    if not isinstance(owner, Stage):
        raise ParityError(f"kernel {name}: stage must be a stage or its name, got {stage!r}.")
    if contract is not None and not isinstance(contract, Contract):
        raise ParityError(f"kernel {name}: contract must be a Contract, got {contract!r}.")
    for word, ask in (("supports", supports), ("unavailable", unavailable)):
        if ask is not None and not callable(ask):
            raise ParityError(f"kernel {name}: {word} must be a function, got {ask!r}.")
    configs_of, stored_of = _configs(name, configs), _configs(name, stored)
    if callable(recipes) and not isinstance(recipes, type):
        follows = _follows(name, owner, recipes, _together(configs_of, stored_of))
    else:
        follows = _fixed(name, owner, recipes)

    def decorate(run: Run) -> Run:
        code = getattr(inspect.unwrap(run), "__code__", None)
        if code is None:
            raise ParityError(f"kernel {name}: register a function, not {type(run).__name__}.")
        source = Path(code.co_filename)
        taken = _KERNELS.get(name)
        if taken is not None and taken.source != source:
            raise ParityError(f"kernel {name} is registered twice: {taken.source} and {source}.")
        _KERNELS[name] = Kernel(
            name=name,
            stage=owner,
            run=run,
            recipes=follows,
            supports=lambda case, device: Skip.of(supports(case, device) if supports else None),
            unavailable=_unavailable(unavailable or (lambda: None)),
            contract=contract or Contract(),
            source=source,
            triton=triton,
            needs_gpu=needs_gpu,
            versions=versions or dict,
            cost=cost or owner.cost,
            configs=configs_of,
            stored=stored_of,
            takes_quantized=takes_quantized,
            files=files or dict,
            note=note or (run.__doc__ or "").strip().partition("\n")[0],
        )
        return run

    return decorate


def _fixed(name: str, stage: Stage[Any], recipe: object) -> RecipesOf:
    if isinstance(recipe, str):
        try:
            recipe = recipe_named(recipe)
        except ParityError as error:
            raise ParityError(f"kernel {name}: {error}") from None
    if not isinstance(recipe, Recipe):
        raise ParityError(f"kernel {name}: recipes must be a recipe, a name or a function.")
    if ALL.get(recipe.name, recipe) != recipe:
        raise ParityError(
            f"kernel {name}: {recipe.name} is another recipe's name; give yours one of its own "
            "with dataclasses.replace(recipe, name=...)."
        )
    if not stage.described_by(recipe):
        raise ParityError(f"kernel {name}: recipe {recipe.name} says nothing about stage {stage}.")
    value = (recipe,)
    return lambda case, device: value


def _load_builtin() -> None:
    for name in BUILTIN:
        if name not in _LOADED:
            _LOADED.add(name)
            package = importlib.import_module(f"moe_parity.kernels.{name}")
            for module in package.REGISTERED:
                importlib.import_module(f"{package.__name__}.{module}")
    if ENTRY_POINTS not in _LOADED:
        _LOADED.add(ENTRY_POINTS)
        for point in entry_points(group=ENTRY_POINTS):
            try:
                point.load()
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                raise ParityError(f"entry point {point.value} does not import: {text}") from error


def all_kernels(stage: Stage[Any] | None = None) -> list[Kernel]:
    """Return the registered kernels, in order of name."""
    _load_builtin()
    chosen = (k for k in _KERNELS.values() if stage is None or k.stage is stage)
    return sorted(chosen, key=lambda kernel: kernel.name)


def find(name: str) -> Kernel:
    """Return a kernel by name; raises ParityError, listing the known names."""
    _load_builtin()
    if name not in _KERNELS:
        raise ParityError(f"unknown kernel {name!r}; known: {', '.join(sorted(_KERNELS))}.")
    return _KERNELS[name]


def builtin(kernel: Kernel) -> bool:
    """Whether a kernel comes with this package."""
    return Path(__file__).resolve().parent in kernel.source.resolve().parents


def load_file(path: str | Path) -> list[Kernel]:
    """Import a user's file and return the kernels it registered; it may import what lies beside it.

    Raises ParityError, in one sentence, where the file is missing, does not import, or registers
    nothing.
    """
    _load_builtin()
    path = Path(path).resolve()
    if not path.is_file():
        raise ParityError(f"kernel file {path} does not exist.")
    before = set(_KERNELS)
    try:
        _import_path(path)
    except ParityError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ParityError(f"kernel file {path} does not import: {text}") from error
    added = [k for k in _KERNELS.values() if k.source == path or k.name not in before]
    if not added:
        raise ParityError(f"kernel file {path} registers no kernel; see `parity kernels --help`.")
    return added


def _import_path(path: Path) -> ModuleType:
    name = f"moe_parity_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ParityError(f"kernel file {path} is not a Python file.")
    beside.importable(path)
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
