"""What ``@triton.autotune`` and ``@triton.heuristics`` make of a launch: a function and its words.

A launch after tuning runs the configuration's own ``pre_hook`` and then the function; what resets
and restores tensors (``reset_to_zero``, ``restore_value``, the tuner's hooks) belongs to the
trials, and a kernel that counts on it is wrong from its second call on.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction

from moe_parity.kernels.choice import chosen
from moe_parity.references.errors import ParityError


def is_tuned(kernel: Any) -> bool:
    """Whether something above the function chooses words of a launch."""
    return isinstance(kernel, Autotuner | Heuristics)


def resolved(
    kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the function under autotuners and heuristics, and the options of its launch.

    Heuristics are evaluated, a configuration is taken: the first that pruning leaves, or the one
    of ``choosing``.  Raises ParityError where pruning leaves none.
    """
    made = dict(options)
    while is_tuned(kernel):
        if isinstance(kernel, Heuristics):
            for word, rule in kernel.values.items():
                made[word] = rule({**dict(zip(kernel.arg_names, args, strict=False)), **made})
        else:
            made |= _configuration(kernel, args, made)
        kernel = kernel.fn
    return kernel, made


def name_of(kernel: Any) -> str:
    """Return the name of the function that a launch is of, under whatever chooses its words."""
    while not isinstance(kernel, JITFunction) and not inspect.isfunction(kernel):
        kernel = getattr(kernel, "fn", None)
        if kernel is None:
            return "a kernel"
    return str(kernel.__name__)


def _configuration(tuner: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    name = name_of(tuner)
    named = dict(zip(tuner.arg_names, args, strict=False))
    before, tuner.nargs = getattr(tuner, "nargs", None), named
    try:  # Triton's own pruning, which looks at nargs
        configs = list(tuner.prune_configs(dict(options)))
    finally:
        tuner.nargs = before
    if not configs:
        raise ParityError(f"{name}: prune_configs_by leaves no configuration for this launch.")
    choice = chosen()
    number = 0
    if choice is not None:
        met = choice.met.get(name, ())
        words = tuple(_words(config) for config in configs)
        choice.met[name] = max(met, words, key=len)
        number = (choice.tuned or 0) % len(configs)
    config = configs[number]
    twice = options.keys() & config.kwargs.keys()
    if twice:
        raise ParityError(
            f"{name}: {', '.join(sorted(twice))} is given to the launch and by the autotuner's "
            "configuration; leave it out of one."
        )
    made = dict(config.all_kwargs())
    if config.pre_hook is not None:
        config.pre_hook({**named, **options, **made})
    return made


def _words(config: Any) -> str:
    """Return a configuration in words: what it says besides Triton's defaults."""
    said = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return ", ".join(f"{word}={value}" for word, value in said.items())
