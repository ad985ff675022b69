"""DeepGEMM's block-FP8 GEMMs on SM90: one arithmetic, four layouts of the rows.

Every layout runs the kernel sm90_fp8_gemm_1d2d: per 128 of K four FP8 WGMMA steps from a fresh
accumulator, RN(s_a * s_b), one FMA, at the end one rounding to BF16.  What differs is which rows
are read and written: :func:`row_fates`, :func:`masked_fates`.  ``import deep_gemm`` needs CUDA, so
it happens in the first call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.call import Fate, demand_aligned, demand_contiguous
from moe_parity.kernels.vendors.deepgemm.casts import unavailable as not_installed
from moe_parity.references.arithmetic.formats import BLOCK
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Skip, Why
from moe_parity.references.stages.routing import Placement

ALIGNMENT = 128
"""Rows of a tile in the contiguous and prefix-sum layouts, DeepGEMM's default on SM90."""

SLAB = 64
"""Rows of one warp group: its first row decides whether it computes."""

NAMES = {
    "dense": ("fp8_gemm_nt", "fp8_fp4_gemm_nt"),
    "contiguous": ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
    "masked": (
        "m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked",
        "fp8_m_grouped_gemm_nt_masked",
    ),
}  # fmt: skip
"""The names of one function in different builds."""


@lru_cache(maxsize=1)
def unavailable() -> Skip | None:
    """Import DeepGEMM; return None, or why it cannot run here."""
    missing = not_installed()
    if missing:
        return missing
    if not torch.cuda.is_available():
        return Skip(Why.NEEDS_GPU, "DeepGEMM's SM90 kernels need a Hopper GPU.")
    if torch.cuda.get_device_capability()[0] != 9:
        return Skip(Why.NEEDS_CHIP, "DeepGEMM's SM90 kernels need a Hopper GPU.")
    try:
        module()
    except Exception as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        return Skip(Why.ABSENT, f"deep_gemm does not import: {text}")
    return None


def module() -> ModuleType:
    """Import deep_gemm; it needs CUDA_HOME with nvcc, which compiles kernels at their first use."""
    return importlib.import_module("deep_gemm")


def lacking(*layouts: str) -> Skip | None:
    """Return None where DeepGEMM runs here and has the GEMM of each layout, else why not."""
    reason = unavailable()
    if reason:
        return reason
    for layout in layouts:
        if not any(hasattr(module(), name) for name in NAMES[layout]):
            return Skip(
                Why.ABSENT,
                f"{module().__file__} has no GEMM of the {layout} layout, expected one of "
                f"{', '.join(NAMES[layout])}.",
            )
    return None


def function(layout: str) -> Callable[..., None]:
    """Return the GEMM of a layout under whatever name this build has."""
    found = module()
    for name in NAMES[layout]:
        if hasattr(found, name):
            made: Callable[..., None] = getattr(found, name)
            return made
    raise ParityError(f"this deep_gemm has none of {', '.join(NAMES[layout])}.")


@contextmanager
def alignment(rows: int) -> Iterator[None]:
    """Set the rows of a tile, a global of the process, and put back what it was.

    A buffer padded to one value and run under another takes the wrong experts.
    """
    if rows not in (16, 32, 64, 128, 256):
        raise ParityError(f"DeepGEMM aligns experts to 16, 32, 64, 128 or 256 rows, not {rows}.")
    found = module()
    before = found.get_mk_alignment_for_contiguous_layout()
    found.set_mk_alignment_for_contiguous_layout(rows)
    try:
        yield
    finally:
        found.set_mk_alignment_for_contiguous_layout(before)


def rows_of(placed: Placement) -> int:
    """Return the rows of a buffer: one tile more than the experts can need."""
    return placed.bound + placed.align


def spare(slot: Tensor, rows: int) -> Tensor:
    """Return slots with the last row of a buffer, which is nobody's, where a pair has none."""
    return torch.where(slot >= 0, slot, rows - 1)


