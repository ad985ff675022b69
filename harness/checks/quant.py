"""The checks of a quantization kernel.

Every check but the refusals starts from the same call; each returns one verdict.  Zero tolerance:
the recipe is known, so every bit is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from moe_parity.harness.calling.poison import POISONS, unwritten
from moe_parity.harness.compare import Comparison, compare
from moe_parity.harness.identify import identify, identify_apart, power_on
from moe_parity.harness.run import BadOutputError, Ran, make_input, reference, run
from moe_parity.harness.verdict import Verdict
from moe_parity.kernels import Kernel, KernelError
from moe_parity.references.arithmetic.formats import e4m3_decode
from moe_parity.references.language import Case, Check, Hazard, QuantOutput, Recipe, Stage, Values

MEASURE_BELOW = 1 << 23
"""Outputs up to which the power of the inputs is measured against every mutant."""


REFUSALS = (KernelError, RuntimeError)
"""What a kernel may raise to refuse input that is not contiguous; torch ops raise the second."""


def check_quant(
    kernel: Kernel, case: Case, device: str, *, power: bool = False
) -> Iterator[Verdict]:
    """Yield the verdict of every check in the kernel's contract.

    ``power`` measures how many outputs could have been red, at the cost of one reference run per
    mutant.  A kernel that raises has failed; it may refuse input that is not contiguous, by an
    error that says so.
    """
    x = make_input(kernel, case, device)
    try:
        ran = run(kernel, case, x)
    except REFUSALS as refusal:
        about_layout = any(word in str(refusal) for word in ("contiguous", "stride"))
        if case.hazard is Hazard.NONE or not about_layout:
            yield raised(kernel, case, refusal)
        else:
            text = str(refusal).splitlines()[0]
            yield Verdict(check=Check.EXACT, verdict="skip", reason=f"refused: {text}")
        return
    except Exception as error:
        yield raised(kernel, case, error)
        return
    yield from _checks(kernel, case, x, ran, power=power, device=device)


def raised(kernel: Kernel, case: Case, error: Exception) -> Verdict:
    """Return the red verdict of a kernel that raised."""
    text = (str(error).splitlines() or [""])[0]
    what = text if isinstance(error, BadOutputError) else f"{type(error).__name__}: {text}"
    message = f"{kernel.stage} of {kernel.name} fails on {case.id}: {what}"
    return Verdict(check=Check.EXACT, verdict="fail", message=message)


def _checks(
    kernel: Kernel, case: Case, x: Tensor, ran: Ran, *, power: bool, device: str
) -> Iterator[Verdict]:
    checks = kernel.contract.checks
    recipe, expected, found = _nearest(kernel, case, x, ran, kernel.recipes(case, device))
    yield exact(kernel, case, x, ran, recipe, expected, found, power=power)
    if Check.INPUT_KEPT in checks:
        yield input_kept(kernel, x, ran)
    if Check.FINITE in checks:
        yield finite(kernel, ran, recipe, expected)
    if checks & {Check.WRITE_SET, Check.RERUN}:
        # A second call, on other memory; on the virtual GPU also in another order of programs.
        with other_order(kernel, case, device):
            again = run(kernel, case, x, poison=POISONS[1])
        if Check.WRITE_SET in checks:
            yield write_set(kernel, ran, again)
        if Check.RERUN in checks:
            yield same(Check.RERUN, kernel, ran.result, again.result)
    if Check.ROW_SUBSET in checks:
        yield row_subset(kernel, case, x, ran)


def other_order(kernel: Kernel, case: Case, device: str) -> AbstractContextManager[object]:
    """Return a context in which the virtual GPU runs programs in another order."""
    if kernel.runs_on(device) != "virtual_gpu":
        return nullcontext()
    from moe_parity.kernels.virtual_gpu import shuffled

    return shuffled(case.seed + 1)


def _nearest(
    kernel: Kernel, case: Case, x: Tensor, ran: Ran, recipes: tuple[Recipe, ...]
) -> tuple[Recipe, QuantOutput, Comparison]:
    """Return the recipe whose bits are nearest, of those the kernel may follow."""
    tried = []
    for recipe in recipes:
        expected = reference(kernel.stage, case, x, recipe.of(kernel.stage))
        tried.append((recipe, expected, compare(ran.result, expected, kernel.stage)))
    return min(tried, key=lambda entry: entry[2].differing)


def input_kept(kernel: Kernel, x: Tensor, ran: Ran) -> Verdict:
    """Demand that the input's storage is as it was."""
    message = "" if ran.input_kept else f"{kernel.stage} of {kernel.name} writes to its input."
    return Verdict(
        check=Check.INPUT_KEPT,
        verdict="pass" if ran.input_kept else "fail",
        message=message,
        compared=x.numel(),
        differing=int(not ran.input_kept),
    )


