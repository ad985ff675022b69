"""An H200 on a laptop: runs ``@triton.jit`` kernels on CPU tensors with the GPU's own bits.

``launch`` interprets an ordinary kernel; ``dispatch`` sends it to the real or the virtual GPU by
the device of its tensors, and ``record`` keeps what was launched, for replay.  Every float
operation is the exact model of the instruction that the installed Triton compiles it to, and the
package fails closed: an operation without a model raises ``UnmodelledOperation``.
"""

from moe_parity.kernels.choice import configured
from moe_parity.kernels.virtual_gpu.errors import (
    MemoryFault,
    OutOfBounds,
    Race,
    UnmodelledOperation,
    UnwrittenRead,
)
from moe_parity.kernels.virtual_gpu.launcher import LaunchReport, launch
from moe_parity.kernels.virtual_gpu.lowering import dot_unit, opcodes, ptx
from moe_parity.kernels.virtual_gpu.record import (
    Launch,
    Tape,
    dispatch,
    dry,
    launching,
    record,
    reversed_order,
    shuffled,
)
from moe_parity.kernels.written import mark, unwritten, watching

__all__ = [
    "Launch",
    "LaunchReport",
    "MemoryFault",
    "OutOfBounds",
    "Race",
    "Tape",
    "UnmodelledOperation",
    "UnwrittenRead",
    "configured",
    "dispatch",
    "dot_unit",
    "dry",
    "launch",
    "launching",
    "mark",
    "opcodes",
    "ptx",
    "record",
    "reversed_order",
    "shuffled",
    "unwritten",
    "watching",
]
