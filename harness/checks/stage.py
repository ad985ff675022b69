"""The checks of a kernel of one middle stage: bits, write set, a second call, inputs kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from moe_parity.harness import stages
from moe_parity.harness.calling.poison import POISONS, Output, PoisonedAllocator
from moe_parity.harness.checks.layer import judge
from moe_parity.harness.checks.quant import other_order, raised
from moe_parity.harness.run import BadOutputError
from moe_parity.harness.verdict import Verdict
from moe_parity.kernels import Kernel
from moe_parity.kernels.stage_call import Fate, Produced, StageCall, StageInputs
from moe_parity.references.arithmetic.formats import row_major
from moe_parity.references.language import Case, Check, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """One call: its canonical tensors, its own outputs, and whether the inputs are as they were."""

    produced: Produced
    outputs: list[Output]
    input_kept: bool


def run_stage(kernel: Kernel, case: Case, inputs: StageInputs, poison: int = POISONS[0]) -> Ran:
    """Call a kernel of a middle stage; whatever it raises passes through.

    Raises BadOutputError, in a sentence, where it returns no ``Produced``.
    """
    handed = [t for t in vars(inputs).values() if isinstance(t, Tensor)]
    before = [t.clone() for t in handed]
    device = next(t.device for t in handed)
    new = PoisonedAllocator(device=str(device), poison=poison)
    produced = kernel.run(StageCall(case=case, stage=kernel.stage, inputs=inputs, new=new))
    if device.type == "cuda":
        torch.cuda.synchronize()
    if not isinstance(produced, Produced):
        raise BadOutputError(
            f"{kernel.name} returned {type(produced).__name__}, expected a Produced."
        )
    kept = all(torch.equal(_bytes(t), _bytes(b)) for t, b in zip(handed, before, strict=True))
    return Ran(produced=produced, outputs=new.outputs, input_kept=kept)


def check_stage(
    kernel: Kernel,
    case: Case,
    device: str,
    *,
    power: bool = False,
    inputs: StageInputs | None = None,
) -> Iterator[Verdict]:
    """Yield the verdict of every check; a kernel that raises has failed.

    ``power`` counts the outputs that a mutant of the recipe would change.
    """
    inputs = inputs or stages.stage_inputs(kernel.stage, case, device)
    try:
        ran = run_stage(kernel, case, inputs)
    except Exception as error:
        yield raised(kernel, case, error)
        return
    yield exact(kernel, case, inputs, ran, kernel.recipes(case, device), power=power)
    yield _verdict(Check.INPUT_KEPT, kernel, "" if ran.input_kept else "writes to its input", 1)
    with other_order(kernel, case, device):
        again = run_stage(kernel, case, inputs, poison=POISONS[1])
    yield write_set(kernel, ran, again)
    yield rerun(kernel, ran, again)


def exact(
    kernel: Kernel,
    case: Case,
    inputs: StageInputs,
    ran: Ran,
    recipes: tuple[Recipe, ...],
    *,
    power: bool,
) -> Verdict:
    """Compare with the nearest of the recipes that the kernel may follow."""
    got = {name: t.contiguous() for name, t in ran.produced.outputs.items()}

    def against(recipe: Recipe) -> Verdict:
        def function(changed: Recipe) -> dict[str, Tensor]:
            return stages.reference(kernel.stage, case, inputs, changed)

        expected = {name: (t.shape, t.dtype) for name, t in function(recipe).items()}
        found = {name: (t.shape, t.dtype) for name, t in got.items()}
        if found != expected:
            text = f"{kernel.stage} of {kernel.name} returned {found}, expected {expected}."
            return Verdict(check=Check.EXACT, verdict="fail", message=text, recipe=recipe.name)
        mutants = stages.mutants_of(kernel.stage, recipe)
        verdict = judge(kernel, kernel.stage, got, function, recipe, mutants, power=power)
        return dataclasses.replace(verdict, check=Check.EXACT)

    return min((against(r) for r in recipes), key=lambda v: (v.verdict == "fail", v.differing))


def write_set(kernel: Kernel, ran: Ran, again: Ran) -> Verdict:
    """Demand the declared fate of every row, and nothing beside the outputs."""
    for first, second in zip(ran.outputs, again.outputs, strict=True):
        for output, made in ((first, ran.produced), (second, again.produced)):
            fault = _fate_fault(output, made.fates.get(output.name))
            beside = output.trespass(kernel.contract.pads_zero)
            if beside is not None:
                fault = f"writes beside {output.name}, {beside} bytes from its start"
            if fault:
                return _verdict(Check.WRITE_SET, kernel, fault, first.storage.numel())
        left = _forgotten(first, second, ran.produced.fates.get(first.name))
        if left is not None:
            fault = f"leaves row {left} of {first.name} unwritten, which is live"
            return _verdict(Check.WRITE_SET, kernel, fault, first.storage.numel())
    return _verdict(Check.WRITE_SET, kernel, "", sum(o.storage.numel() for o in ran.outputs))


def _rows(output: Output, fates: Tensor | None) -> Tensor:
    """Return the bytes of an output, one line per fate: for a row, or for an element."""
    flat = row_major(output.view).contiguous().view(torch.uint8)
    each = fates is not None and fates.shape == output.view.shape
    width = 1 if each else output.view.shape[-1]
    return flat.reshape(-1, width * output.view.element_size()).cpu()


def _fate_fault(output: Output, fates: Tensor | None) -> str:
    if fates is None or not output.view.numel():
        return ""
    rows, fates = _rows(output, fates), fates.cpu().flatten()
    if fates.numel() != rows.shape[0]:
        return f"declares {fates.numel()} fates for {rows.shape[0]} rows of {output.name}"
    for fate, byte, words in (
        (Fate.UNTOUCHED, output.poison, "writes"),
        (Fate.ZERO, 0, "does not zero"),
    ):
        wrong = ((fates == fate)[:, None] & (rows != byte)).any(1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0, 0])
            return f"{words} row {row} of {output.name}, declared {fate.name.lower()}"
    return ""


def _forgotten(first: Output, second: Output, fates: Tensor | None) -> int | None:
    if not first.view.numel():
        return None
    one, two = (_rows(output, fates) for output in (first, second))
    left = ((one == first.poison) & (two == second.poison)).any(1)
    if fates is not None:
        left &= fates.cpu().flatten() == Fate.LIVE
    return int(left.nonzero()[0, 0]) if bool(left.any()) else None


def rerun(kernel: Kernel, ran: Ran, again: Ran) -> Verdict:
    """Demand the same canonical bits on other memory."""
    pairs = [(ran.produced.outputs[n], again.produced.outputs[n]) for n in ran.produced.outputs]
    wrong = sum(int((_bytes(a) != _bytes(b)).sum()) for a, b in pairs)
    fault = f"gives other bits a second time, {wrong} bytes" if wrong else ""
    return _verdict(Check.RERUN, kernel, fault, sum(a.numel() for a, _ in pairs))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor


def _verdict(check: Check, kernel: Kernel, fault: str, compared: int) -> Verdict:
    return Verdict(
        check=check,
        verdict="fail" if fault else "pass",
        message=f"{kernel.stage} of {kernel.name} {fault}." if fault else "",
        compared=compared,
        differing=int(bool(fault)),
    )
