"""``run_moe``: a block-FP8 MoE layer on one rank.

Three paths, the same bits: ``decode`` works in blocks of 16 tokens, ``large`` in blocks of 64,
``prefix_sum`` on rows by expert, on the same unit with the same recipe (``ours``), and a token's
result depends on nothing but the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_parity.kernels.ours import (
    activation,
    dispatch,
    prefix_sum,
    quant,
    scale_format,
    sorted_rows,
    steps,
)
from moe_parity.kernels.ours.activation import Activation
from moe_parity.kernels.ours.arguments import (
    check_call,
    check_experts,
    check_rank,
    number,
    word,
)
from moe_parity.kernels.ours.dispatch import ALIGNMENT, Choice, Down, Gemm, Path, Request
from moe_parity.kernels.ours.scale_format import LayerFormats, says_ue8m0
from moe_parity.kernels.ours.validate import check_codes, check_scales
from moe_parity.references.arithmetic.formats import ScaleFormat
from moe_parity.references.errors import ParityError
from moe_parity.references.stages.layer.operands import Experts, Trace

BLOCK = {Path.DECODE: 16, Path.LARGE: 64}
"""Tokens of an expert's block."""


def register_experts(experts: Experts, checkpoint: Mapping[str, object] | None = None) -> Experts:
    """Check shapes, dtypes and values once, where weights are loaded; return the experts.

    ``checkpoint`` is the quantization config that they came with: where it says ``scale_fmt:
    ue8m0`` all scales must be powers of two.  Raises ParityError, in a sentence, for the first
    thing that is wrong; looks at every value, so it waits for the GPU.
    """
    check_experts(experts)
    powers = says_ue8m0(checkpoint)
    for name in ("w13", "w2"):
        check_codes(getattr(experts, name), name=name)
        check_scales(
            getattr(experts, f"{name}_scale"), power_of_two=powers, name=f"{name}_scale",
            because=": the checkpoint says scale_fmt ue8m0", first=experts.first,
        )  # fmt: skip
    return experts


@dataclass(frozen=True, kw_only=True)
class Work:
    """A call that was checked, with all that was asked for."""

    choice: Choice
    x: Tensor
    x_scale: Tensor | None
    ids: Tensor
    weights: Tensor | None
    experts: Experts
    how: Activation
    power_of_two: bool
    mid_power_of_two: bool
    down: Down
    out: Tensor
    fused: bool
    alignment: int
    gemm: Gemm


def run_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    experts: Experts,
    *,
    x_scale: Tensor | None = None,
    limit: float | Tensor | None = None,
    clamp: str = "before",
    alpha: float = 1.0,
    beta: float = 0.0,
    formats: LayerFormats | None = None,
    power_of_two: bool | None = None,
    mid_power_of_two: bool | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    lora: object | None = None,
    path: Path | str | None = None,
    down: Down | str = Down.ROUTE_MAJOR,
    validate: bool = False,
    fused: bool = True,
    alignment: int = ALIGNMENT,
    gemm: Gemm | str = Gemm.OURS,
) -> Tensor:
    """Return the layer's output [M, H] of this rank's experts.

    ``x`` [M, H] is bf16, or uint8 codes with ``x_scale`` fp32 [M, H / 128].  ``ids`` [M, k] are
    global expert ids, int32 or int64; pairs of other ranks, -1 and ids past the end are dropped.
    ``weights`` [M, k] are fp32, None for ones.  ``limit`` clamps ``before`` or ``after`` SiLU, one
    number or fp32 [E].  ``formats`` are the scale formats of the layer's two quantizations
    (``scale_format.resolve``); or ``power_of_two`` says of both, and ``mid_power_of_two`` of the
    second one, whether scales are rounded up to powers of two.  What is not said is the global
    default.  Quantized ``x`` has the layer's first format, which ``validate`` checks.  ``path``
    forces ``decode``, ``large`` or ``prefix_sum``; ``down`` says how the large path lays the
    activations of the second GEMM: ``route_major`` or ``sorted``
    (:class:`~moe_parity.kernels.ours.dispatch.Down`).  ``fused`` False runs SwiGLU and the second
    quantization as two launches, the same bits, route-major alone.  ``alignment`` rows and the
    ``gemm``, ``ours`` or the installed ``deepgemm``, are the prefix-sum path's.  ``validate`` looks
    at values and waits for the GPU.  Nothing else does, and a call may be captured in a CUDA graph
    once its kernels are compiled (:func:`prewarm`).  Raises
    ParityError, in a sentence, for bad input.
    """
    return run_stages(
        x, ids, weights, experts, x_scale=x_scale, limit=limit, clamp=clamp, alpha=alpha, beta=beta,
        formats=formats, power_of_two=power_of_two, mid_power_of_two=mid_power_of_two, out=out,
        out_dtype=out_dtype, lora=lora, path=path, down=down, validate=validate, fused=fused,
        alignment=alignment, gemm=gemm,
    ).out  # fmt: skip


