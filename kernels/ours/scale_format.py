"""The scale format of a layer: that of each of its two quantizations, from one pure function.

DeepGEMM reads powers of two; Triton experts read any scale, and rounding theirs up to a power of
two would add error and buy nothing.  So the format belongs to the layer, not to the process: what
holds for a whole process is only a default for layers of which nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from moe_parity.kernels.ours.arguments import word
from moe_parity.references.arithmetic.formats import ScaleFormat
from moe_parity.references.errors import ParityError

DEFAULT = "MOE_PARITY_UE8M0"
"""Environment variable, read once: 1 makes powers of two the global default, which is fp32."""

SCALE_FMT = "scale_fmt"
"""The word of a checkpoint's quantization config."""

FORMATS = (ScaleFormat.FP32, ScaleFormat.UE8M0)
"""What a layer's scales may be; packed exponents are a layout of one kernel, not of a layer."""


class Backend(StrEnum):
    """Whose kernels compute a layer's experts."""

    TRITON = "triton"
    BATCHED_TRITON = "batched_triton"
    DEEP_GEMM = "deep_gemm"
    BATCHED_DEEP_GEMM = "batched_deep_gemm"

    @property
    def scale(self) -> ScaleFormat:
        """The format that its GEMMs are served with."""
        powers = self in (Backend.DEEP_GEMM, Backend.BATCHED_DEEP_GEMM)
        return ScaleFormat.UE8M0 if powers else ScaleFormat.FP32


@dataclass(frozen=True, kw_only=True)
class LayerFormats:
    """The formats of a layer's two quantizations, fp32 or ue8m0.

    Two of them are equal where the formats are, whatever the reasons.  Raises ParityError for
    another format.
    """

    act: ScaleFormat
    """Of the activations, in front of FC1."""
    mid: ScaleFormat
    """Of SwiGLU's output, in front of FC2."""
    reason: str = field(default="both formats are set.", compare=False)
    """Why, one sentence."""

    def __post_init__(self) -> None:
        """Take words for formats, and refuse what no layer has."""
        for name in ("act", "mid"):
            object.__setattr__(self, name, _format(getattr(self, name), f"scale format: {name}"))


def resolve(
    backend: Backend | str | None = None,
    checkpoint: Mapping[str, object] | None = None,
    default: ScaleFormat | str | None = None,
    *,
    layer: ScaleFormat | str | None = None,
    act: ScaleFormat | str | None = None,
    mid: ScaleFormat | str | None = None,
    arriving: ScaleFormat | str | None = None,
) -> LayerFormats:
    """Return the formats of a layer's two quantizations, and why.

    The first that says something decides, for each of the two on its own: ``act`` or ``mid``, set
    for it alone; ``layer``, set for both; the checkpoint's quantization config (``scale_fmt`` in
    the ``quantization_config`` of its config.json); the backend; the global default, ``default``
    or else :func:`default_format`.  ``arriving`` is the format of activations that were quantized
    before they were dispatched: powers of two are taken by a layer with fp32 scales, which the
    reason then says.  Raises ParityError for an unknown word, and for fp32 scales that arrive at a
    layer of powers of two.
    """
    kernels = None if backend is None else word(Backend, backend, "scale format: backend")
    if says_ue8m0(checkpoint):
        found, why = ScaleFormat.UE8M0, "the checkpoint says scale_fmt ue8m0"
    elif kernels is not None:
        found = kernels.scale
        why = f"the {kernels} backend reads {_words(found)}"
    else:
        found = default_format() if default is None else _format(default, "scale format: default")
        why = f"nothing else says it, and the global default is {found}"
    if layer is not None:
        found = _format(layer, "scale format: layer")
        why = f"the layer is set to {found}"
    first, because = found, why
    if act is not None:
        first = _format(act, "scale format: act")
        because = f"act is set to {first}"
    if mid is not None:
        found = _format(mid, "scale format: mid")
        why = f"mid is set to {found}"
    reason = why if why == because else f"{because}; of mid, {why}"
    if arriving is not None:
        reason += _arrival(_format(arriving, "scale format: arriving"), first)
    return LayerFormats(act=first, mid=found, reason=f"{reason}.")


def asked(
    formats: LayerFormats | None, power_of_two: bool | None, mid_power_of_two: bool | None
) -> LayerFormats:
    """Return the formats of a call: those of its layer, or what two flags say of them.

    ``power_of_two`` sets both quantizations, ``mid_power_of_two`` the second one; None leaves a
    format to the global default.  Raises ParityError where a call has both sorts of arguments.
    """
    if formats is None:
        return resolve(layer=_flag(power_of_two), mid=_flag(mid_power_of_two))
    if not isinstance(formats, LayerFormats):
        raise ParityError(f"run_moe: formats must be LayerFormats, got {formats!r}.")
    if power_of_two is not None or mid_power_of_two is not None:
        raise ParityError(
            "run_moe: formats says both scale formats; leave out power_of_two and mid_power_of_two."
        )
    return formats


@lru_cache(maxsize=1)
def default_format() -> ScaleFormat:
    """Return the format of layers of which nothing is known; the environment is read once."""
    value = os.environ.get(DEFAULT, "0")
    if value not in ("0", "1"):
        raise ParityError(f"{DEFAULT} must be 0 or 1, got {value!r}.")
    return ScaleFormat.UE8M0 if value == "1" else ScaleFormat.FP32


def says_ue8m0(checkpoint: Mapping[str, object] | None) -> bool:
    """Whether a checkpoint's quantization config asks for powers of two.

    Raises ParityError for another word than ue8m0, and for what is no quantization config: in a
    whole config.json the word would be overlooked.
    """
    if checkpoint is None:
        return False
    if not isinstance(checkpoint, Mapping):
        raise ParityError(f"checkpoint must be a quantization config, got {checkpoint!r}.")
    if "quantization_config" in checkpoint:
        raise ParityError("checkpoint is a whole config: pass its 'quantization_config' alone.")
    said = checkpoint.get(SCALE_FMT)
    if said is not None and said != ScaleFormat.UE8M0:
        raise ParityError(f"checkpoint: scale_fmt must be 'ue8m0' or left out, got {said!r}.")
    return said is not None


def _format(value: object, what: str) -> ScaleFormat:
    for form in FORMATS:
        if value == form:
            return form
    known = ", ".join(repr(str(form)) for form in FORMATS)
    raise ParityError(f"{what} must be one of {known}, got {value!r}.")


def _flag(power_of_two: bool | None) -> ScaleFormat | None:
    if power_of_two is None:
        return None
    return ScaleFormat.UE8M0 if power_of_two else ScaleFormat.FP32


def _words(form: ScaleFormat) -> str:
    return "powers of two" if form.is_power_of_two else "fp32 scales"


def _arrival(arriving: ScaleFormat, act: ScaleFormat) -> str:
    """Return what a reason says of scales that arrive."""
    if arriving is act:
        return "; the activations arrive quantized so"
    if act.is_power_of_two:
        raise ParityError(
            "scale format: activations arrive with fp32 scales at a layer of powers of two; "
            "quantize them in the format that the layer resolved, ue8m0."
        )
    return "; the activations arrive with powers of two, which are taken as they are"
