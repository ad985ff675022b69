"""Hypothesis strategies: cases with their boundaries as well as their ranges.

Sizes and seeds are drawn, tensors never: a failure shrinks by its shape, and a smaller case keeps
the bits of its rows.
"""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from moe_parity.references.language import Case, Hazard, ScaleFormat, Stage, Values

EDGES = (0, 1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Row counts at the edges of tiles and of dispatch thresholds."""


def rows() -> st.SearchStrategy[int]:
    """Draw a number of tokens, 0 to 129."""
    return st.one_of(st.sampled_from(EDGES), st.integers(0, 129))


@st.composite
def quant_cases(draw: st.DrawFn, base: Case, stage: Stage) -> Case:
    """Draw sizes, values, hazard and seed around the fixed format, layout and type of ``base``."""
    patterns = [Values.NORMAL, Values.WIDE, Values.AIMED, Values.SPECIAL]
    values = draw(st.sampled_from(patterns), label="values")
    hazard = draw(st.sampled_from(list(Hazard)), label="hazard")
    seed = draw(st.integers(0, 2**32 - 1), label="seed")
    case = dataclasses.replace(base, values=values, hazard=hazard, seed=seed)
    if stage is Stage.WEIGHT_QUANT:
        sizes = st.one_of(st.sampled_from((1, 127, 128, 129, 256)), st.integers(1, 300))
        return dataclasses.replace(case, i=draw(sizes, label="n"), h=draw(sizes, label="k"))
    group = draw(st.sampled_from((64, 128)), label="group")
    # Whole words of packed exponents as often as not, since some kernels take no others.
    few = st.one_of(st.integers(1, 6), st.sampled_from((4, 8)))
    groups = draw(few if base.scale is ScaleFormat.UE8M0_PACKED else st.integers(1, 5))
    return dataclasses.replace(case, m=draw(rows(), label="m"), h=group * groups, group=group)