def exact(
    kernel: Kernel,
    case: Case,
    x: Tensor,
    ran: Ran,
    recipe: Recipe,
    expected: QuantOutput,
    found: Comparison,
    *,
    power: bool,
) -> Verdict:
    """Every bit is the recipe's; else the decision that differs is looked for."""
    verdict = Verdict(
        check=Check.EXACT,
        verdict="pass" if found.equal else "fail",
        recipe=recipe.name,
        compared=found.compared,
        differing=found.differing,
        code_flips=found.codes,
        max_ulp=found.max_ulp,
        rel_err_f64=_relative_error(case, x, ran.result, kernel.stage),
    )
    if not found.equal:
        return _failed(verdict, kernel, case, x, ran, recipe, found)
    if power and found.compared <= MEASURE_BELOW:
        told = power_on(kernel.stage, case, x, recipe.of(kernel.stage), expected)
        verdict = dataclasses.replace(
            verdict,
            could_show=told.could_show,
            nearest_mutant=told.nearest,
            mutant_distance=told.distance,
        )
    return verdict


def _failed(
    verdict: Verdict,
    kernel: Kernel,
    case: Case,
    x: Tensor,
    ran: Ran,
    recipe: Recipe,
    found: Comparison,
) -> Verdict:
    matches = identify(kernel.stage, case, x, ran.result, recipe.of(kernel.stage))
    if matches:
        why = f"The bits match with {' or '.join(matches)}."
    else:
        apart = identify_apart(kernel.stage, case, x, ran.result, recipe.of(kernel.stage))
        why = "No recipe with one decision changed has these bits"
        why += f": {apart}." if apart else "."
    message = (
        f"{kernel.stage} of {kernel.name} differs from recipe {recipe.name} {found.first}; "
        f"{found.codes} of {ran.result.codes.numel()} codes (at most {found.max_code_step} steps), "
        f"{found.scales} of {ran.result.scales.numel()} scales (at most {found.max_ulp} ulp). {why}"
    )
    return dataclasses.replace(verdict, message=message, decision=" or ".join(matches))


def finite(kernel: Kernel, ran: Ran, recipe: Recipe, expected: QuantOutput) -> Verdict:
    """Every output is finite where the reference is."""
    bad = torch.isnan(e4m3_decode(ran.result.codes)) & ~torch.isnan(e4m3_decode(expected.codes))
    bad_scale = ~torch.isfinite(ran.result.scales) & torch.isfinite(expected.scales)
    count = int(bad.sum()) + int(bad_scale.sum())
    message = ""
    if count:
        where = "code" if bool(bad.any()) else "scale"
        row, column = (int(n) for n in (bad if bool(bad.any()) else bad_scale).nonzero()[0])
        message = (
            f"{kernel.stage} of {kernel.name} is not finite at row {row}, {where} {column}, where "
            f"recipe {recipe.name} is; {count} outputs in all."
        )
    return Verdict(
        check=Check.FINITE,
        verdict="fail" if count else "pass",
        message=message,
        recipe=recipe.name,
        compared=bad.numel() + bad_scale.numel(),
        differing=count,
    )


def write_set(kernel: Kernel, ran: Ran, again: Ran) -> Verdict:
    """All of every output is written, and nothing beside it: guards, stride gaps, padding."""
    if not ran.outputs:
        return Verdict(
            check=Check.WRITE_SET, verdict="skip", reason="the kernel allocates its own outputs"
        )
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
    how = "a second call, on other memory, gives" if check is Check.RERUN else "the rows alone give"
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
