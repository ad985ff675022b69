"""Stand-in for cases(kernel, device)."""

from __future__ import annotations

from hypothesis import strategies as st

from moe_parity.harness.cases.budget import skip_of
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case, Hazard, Routing, ScaleFormat, Values


@st.composite
def _any(draw: st.DrawFn, kernel: Kernel) -> Case:
    reads = kernel.stage.reads
    ranks = draw(st.sampled_from([1, 1, 2, 4])) if "ep_size" in reads else 1
    e = ranks * draw(st.integers(1, 12)) if "e" in reads else 1

    def word(name, options, default):
        allowed = reads.get(name, ()) if name in reads else ()
        options = [o for o in options if allowed is None or o in allowed]
        return draw(st.sampled_from(options)) if options else default

    return Case(
        m=draw(st.one_of(st.sampled_from([0, 1, 2, 17, 33]), st.integers(0, 40)))
        if "m" in reads
        else 1,
        e=e,
        k=draw(st.integers(1, min(8, e))) if "k" in reads else 1,
        h=128 * draw(st.integers(1, 6)) if "h" in reads else 128,
        i=128 * draw(st.integers(1, 6)) if "i" in reads else 128,
        ep_size=ranks,
        ep_rank=draw(st.integers(0, ranks - 1)),
        scale=word("scale", list(ScaleFormat), ScaleFormat.FP32),
        clamp=draw(st.sampled_from([None, 1.0, 9.97])) if "clamp" in reads else None,
        routing=word("routing", list(Routing), Routing.UNIFORM),
        values=word(
            "values", [Values.NORMAL, Values.WIDE, Values.AIMED, Values.SPECIAL], Values.NORMAL
        ),
        hazard=word("hazard", list(Hazard), Hazard.NONE),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def cases(kernel: Kernel, device: str) -> st.SearchStrategy[Case]:
    return _any(kernel).filter(lambda case: skip_of(kernel, case, device) is None)
