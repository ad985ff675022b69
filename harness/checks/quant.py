"""The checks of a quantization kernel.

Every check but the refusals starts from the same call; each returns one verdict.  Zero tolerance:
the recipe is known, so every bit is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from moe_parity.harness.compare import Comparison, compare
from moe_parity.harness.identify import identify, power_on
from moe_parity.harness.memory import POISONS, unwritten
from moe_parity.harness.run import Ran, make_input, reference, run
from moe_parity.harness.verdict import Verdict
from moe_parity.kernels import Kernel
from moe_parity.references.formats import e4m3_decode
from moe_parity.references.spec import Case, Check, Hazard, QuantOutput, Recipe, Stage, Values

MEASURE_BELOW = 1 << 23
"""Outputs up to which the power of the inputs is measured against every mutant."""


def check_quant(kernel: Kernel, case: Case, device: str, *, power: bool = False) -> Iterator[Verdict]:  # fmt: skip  # noqa: E501
    """Yield the verdict of every check in the kernel's contract.

    ``power`` measures how many outputs could have been red, at the cost of one reference run per
    mutant.  What the kernel raises passes through, except where the contract lets it refuse a
    hazard.
    """
    x = make_input(kernel, case, device)
    checks = kernel.contract.checks
    try:
        ran = run(kernel, case, x)
    except ValueError as refusal:
        if case.hazard is Hazard.NONE:
            raise
        yield Verdict(check=Check.EXACT, verdict="skip", reason=f"refused: {refusal}")
        return
    recipes = kernel.recipes(case, device)
    yield exact(kernel, case, x, ran, recipes, power=power)
    if Check.FINITE in checks:
        yield finite(kernel, case, x, ran, recipes)
    if Check.WRITE_SET in checks:
        yield write_set(kernel, case, x, ran)
    if Check.RERUN in checks:
        yield same(Check.RERUN, kernel, ran.result, run(kernel, case, x).result)
    if Check.ROW_SUBSET in checks:
        yield row_subset(kernel, case, x, ran)


def exact(kernel: Kernel, case: Case, x: Tensor, ran: Ran, recipes: tuple[Recipe, ...], *, power: bool) -> Verdict:  # fmt: skip  # noqa: E501
    """Compare with each recipe the kernel may follow; the nearest one speaks."""
    tried = []
    for recipe in recipes:
        expected = reference(kernel.stage, case, x, recipe.of(kernel.stage))
        tried.append((compare(ran.result, expected, kernel.stage), recipe, expected))
    nearest, recipe, expected = min(tried, key=lambda entry: entry[0].differing)
    verdict = Verdict(
        check=Check.EXACT,
        verdict="pass" if nearest.equal else "fail",
        recipe=recipe.name,
        compared=nearest.compared,
        differing=nearest.differing,
        code_flips=nearest.codes,
        max_ulp=nearest.max_ulp,
        rel_err_f64=_relative_error(case, x, ran.result, kernel.stage),
    )
    if not nearest.equal:
        return _failed(verdict, kernel, case, x, ran, recipe, nearest)
    if power and nearest.compared <= MEASURE_BELOW:
        told = power_on(kernel.stage, case, x, recipe.of(kernel.stage), expected)
        verdict = dataclasses.replace(
            verdict,
            could_show=told.could_show,
            nearest_mutant=told.nearest,
            mutant_distance=told.distance,
        )
    return verdict


def _failed(verdict: Verdict, kernel: Kernel, case: Case, x: Tensor, ran: Ran, recipe: Recipe, found: Comparison) -> Verdict:  # fmt: skip  # noqa: E501
    matches = identify(kernel.stage, case, x, ran.result, recipe.of(kernel.stage))
    if matches:
        why = f"The bits match with {' or '.join(matches)}."
    else:
        why = "No recipe with one decision changed has these bits."
    message = (
        f"{kernel.stage} of {kernel.name} differs from recipe {recipe.name} {found.first}; "
        f"{found.codes} of {ran.result.codes.numel()} codes (at most {found.max_code_step} steps), "
        f"{found.scales} of {ran.result.scales.numel()} scales (at most {found.max_ulp} ulp). {why}"
    )
    return dataclasses.replace(verdict, message=message, decision=" or ".join(matches))


def finite(kernel: Kernel, case: Case, x: Tensor, ran: Ran, recipes: tuple[Recipe, ...]) -> Verdict:
    """Every output is finite where the reference is."""
    expected = reference(kernel.stage, case, x, recipes[0].of(kernel.stage))
    bad = torch.isnan(e4m3_decode(ran.result.codes)) & ~torch.isnan(e4m3_decode(expected.codes))
    bad_scale = ~torch.isfinite(ran.result.scales) & torch.isfinite(expected.scales)
    count = int(bad.sum()) + int(bad_scale.sum())
    message = ""
    if count:
        where = "code" if bool(bad.any()) else "scale"
        row, column = (int(n) for n in (bad if bool(bad.any()) else bad_scale).nonzero()[0])
        message = (
            f"{kernel.stage} of {kernel.name} is not finite at row {row}, {where} {column}, where "
            f"recipe {recipes[0].name} is; {count} outputs in all."
        )
    return Verdict(
        check=Check.FINITE,
        verdict="fail" if count else "pass",
        message=message,
        recipe=recipes[0].name,
        compared=bad.numel() + bad_scale.numel(),
        differing=count,
    )


def write_set(kernel: Kernel, case: Case, x: Tensor, ran: Ran) -> Verdict:
    """All of every output is written, and nothing beside it: guards, stride gaps, padding."""
    if not ran.outputs:
        return Verdict(
            check=Check.WRITE_SET, verdict="skip", reason="the kernel allocates its own outputs"
        )
    again = run(kernel, case, x, poison=POISONS[1])
    for first, second in zip(ran.outputs, again.outputs, strict=True):
        left = unwritten(first, second)
        if left is not None:
            return _wrote(kernel, f"leaves {first.name}{list(left)} unwritten", ran)
        for output in (first, second):
            beside = output.trespass(kernel.contract.pads_zero)
            if beside is not None:
                return _wrote(
                    kernel, f"writes beside {first.name}, {beside} bytes from its start", ran
                )
    return _wrote(kernel, "", ran)


def _wrote(kernel: Kernel, fault: str, ran: Ran) -> Verdict:
    return Verdict(
        check=Check.WRITE_SET,
        verdict="fail" if fault else "pass",
        message=f"{kernel.stage} of {kernel.name} {fault}." if fault else "",
        compared=sum(output.storage.numel() for output in ran.outputs),
        differing=int(bool(fault)),
    )


def same(check: Check, kernel: Kernel, first: QuantOutput, second: QuantOutput) -> Verdict:
    """Two results have the same bits."""
    found = compare(second, first, kernel.stage)
    how = "a second call gives" if check is Check.RERUN else "the rows alone give"
    message = f"{kernel.stage} of {kernel.name}: {how} other bits {found.first}."
    return Verdict(
        check=check,
        verdict="pass" if found.equal else "fail",
        message="" if found.equal else message,
        compared=found.compared,
        differing=found.differing,
        code_flips=found.codes,
        max_ulp=found.max_ulp,
    )


def row_subset(kernel: Kernel, case: Case, x: Tensor, ran: Ran) -> Verdict:
    """Every second row, called alone, keeps its bits (rows of tiles for weights)."""
    step = 128 if kernel.stage is Stage.WEIGHT_QUANT else 1
    chosen = torch.arange(x.shape[0]).div(step, rounding_mode="floor") % 2 == 1
    if not bool(chosen.any()):
        reason = f"{x.shape[0]} rows have no proper subset"
        return Verdict(check=Check.ROW_SUBSET, verdict="skip", reason=reason)
    part = x[chosen.to(x.device)]
    alone = run(kernel, _resized(case, kernel.stage, part.shape[0]), part).result
    scales = ran.result.scales[chosen[::step]] if step > 1 else ran.result.scales[chosen]
    kept = QuantOutput(codes=ran.result.codes[chosen], scales=scales)
    return same(Check.ROW_SUBSET, kernel, kept, alone)


def _resized(case: Case, stage: Stage, rows: int) -> Case:
    if stage is Stage.WEIGHT_QUANT:
        return dataclasses.replace(case, i=rows)
    return dataclasses.replace(case, m=rows)


def _relative_error(case: Case, x: Tensor, result: QuantOutput, stage: Stage) -> float | None:
    """Return the L2 error of decode(q) * s against x, relative, in float64; finite cases only."""
    if case.values not in (Values.NORMAL, Values.WIDE) or not x.numel():
        return None
    group = 128 if stage is Stage.WEIGHT_QUANT else case.group
    wide = result.scales.double().repeat_interleave(group, 1)[:, : x.shape[1]]
    if stage is Stage.WEIGHT_QUANT:
        wide = wide.repeat_interleave(group, 0)[: x.shape[0]]
    exact_x = x.cpu().double()
    error = (e4m3_decode(result.codes).double() * wide - exact_x).norm()
    return float(error / exact_x.norm())
