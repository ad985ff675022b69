"""The gated activation between the two GEMMs: SwiGLU, alone or with quantization.

Each launches its kernel on the real or the virtual GPU.  Only metadata is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.call import demand_contiguous
from moe_parity.kernels.ours import activation_kernels
from moe_parity.kernels.ours.quant import GROUPS, check_memory, check_output
from moe_parity.kernels.virtual_gpu import dispatch
from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout
from moe_parity.references.errors import ParityError

VECTOR_BYTES = 16
"""The widest load of a GPU."""


FORMS = ("ours", "torch")
"""How SiLU and its product are rounded: once, or as torch's two eager kernels do on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What is asked of SwiGLU: ``clamp`` is none, before or after SiLU.

    ``form`` "torch" has the bits of ``torch.nn.functional.silu(gate) * up`` on CUDA tensors, and
    nothing besides: raises ParityError with a clamp, an alpha or a beta, and for other forms.
    """

    clamp: str = "none"
    limit: float = 0.0
    limits: Tensor | None = None
    """fp32 [E]: a limit for each expert, in place of ``limit``."""
    alpha: float = 1.0
    beta: float = 0.0
    form: str = "ours"

    def __post_init__(self) -> None:
        """Refuse what torch's form has not."""
        if self.form not in FORMS:
            raise ParityError(f"SwiGLU: form must be 'ours' or 'torch', got {self.form!r}.")
        if self.form == "torch" and (self.clamp, self.alpha, self.beta) != ("none", 1.0, 0.0):
            raise ParityError(
                f"SwiGLU: the form 'torch' takes no clamp, alpha or beta, got {self.clamp!r}, "
                f"{self.alpha} and {self.beta}; use the form 'ours'."
            )

    @property
    def constants(self) -> dict[str, Any]:
        """What is compiled in."""
        return {
            "CLAMP": self.clamp,
            "SCALED": self.alpha != 1.0,
            "SHIFTED": self.beta != 0.0,
            "LIMITS": self.limits is not None,
            "FORM": self.form,
        }


