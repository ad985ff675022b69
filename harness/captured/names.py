"""Finds a layer's tensors by the names that arguments and parameters have in the field."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe_parity.references.errors import ParityError

NAMES: Mapping[str, tuple[str, ...]] = {
    "x": ("x", "hidden_states", "a1", "input"),
    "x_scale": ("x_scale", "a1q_scale"),
    "ids": ("ids", "topk_ids", "selected_experts", "topk_idx"),
    "weights": ("weights", "topk_weights", "routing_weights"),
    "w13": ("w13", "w13_weight", "w1"),
    "w13_scale": ("w13_scale", "w13_weight_scale_inv", "w13_weight_scale", "w1_scale"),
    "w2": ("w2", "w2_weight"),
    "w2_scale": ("w2_scale", "w2_weight_scale_inv", "w2_weight_scale"),
}
"""Ours -> names of arguments, and of attributes of the module; the first tensor counts."""
HOLDERS = ("layer", "quant_config", "quant_info", "dispatch_output", "topk_output")
"""Arguments whose attributes are looked at as well: ``quant_method.apply(layer, ...)`` of vLLM."""
OPTIONAL = frozenset({"x_scale", "weights"})


def named(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], returned: Any
) -> dict[str, Tensor]:
    """Return a layer's tensors; raises ParityError, which says ``take``, where one is not found."""
    if returned is not None:
        return {"out": returned} if isinstance(returned, Tensor) else {}
    function = module.forward if hasattr(module, "forward") else module
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a function of C has no names
        given = dict(kwargs)
    flat = {**given, **_rest(given)}
    holders = [module, *(flat.get(name) for name in HOLDERS)]
    holders.append(getattr(flat.get("dispatch_output"), "topk_output", None))
    found: dict[str, Tensor] = {}
    for own, names in NAMES.items():
        values = [flat.get(name) for name in names]
        values += [getattr(holder, name, None) for holder in holders for name in names]
        tensor = next((value for value in values if isinstance(value, Tensor)), None)
        if tensor is not None:
            found[own] = tensor
    missing = [name for name in NAMES if name not in found and name not in OPTIONAL]
    if missing:
        raise ParityError(
            f"{missing[0]} is neither an argument nor an attribute of {type(module).__name__} (its "
            f"arguments are {', '.join(flat) or 'none'}; looked for "
            f"{', '.join(NAMES[missing[0]])}): pass take=, a function that returns the tensors"
        )
    return found


def _rest(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a ``**kwargs`` of the function took."""
    return {k: v for value in given.values() if isinstance(value, dict) for k, v in value.items()}