def run_stages(
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    experts: Experts,
    *,
    x_scale: Tensor | None = None,
    limit: float | Tensor | None = None,
    clamp: str = "before",
    alpha: float = 1.0,
    beta: float = 0.0,
    formats: LayerFormats | None = None,
    power_of_two: bool | None = None,
    mid_power_of_two: bool | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    lora: object | None = None,
    path: Path | str | None = None,
    down: Down | str = Down.ROUTE_MAJOR,
    validate: bool = False,
    fused: bool = True,
    alignment: int = ALIGNMENT,
    gemm: Gemm | str = Gemm.OURS,
) -> Trace:
    """Run the layer as :func:`run_moe` does and return every stage's tensors.

    Where the second GEMM's activations are sorted, ``mid_codes`` and ``mid_scales`` lie as in
    ``sorted_rows.SortedRows``; ``sorted_rows.in_pair_order`` puts them in the order of the others.
    The prefix-sum path returns a ``prefix_sum.PlacedTrace``, whose rows lie by expert;
    ``prefix_sum.in_pair_order`` does the same for it.
    """
    layout = word(Down, down, "run_moe: down")
    if layout is Down.SORTED and not fused:
        raise ParityError(
            "run_moe: sorted rows are quantized in the launch of SwiGLU: ask for fused=True, or "
            "for down='route_major'."
        )
    choice = plan(
        x, experts, x_scale=x_scale, limit=limit, alpha=alpha, beta=beta, out=out, lora=lora,
        path=path, fused=fused, alignment=alignment, gemm=gemm,
    )  # fmt: skip
    dispatch.log_once(choice)
    check_call(x, x_scale, ids, weights, experts, limit, clamp, out, out_dtype)
    held = scale_format.asked(formats, power_of_two, mid_power_of_two)
    if validate:
        register_experts(experts)
        if x_scale is not None:
            check_scales(
                x_scale, power_of_two=held.act.is_power_of_two, name="x_scale",
                because=f", the format of the layer's activations: {held.reason[:-1]}",
            )  # fmt: skip
    result = torch.empty(x.shape, dtype=out_dtype, device=x.device) if out is None else out
    how = Activation(
        clamp="none" if limit is None else clamp,
        limit=0.0 if limit is None or isinstance(limit, Tensor) else float(limit),
        limits=limit if isinstance(limit, Tensor) else None,
        alpha=number(alpha, "run_moe: alpha"),
        beta=number(beta, "run_moe: beta"),
    )
    return _layer(
        Work(
            choice=choice, x=x, x_scale=x_scale, ids=ids, weights=weights, experts=experts, how=how,
            power_of_two=held.act.is_power_of_two, mid_power_of_two=held.mid.is_power_of_two,
            down=layout, out=result, fused=fused, alignment=alignment,
            gemm=word(Gemm, gemm, "run_moe: gemm"),
        )
    )  # fmt: skip


def plan(
    x: Tensor,
    experts: Experts,
    *,
    x_scale: Tensor | None = None,
    limit: float | Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Tensor | None = None,
    lora: object | None = None,
    path: Path | str | None = None,
    fused: bool = True,
    alignment: int = ALIGNMENT,
    gemm: Gemm | str = Gemm.OURS,
) -> Choice:
    """Return the path that a call would take, and why; raises ParityError where there is none."""
    check_rank(x)
    request = Request(
        tokens=x.shape[0],
        dtype=x.dtype,
        activation="swiglu" if alpha == 1.0 and beta == 0.0 else "swiglu_alpha_beta",
        has_bias=experts.bias13 is not None or experts.bias2 is not None,
        has_lora=lora is not None,
        has_out=out is not None,
        has_tensor_clamp=isinstance(limit, Tensor),
        is_quantized=x_scale is not None,
        weights=(experts.w13.dtype, experts.w13_scale.dtype),
        hidden=experts.w13.shape[-1],
        width=experts.w2.shape[-1],
        experts=experts.count,
        alignment=alignment,
        gemm=word(Gemm, gemm, "run_moe: gemm"),
        fused=fused,
    )
    return dispatch.choose(request, path)