def row_fates(placed: Placement, *, skips: bool) -> Tensor:
    """Return the fates of a buffer's rows, int8 [rows], for tiles of two slabs.

    A slab whose first row is live is computed whole, so its padding holds the product of whatever
    lies there; one whose first row is not live is stored as +0.  Tiles past an expert's last live
    row are visited by the contiguous layout and skipped (``skips``) by the prefix-sum one.
    """
    fates = torch.full((rows_of(placed),), Fate.UNTOUCHED if skips else Fate.ZERO, dtype=torch.int8)
    for start, end in zip(placed.starts.tolist(), placed.ends.tolist(), strict=True):
        for slab in range(start, -(-end // ALIGNMENT) * ALIGNMENT if end > start else start, SLAB):
            fates[slab : slab + SLAB] = Fate.JUNK if slab < end else Fate.ZERO
        fates[start:end] = Fate.LIVE
    return fates


def masked_fates(counts: Tensor, max_m: int) -> Tensor:
    """Return the fates of the rows of [E, max_m], int8.

    The tile has 64 or 128 rows, as a heuristic picks: the second slab of a half-filled pair is
    stored as +0 or not visited.
    """
    row = torch.arange(max_m)[None]
    live = counts.cpu()[:, None].long()
    visited = -(-live // ALIGNMENT) * ALIGNMENT
    fates = torch.where(row < visited, int(Fate.JUNK), int(Fate.UNTOUCHED))
    return torch.where(row < live, int(Fate.LIVE), fates).to(torch.int8).flatten()


def is_column_major(scales: Tensor) -> bool:
    """Whether scales [M, G] lie in columns, one a multiple of 16 bytes after the other."""
    rows = scales.shape[0]
    return scales.dim() == 2 and scales.stride() == (1, -(-rows // 4) * 4)


def check_operands(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor) -> None:
    """Raise ParityError for shapes, dtypes, strides or pointers that the kernel does not take.

    ``a`` [..., K] and ``w`` [..., N, K] are E4M3 codes as uint8, the scales fp32; those of ``a``
    may lie as TMA reads them, which spares DeepGEMM a copy.
    """
    n, k = w.shape[-2:]
    blocks = -(-k // BLOCK)
    wanted = {
        "a": (a, torch.uint8, (*a.shape[:-1], k)),
        "a_scale": (a_scale, torch.float32, (*a.shape[:-1], blocks)),
        "w": (w, torch.uint8, tuple(w.shape)),
        "w_scale": (w_scale, torch.float32, (*w.shape[:-2], -(-n // 128), blocks)),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        laid = tensor.stride(-1) == 1 or (name == "a_scale" and is_column_major(tensor))
        if tensor.dtype is not dtype or tuple(tensor.shape) != shape or not laid:
            raise ParityError(
                f"DeepGEMM: {name} must be {dtype} {list(shape)} with contiguous rows, got "
                f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}."
            )
    for name in ("w", "w_scale"):
        demand_contiguous(wanted[name][0], f"DeepGEMM: {name}")
        # Of a single expert torch does not ask how far the next one would be; DeepGEMM does.
        block = wanted[name][0].shape[-2] * wanted[name][0].shape[-1]
        if w.dim() == 3 and wanted[name][0].stride(0) != block:
            raise ParityError(f"DeepGEMM: {name} must have its experts one after the other.")
    for name in ("a", "a_scale", "w"):
        # TMA reads them, the scales where their strides suit it.
        demand_aligned(wanted[name][0], f"DeepGEMM: {name}")
    if n % 8 or k % 16:
        raise ParityError(f"DeepGEMM: N = {n} must be a multiple of 8 and K = {k} one of 16.")


def _pair(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return codes.view(torch.float8_e4m3fn), scale


def dense(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, out: Tensor) -> None:
    """Write bf16 ``out`` [M, N] = ``a`` [M, K] times the transpose of ``w`` [N, K]."""
    check_operands(a, a_scale, w, w_scale)
    function("dense")(_pair(a, a_scale), _pair(w, w_scale), out)


def grouped(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, out: Tensor, layout: Tensor,
    *, psum: bool, zero_padding: bool = True, align: int = ALIGNMENT,
) -> None:  # fmt: skip
    """Write bf16 ``out`` [M, N] of rows padded expert by expert.

    ``layout`` int32 is the expert of each row, -1 for none [M], or with ``psum`` the exclusive end
    of each expert's live rows [E].  ``zero_padding`` is handed on; SM90 ignores it.
    """
    check_operands(a, a_scale, w, w_scale)
    wanted = (w.shape[0],) if psum else (a.shape[0],)
    if layout.dtype is not torch.int32 or tuple(layout.shape) != wanted:
        raise ParityError(
            f"DeepGEMM: the layout must be int32 {list(wanted)}, got {layout.dtype} "
            f"{list(layout.shape)}."
        )
    options: dict[str, Any] = {"use_psum_layout": psum, "ensure_zero_padding": zero_padding}
    with alignment(align):
        function("contiguous")(_pair(a, a_scale), _pair(w, w_scale), out, layout, **options)


def masked(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, out: Tensor, counts: Tensor,
    *, expected: int,
) -> None:  # fmt: skip
    """Write bf16 ``out`` [E, max_m, N]; ``counts`` int32 [E] live rows of each expert.

    ``expected`` rows of an expert are DeepGEMM's hint for its tiles.

    Raises ParityError unless max_m is a multiple of 128: DeepGEMM stores whole tiles of up to 128
    rows into the flattened buffer, so another max_m overwrites the next expert's first rows.
    """
    max_m = a.shape[1]
    if max_m % ALIGNMENT:
        raise ParityError(
            f"DeepGEMM masked: max_m must be a multiple of {ALIGNMENT}, got {max_m}: whole tiles "
            f"are stored, and one past max_m overwrites the next expert; pad to "
            f"{-(-max_m // ALIGNMENT) * ALIGNMENT}."
        )
    check_operands(a, a_scale, w, w_scale)
    function("masked")(_pair(a, a_scale), _pair(w, w_scale), out, counts, expected)
