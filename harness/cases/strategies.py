"""Hypothesis strategies: cases with their boundaries as well as their ranges.

Sizes and seeds are drawn, tensors never: a failure shrinks by its shape, and a smaller case keeps
the bits of its rows.
"""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from moe_parity.references.language import Case, Hazard, Routing, ScaleFormat, Values

EDGES = (0, 1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Row counts at the edges of tiles and of dispatch thresholds."""

SEEDS = st.integers(0, 2**32 - 1)


def rows() -> st.SearchStrategy[int]:
    """Draw a number of tokens, 0 to 129."""
    return st.one_of(st.sampled_from(EDGES), st.integers(0, 129))


def _values_and_hazard(draw: st.DrawFn, base: Case) -> Case:
    patterns = [Values.NORMAL, Values.WIDE, Values.AIMED, Values.SPECIAL]
    values = draw(st.sampled_from(patterns), label="values")
    hazard = draw(st.sampled_from(list(Hazard)), label="hazard")
    seed = draw(SEEDS, label="seed")
    return dataclasses.replace(base, values=values, hazard=hazard, seed=seed)


@st.composite
def weights(draw: st.DrawFn, base: Case) -> Case:
    """Draw sizes, values, hazard and seed of a weight around the format and type of ``base``."""
    case = _values_and_hazard(draw, base)
    sizes = st.one_of(st.sampled_from((1, 127, 128, 129, 256)), st.integers(1, 300))
    return dataclasses.replace(case, i=draw(sizes, label="n"), h=draw(sizes, label="k"))


@st.composite
def activations(draw: st.DrawFn, base: Case) -> Case:
    """Draw the same of activations, and their groups."""
    case = _values_and_hazard(draw, base)
    group = draw(st.sampled_from((64, 128)), label="group")
    # Whole words of packed exponents as often as not, since some kernels take no others.
    few = st.one_of(st.integers(1, 6), st.sampled_from((4, 8)))
    groups = draw(few if base.scale.is_packed else st.integers(1, 5))
    return dataclasses.replace(case, m=draw(rows(), label="m"), h=group * groups, group=group)


@st.composite
def layers(draw: st.DrawFn) -> Case:
    """Draw a small layer: sizes, ranks, routing, formats of both quantizations, a limit."""
    ranks = draw(st.sampled_from([1, 2, 4]), label="ranks")
    e = ranks * draw(st.integers(1, 6), label="experts per rank")
    forms = st.sampled_from((ScaleFormat.FP32, ScaleFormat.UE8M0))
    return Case(
        m=draw(st.one_of(st.sampled_from([0, 1, 2, 17]), st.integers(0, 6)), label="m"),
        e=e,
        k=draw(st.integers(1, min(4, e)), label="k"),
        h=128 * draw(st.integers(1, 2), label="h"),
        i=128 * draw(st.integers(1, 2), label="i"),
        scale=draw(forms, label="scale"),
        mid_scale=draw(forms, label="mid scale"),
        clamp=draw(st.sampled_from([None, 1.0, 9.97]), label="clamp"),
        ep_size=ranks,
        ep_rank=draw(st.integers(0, ranks - 1), label="rank"),
        routing=draw(st.sampled_from(list(Routing)), label="routing"),
        values=draw(st.sampled_from([Values.NORMAL, Values.AIMED]), label="values"),
        seed=draw(SEEDS, label="seed"),
    )


@st.composite
def routings(draw: st.DrawFn) -> Case:
    """Draw a batch for the alignment: any number of pairs, ranks and ids that are nobody's."""
    ranks = draw(st.sampled_from([1, 2, 4]), label="ranks")
    return Case(
        m=draw(st.integers(0, 40), label="m"),
        e=ranks * draw(st.integers(1, 40), label="experts per rank"),
        k=draw(st.sampled_from([1, 2, 6, 8, 9]), label="k"),
        ep_size=ranks,
        ep_rank=draw(st.integers(0, ranks - 1), label="rank"),
        routing=draw(st.sampled_from(list(Routing)), label="routing"),
        seed=draw(SEEDS, label="seed"),
    )
