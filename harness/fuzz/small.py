"""A drawn case that is red, made small within a test: few cases, the same reason."""

from __future__ import annotations

from moe_parity.harness.cases.budget import skip_of
from moe_parity.harness.checks.expect import repro
from moe_parity.harness.checks.flow import check
from moe_parity.harness.fuzz.reason import Failure, failures_of
from moe_parity.harness.fuzz.shrink import Shrinking
from moe_parity.harness.session.watch import current
from moe_parity.kernels import Kernel
from moe_parity.references.language import Case

BUDGET = 40
"""Cases that it may cost: seconds, where hypothesis would take minutes on the virtual GPU."""


def made_small(kernel: Kernel, case: Case, device: str, budget: int = BUDGET) -> Case:
    """Return the smallest case found that fails as this one does; itself where it passes now."""

    def judged(tried: Case) -> tuple[Failure, ...]:
        current().case(f"{kernel.name}-{tried.id}", repro(kernel, tried))
        red = [verdict for verdict in check(kernel, tried, device) if verdict.failed]
        return failures_of(kernel, tried, red)

    first = judged(case)
    if not first:
        return case
    shrinking = Shrinking(
        first[0], kernel.stage.sizes, judged,
        lambda tried: skip_of(kernel, tried, device) is None, budget=budget,
    )  # fmt: skip
    return shrinking.run().case