def _layer(work: Work) -> Trace:
    """Run the steps; a seam for tests that record what each path is handed."""
    ids, experts, pairs = work.ids, work.experts, work.ids.numel()
    codes, scales = work.x, work.x_scale
    if scales is None:
        codes, scales = quant.act_quant(work.x, scale="ue8m0" if work.power_of_two else "fp32")
    if work.choice.path is Path.PREFIX_SUM:
        return prefix_sum.run(
            codes, scales, ids, work.weights, experts, work.how, work.out, scale=_mid(work),
            alignment=work.alignment, gemm=work.gemm,
        )  # fmt: skip
    first, count = experts.first, experts.count
    aligned = steps.align(ids, first, count, BLOCK[work.choice.path])
    fc1 = steps.grouped_gemm(
        codes, scales, experts.w13, experts.w13_scale, aligned, pairs, ids.shape[1], experts.bias13
    )
    mid, mid_scales, fc2 = _down(work, fc1, aligned)
    steps.combine(fc2, work.weights, ids, first, count, work.out)
    return Trace(
        act_codes=codes, act_scales=scales, fc1=fc1, mid_codes=mid, mid_scales=mid_scales,
        fc2=fc2, out=work.out,
    )  # fmt: skip


def _down(work: Work, fc1: Tensor, aligned: steps.Alignment) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales of the activations, and the rows of FC2 of every pair."""
    ids, experts = work.ids, work.experts
    first, count, pairs = experts.first, experts.count, ids.numel()
    w2, w2_scale, bias2 = experts.w2, experts.w2_scale, experts.bias2
    if work.down is Down.SORTED and work.choice.path is Path.LARGE:
        rows = sorted_rows.swiglu_quant_sorted(fc1, aligned, work.how, work.mid_power_of_two)
        fc2 = sorted_rows.sorted_gemm(rows, w2, w2_scale, aligned, pairs, bias2)
        return rows.codes, rows.scales, fc2
    scale = _mid(work)
    if work.fused:
        mid, mid_scales = activation.swiglu_quant(fc1, ids, first, count, work.how, scale=scale)
    else:
        gated = activation.swiglu(fc1, ids, first, count, work.how)
        mid, mid_scales = activation.quant_rows(gated, ids, first, count, scale=scale)
    fc2 = steps.grouped_gemm(mid, mid_scales, w2, w2_scale, aligned, pairs, 1, bias2)
    return mid, mid_scales, fc2


def _mid(work: Work) -> ScaleFormat:
    """Return the format of the second quantization."""
    return ScaleFormat.UE8M0 if work.mid_power_of_two else ScaleFormat.FP32


def token_classes(topk: int) -> tuple[int, ...]:
    """Return numbers of tokens that between them meet every class of kernels.

    The classes are the powers of two of the rows that are quantized (up to 32), of the pairs that
    one program aligns (16 to 128), and the alignment of more pairs.
    """
    rows = {1, 2, 4, 8, 16, 32, 33}
    pairs = (16, 32, 64, steps.SMALL_PAIRS, steps.SMALL_PAIRS + 1)
    above = {-(-count // topk) for count in pairs}
    below = {count // topk for count in pairs if count >= topk}
    return tuple(sorted(rows | above | below))


def prewarm(
    experts: Experts,
    *,
    topk: int,
    tokens: Iterable[int] | None = None,
    formats: LayerFormats | None = None,
    power_of_two: bool | None = None,
    mid_power_of_two: bool | None = None,
    limit: float | None = None,
    clamp: str = "before",
    down: Down | str = Down.ROUTE_MAJOR,
    paths: Iterable[Path | str] = (Path.DECODE, Path.LARGE),
    alignment: int = ALIGNMENT,
    gemm: Gemm | str = Gemm.OURS,
) -> int:
    """Compile every kernel class of these paths on these weights' shapes; return the calls made.

    The prefix-sum path, which is taken where it is asked for, is warmed where it is named, with its
    alignment and GEMM.  Batch-dependent integers are not specialised, so a few sizes stand for all:
    :func:`token_classes`, unless ``tokens`` names others.  The scale formats are said as they are
    to :func:`run_moe`, since another format is another kernel.
    """
    hidden, calls = experts.w13.shape[2], 0
    ways = [word(Path, path, "prewarm: paths") for path in paths]
    for count in token_classes(topk) if tokens is None else tokens:
        x = torch.zeros((count, hidden), dtype=torch.bfloat16, device=experts.w13.device)
        ids = torch.full((count, topk), -1, dtype=torch.int32, device=x.device)
        weights = torch.ones((count, topk), dtype=torch.float32, device=x.device)
        for path in ways:
            own: dict[str, Any] = {}
            if path is Path.PREFIX_SUM:
                own = {"alignment": alignment, "gemm": gemm}
            run_moe(
                x, ids, weights, experts, limit=limit, clamp=clamp, formats=formats,
                power_of_two=power_of_two, mid_power_of_two=mid_power_of_two, path=path, down=down,
                **own,
            )  # fmt: skip
            calls += 1
    return calls
