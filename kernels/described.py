"""Host-side tensor descriptors among the arguments of a launch: the tensor under one, and another.

Told by its class's name, so that nothing here needs Triton.
"""

from __future__ import annotations

import copy
from typing import Any

_HOME = "triton.tools.tensor_descriptor"


def is_descriptor(value: object) -> bool:
    """Whether an argument is a ``triton.tools.tensor_descriptor.TensorDescriptor``."""
    kind = type(value)
    return kind.__name__ == "TensorDescriptor" and kind.__module__ == _HOME


def under(value: Any) -> Any:
    """Return the tensor under a descriptor, anything else as it is."""
    return value.base if is_descriptor(value) else value


def placed(value: Any, base: Any) -> Any:
    """Return a descriptor like ``value`` of another tensor; ``value`` stays as it is."""
    made = copy.copy(value)
    made.base = base
    return made


def numbers(value: Any) -> tuple[Any, ...]:
    """Return what a descriptor says besides its tensor: shape, strides, box, padding."""
    return tuple(value.shape), tuple(value.strides), tuple(value.block_shape), value.padding