def swiglu(
    rows: Tensor,
    ids: Tensor | None,
    first: int,
    experts: int,
    how: Activation,
    out: Tensor | None = None,
) -> Tensor:
    """Return bf16 [P, I] of bf16 rows [P, 2 * I], the gate first, with any strides.

    ``ids`` are P global expert ids, int32 or int64; rows of other experts than first .. first + E
    are not written.  Without ``ids`` every row is.  ``out`` is memory of the caller's, rows of any
    pitch.  Raises ParityError, in a sentence, for anything else.
    """
    width = _check_rows("swiglu", rows, ids, how)
    pairs = rows.shape[0]
    if out is None:
        out = torch.empty((pairs, width), dtype=torch.bfloat16, device=rows.device)
    check_output("swiglu", rows, "out", out, (pairs, width), torch.bfloat16)
    if pairs and width:
        tile = min(16, 1 << (pairs - 1).bit_length())
        dispatch(
            activation_kernels.swiglu_kernel, (-(-pairs // tile), -(-width // 128)),
            rows, out, rows if ids is None else ids, rows if how.limits is None else how.limits,
            pairs, first, experts, how.limit, how.alpha, how.beta, *rows.stride(), out.stride(0),
            WIDTH=width, ROWS=tile, HAS_IDS=ids is not None, VECTOR=takes_vectors(rows, 8),
            num_warps=4, **how.constants,
        )  # fmt: skip
    return out


def swiglu_quant(
    rows: Tensor,
    ids: Tensor | None,
    first: int,
    experts: int,
    how: Activation,
    *,
    group: int = 128,
    scale: ScaleFormat = ScaleFormat.FP32,
    layout: ScaleLayout = ScaleLayout.ROW,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    vector: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [P, I] and scales of bf16 rows [P, 2 * I], groups of 1 x 64 or 1 x 128.

    ``rows`` and ``ids`` are those of :func:`swiglu`.  Scales are fp32 [P, ceil(I / group)], or of
    ``ue8m0packed`` int32 [P, ceil(I / group / 4)] with 0 in the bytes of groups that do not exist.
    New ones lie as ``layout`` says, packed ones as TMA wants them, and the rows up to a multiple of
    4 that TMA reads beside them hold 0.  ``codes`` and ``scales`` are memory of the caller's, with
    strides of their own (rows of codes contiguous), and nothing beside their elements is written.
    Rows of other experts are not written.

    ``vector`` forces a way to the rows, both the same bits: vectors (whole groups, contiguous rows
    that start at multiples of 16 bytes) or scalars (any strides, any I: the last group is ragged).
    None chooses.  Raises ParityError, in a sentence, for anything else.
    """
    width = _check_rows("swiglu_quant", rows, ids, how)
    if type(group) is not int or group not in GROUPS:
        raise ParityError(f"swiglu_quant: group must be 64 or 128, got {group}.")
    able = takes_vectors(rows, group)
    if vector and not able:
        raise ParityError(
            f"swiglu_quant: vectors need whole groups of {group} in contiguous rows that start at "
            f"multiples of {VECTOR_BYTES} bytes; I = {width}, strides {tuple(rows.stride())}."
        )
    codes, scales = _outputs("swiglu_quant", rows, width, group, scale, layout, codes, scales)
    pairs, padded = rows.shape[0], scales.shape[0]
    if pairs and width:
        tile = min(16, 1 << (padded - 1).bit_length())
        dispatch(
            activation_kernels.swiglu_quant_kernel, (-(-padded // tile), scales.shape[1]),
            rows, codes, scales, rows if ids is None else ids,
            rows if how.limits is None else how.limits,
            pairs, padded, first, experts, how.limit, how.alpha, how.beta,
            *rows.stride(), codes.stride(0), *scales.stride(),
            WIDTH=width, G=group, ROWS=tile, POWER_OF_TWO=scale.is_power_of_two,
            PACKED=scale.is_packed, HAS_IDS=ids is not None,
            VECTOR=able if vector is None else vector, num_warps=4, **how.constants,
        )  # fmt: skip
    return codes, scales[:pairs]


def quant_rows(
    rows: Tensor,
    ids: Tensor | None,
    first: int,
    experts: int,
    *,
    group: int = 128,
    scale: ScaleFormat = ScaleFormat.FP32,
    layout: ScaleLayout = ScaleLayout.ROW,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize bf16 rows [P, I] that :func:`swiglu` left, in groups of any size.

    The second launch where the two are not fused: everything else is as in :func:`swiglu_quant`.
    """
    if rows.dtype is not torch.bfloat16 or rows.dim() != 2 or not rows.is_contiguous():
        raise ParityError(
            f"quant_rows: rows must be contiguous bfloat16 [P, I], got {rows.dtype} "
            f"{list(rows.shape)} with strides {tuple(rows.stride())}."
        )
    if type(group) is not int or group < 1:
        raise ParityError(f"quant_rows: group must be a positive number, got {group}.")
    pairs, width = rows.shape
    _check_ids("quant_rows", ids, pairs)
    codes, scales = _outputs("quant_rows", rows, width, group, scale, layout, codes, scales)
    padded = scales.shape[0]
    if pairs and width:
        tile = min(16, 1 << (padded - 1).bit_length())
        dispatch(
            activation_kernels.quant_rows_kernel, (-(-padded // tile), scales.shape[1]),
            rows, codes, scales, rows if ids is None else ids, pairs, padded, first, experts,
            rows.stride(0), codes.stride(0), *scales.stride(),
            WIDTH=width, G=group, TILE=1 << (group - 1).bit_length(), ROWS=tile,
            POWER_OF_TWO=scale.is_power_of_two, PACKED=scale.is_packed, HAS_IDS=ids is not None,
            num_warps=4,
        )  # fmt: skip
    return codes, scales[:pairs]


def takes_vectors(rows: Tensor, group: int) -> bool:
    """Whether the vector way reads these rows [P, 2 * I]; only metadata is looked at."""
    items = VECTOR_BYTES // rows.element_size()
    return (
        rows.shape[1] // 2 % group == 0
        and rows.stride(1) == 1
        and rows.stride(0) % items == 0
        and rows.data_ptr() % VECTOR_BYTES == 0
    )


def _outputs(
    step: str,
    rows: Tensor,
    width: int,
    group: int,
    scale: ScaleFormat,
    layout: ScaleLayout,
    codes: Tensor | None,
    scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales, those that are new with the rows of their padding."""
    pairs = rows.shape[0]
    if codes is None:
        codes = torch.empty((pairs, width), dtype=torch.uint8, device=rows.device)
    shape, strides, dtype = scale.stored(pairs, -(-width // group), layout)
    if scales is None:
        tma = scale.is_packed or layout is ScaleLayout.TMA
        padded = strides[1] if tma else pairs
        scales = torch.empty_strided((padded, shape[1]), strides, dtype=dtype, device=rows.device)
    check_output(step, rows, "codes", codes, (pairs, width), torch.uint8)
    check_output(step, rows, "scales", scales[:pairs], shape, dtype)
    check_memory(step, rows, codes, scales)
    return codes, scales


def _check_rows(step: str, rows: Tensor, ids: Tensor | None, how: Activation) -> int:
    """Return I; raise ParityError for rows, ids and limits that do not go together."""
    if rows.dtype is not torch.bfloat16 or rows.dim() != 2 or rows.shape[1] % 2:
        raise ParityError(
            f"{step}: rows must be bfloat16 [P, 2 I], got {rows.dtype} {list(rows.shape)}."
        )
    _check_ids(step, ids, rows.shape[0])
    if ids is None and how.limits is not None:
        raise ParityError(f"{step}: a limit for each expert needs the ids of the rows' experts.")
    return rows.shape[1] // 2


def _check_ids(step: str, ids: Tensor | None, pairs: int) -> None:
    if ids is None:
        return
    demand_contiguous(ids, f"{step}'s ids")
    if ids.numel() != pairs:
        raise ParityError(f"{step}: there are {pairs} rows and {ids.numel()} ids.")
