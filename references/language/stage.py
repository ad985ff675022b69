"""The stages of a block-FP8 MoE layer, in the order in which the data passes them."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """One step of the layer."""

    WEIGHT_QUANT = "weight_quant"
    ACT_QUANT = "act_quant"
    ALIGN = "align"
    PERMUTE = "permute"
    FC1 = "fc1"
    SWIGLU = "swiglu"
    """SwiGLU alone, where a project quantizes in another kernel."""
    SWIGLU_QUANT = "swiglu_quant"
    FC2 = "fc2"
    COMBINE = "combine"
    LAYER = "layer"
    """All of them: the layer as a whole."""

    def __repr__(self) -> str:
        """Return source text, so that a printed case can be pasted."""
        return f"{type(self).__name__}.{self.name}"
