"""An H200 on a laptop: runs ``@triton.jit`` kernels on CPU tensors with the GPU's own bits.

``launch`` interprets an ordinary kernel; ``dispatch`` sends it to the real or the virtual GPU by
the device of its tensors, and ``record`` keeps what was launched, for replay.  Every float
operation is the exact model of the instruction that the installed Triton compiles it to, and the
package fails closed: an operation without a model raises ``UnmodelledOperation``.
"""

from moe_parity.kernels.virtual_gpu.errors import OutOfBounds, UnmodelledOperation
from moe_parity.kernels.virtual_gpu.launcher import LaunchReport, launch
from moe_parity.kernels.virtual_gpu.lowering import dot_unit, opcodes, ptx
from moe_parity.kernels.virtual_gpu.record import (
    Launch,
    Tape,
    dispatch,
    dry,
    launching,
    record,
    shuffled,
)

__all__ = [
    "Launch",
    "LaunchReport",
    "OutOfBounds",
    "Tape",
    "UnmodelledOperation",
    "dispatch",
    "dot_unit",
    "dry",
    "launch",
    "launching",
    "opcodes",
    "ptx",
    "record",
    "shuffled",
]
