"""The checks of a whole layer.

Each stage is judged on the kernel's own upstream tensors, so a difference is charged to the stage
where it starts; the output is judged once more against the reference from the beginning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_parity.harness.layer_inputs import LayerInputs, layer_inputs
from moe_parity.harness.verdict import Verdict
from moe_parity.kernels import Kernel
from moe_parity.kernels.layer_call import LayerCall
from moe_parity.references import layer as ref
from moe_parity.references import quant
from moe_parity.references.arithmetic.formats import canonical_nan, to_f32
from moe_parity.references.language import (
    Case,
    Check,
    QuantOutput,
    Recipe,
    Stage,
    Trace,
    neighbours,
)
from moe_parity.references.layer import Routed

StageFunction = Callable[[Recipe], dict[str, Tensor]]


def run_layer(kernel: Kernel, case: Case, inputs: LayerInputs) -> Trace:
    """Call a layer kernel on inputs that were made for the case."""
    call = LayerCall(case=case, batch=inputs.batch, experts=inputs.experts, asked=inputs.asked)
    handed = [t for t in vars(inputs.batch).values() if isinstance(t, Tensor)]
    before = [t.clone() for t in handed]
    with poisoned_empty():
        trace: Trace = kernel.run(call)
    if trace.out.is_cuda:
        torch.cuda.synchronize()
    if not all(torch.equal(_raw(t), _raw(kept)) for t, kept in zip(handed, before, strict=True)):
        raise RuntimeError(f"layer of {kernel.name} writes to its input.")
    return trace


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Fill what ``torch.empty`` returns with NaN, or the largest integer, for the time of a call.

    A row that a kernel forgets then shows, whatever the allocator's memory held before.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def check_layer(
    kernel: Kernel,
    case: Case,
    device: str,
    *,
    power: bool = False,
    inputs: LayerInputs | None = None,
    whole: bool = True,
) -> Iterator[Verdict]:
    """Yield the verdict of every stage, of the whole, and of a token's independence.

    ``power`` counts the outputs that a mutant of the stage's recipe would change.  Without
    ``whole`` the last two are left out: where every stage has the bits of the reference on the
    bits of the stage before, so has the whole.
    """
    inputs = inputs or layer_inputs(case, device)
    trace = run_layer(kernel, case, inputs)
    recipe = kernel.recipes(case, device)[0]
    for stage, got, function in stages(trace, inputs):
        mutants = mutants_of(stage, recipe)
        yield judge(kernel, stage, got, function, recipe, mutants, power=power)
    if whole:
        expected = ref.layer(inputs.batch, inputs.experts, recipe, inputs.asked)
        yield whole_layer(kernel, case, trace, expected, inputs, recipe)
        yield alone(kernel, case, trace, inputs)


def stages(
    trace: Trace, inputs: LayerInputs
) -> Iterator[tuple[Stage, dict[str, Tensor], StageFunction]]:
    """Yield (stage, what the kernel has, the reference on the kernel's own upstream tensors)."""
    batch, experts, asked = inputs.batch, inputs.experts, inputs.asked
    act = QuantOutput(codes=trace.act.codes, scales=trace.act.scales.contiguous())

    def act_quant(recipe: Recipe) -> dict[str, Tensor]:
        part = recipe.of(Stage.ACT_QUANT)
        return _quantized(quant.act_quant(batch.x, part, ue8m0=asked.ue8m0))

    def fc1(recipe: Recipe) -> dict[str, Tensor]:
        return {"rows": ref.fc1(act, batch, experts, recipe)}

    def swiglu_quant(recipe: Recipe) -> dict[str, Tensor]:
        return _quantized(ref.swiglu_quant(trace.fc1, batch, experts, recipe, asked))

    def fc2(recipe: Recipe) -> dict[str, Tensor]:
        return {"rows": ref.fc2(trace.mid, batch, experts, recipe)}

    def combine(recipe: Recipe) -> dict[str, Tensor]:
        return {"out": ref.combine(trace.fc2, batch, experts, recipe, asked)}

    yield Stage.ACT_QUANT, _quantized(act), act_quant
    yield Stage.FC1, {"rows": trace.fc1}, fc1
    yield Stage.SWIGLU_QUANT, _quantized(trace.mid), swiglu_quant
    yield Stage.FC2, {"rows": trace.fc2}, fc2
    yield Stage.COMBINE, {"out": trace.out}, combine


def _quantized(output: QuantOutput) -> dict[str, Tensor]:
    return {"codes": output.codes, "scales": output.scales}


def words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, every NaN the same (the rule of ``one_nan``)."""
    if tensor.dtype is torch.uint8:
        return torch.where((tensor & 0x7F) == 0x7F, 0x7F, tensor.int())
    if tensor.dtype is torch.int32:
        return tensor
    if tensor.dtype is torch.float32:
        return canonical_nan(tensor).view(torch.int32)
    bits = tensor.contiguous().view(torch.int16).int()
    return torch.where(torch.isnan(to_f32(tensor)), 0x7FFF, bits)


def mutants_of(stage: Stage, recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield (decision=option, recipe) for each decision that acts in a stage."""
    gemm, swiglu, combine = recipe.layer
    if stage in (Stage.ACT_QUANT, Stage.SWIGLU_QUANT):
        for decision, option, part in neighbours(recipe.of(stage)):
            changed = recipe.stages | {stage: part}
            yield f"{decision.name}={option}", dataclasses.replace(recipe, stages=changed)
    if stage in (Stage.FC1, Stage.FC2):
        for decision, option, gemm_part in neighbours(gemm):
            yield f"{decision.name}={option}", dataclasses.replace(recipe, gemm=gemm_part)
    if stage is Stage.SWIGLU_QUANT:
        for decision, option, swiglu_part in neighbours(swiglu):
            yield f"{decision.name}={option}", dataclasses.replace(recipe, swiglu=swiglu_part)
    if stage in (Stage.FC2, Stage.COMBINE):
        for decision, option, sum_part in neighbours(combine):
            if (stage is Stage.FC2) == (decision.name == "combine.weights_at"):
                yield f"{decision.name}={option}", dataclasses.replace(recipe, combine=sum_part)


def judge(
    kernel: Kernel,
    stage: Stage,
    got: dict[str, Tensor],
    function: StageFunction,
    recipe: Recipe,
    mutants: Iterable[tuple[str, Recipe]],
    *,
    power: bool,
) -> Verdict:
    """Compare one stage, name the diverging decision, or count what could have been red."""
    expected = function(recipe)
    wrong, message = _difference(got, expected)
    total = sum(tensor.numel() for tensor in got.values())
    verdict = Verdict(check=f"exact_{stage}", verdict="pass", recipe=recipe.name, compared=total)
    if wrong:
        matches = [n for n, r in mutants if not _difference(got, function(r))[0]]
        why = (
            f"The bits match with {' or '.join(matches)}."
            if matches
            else "No recipe with one decision changed has these bits."
        )
        text = (
            f"{stage} of {kernel.name} differs from recipe {recipe.name} {message}; {wrong} of "
            f"{total} outputs. {why}"
        )
        return dataclasses.replace(
            verdict, verdict="fail", differing=wrong, message=text, decision=" or ".join(matches)
        )
    if power:
        masks = {n: differs(function(r), expected) for n, r in mutants}
        told = {name: int(mask.sum()) for name, mask in masks.items() if bool(mask.any())}
        nearest = min(told, key=lambda name: told[name]) if told else ""
        return dataclasses.replace(
            verdict,
            could_show=int(torch.stack(list(masks.values())).any(0).sum()) if masks else total,
            nearest_mutant=nearest,
            mutant_distance=told.get(nearest),
        )
    return verdict


def differs(got: dict[str, Tensor], expected: dict[str, Tensor]) -> Tensor:
    """Return the mask of differing outputs, all tensors flattened into one."""
    masks = [words(got[name]) != words(want) for name, want in expected.items()]
    return torch.cat([mask.flatten() for mask in masks])


def _difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[int, str]:
    """Return how many outputs differ and the first one in words."""
    wrong, first = 0, ""
    for name, want in expected.items():
        left, right = words(got[name]), words(want)
        bad = left != right
        count = int(bad.sum())
        if count and not first:
            place = [int(n) for n in bad.nonzero()[0]]
            row, column = [0, *place][-2:]
            width = 2 * got[name].element_size()
            mask = (1 << (4 * width)) - 1
            seen, right_word = (int(t[tuple(place)]) & mask for t in (left, right))
            first = (
                f"at row {row}, column {column} of {name}: got 0x{seen:0{width}x}, expected "
                f"0x{right_word:0{width}x}"
            )
        wrong += count
    return wrong, first


def whole_layer(
    kernel: Kernel,
    case: Case,
    trace: Trace,
    expected: Trace,
    inputs: LayerInputs,
    recipe: Recipe,
) -> Verdict:
    """Compare the output with the reference from the first stage on."""
    wrong, message = _difference({"out": trace.out}, {"out": expected.out})
    text = (
        f"layer of {kernel.name} differs from recipe {recipe.name} {message}; {wrong} of "
        f"{trace.out.numel()} outputs."
    )
    return Verdict(
        check="exact_layer",
        verdict="fail" if wrong else "pass",
        recipe=recipe.name,
        compared=trace.out.numel(),
        differing=wrong,
        message=text if wrong else "",
        rel_err_bf16=_relative_error(case, trace, inputs, through_bf16=True),
        rel_err_f64=_relative_error(case, trace, inputs, through_bf16=False),
    )


def _relative_error(
    case: Case, trace: Trace, inputs: LayerInputs, *, through_bf16: bool
) -> float | None:
    """Return the L2 distance to the unquantized layer, relative; None where it means nothing."""
    if case.values.value != "normal" or case.m * case.i * case.h > 1 << 24:
        return None
    exact = ref.layer_float64(inputs.batch, inputs.experts, inputs.asked, through_bf16=through_bf16)
    norm = float(exact.norm())
    return float((trace.out.double() - exact).norm()) / norm if norm else None


def alone(kernel: Kernel, case: Case, trace: Trace, inputs: LayerInputs) -> Verdict:
    """Compare the first and the last token, each called alone, with their rows of the batch."""
    if case.m < 2:
        return Verdict(check=Check.ROW_SUBSET, verdict="skip", reason="one token has no batch")
    tokens = [0, case.m - 1]
    wrong, message = 0, ""
    for token in tokens:
        single = dataclasses.replace(inputs, batch=rows_of(inputs.batch, [token]))
        ran = run_layer(kernel, dataclasses.replace(case, m=1), single)
        count, first = _difference({"out": ran.out}, {"out": trace.out[token : token + 1]})
        if count and not wrong:
            message = f"layer of {kernel.name}: token {token} alone has other bits {first}."
        wrong += count
    return Verdict(
        check=Check.ROW_SUBSET,
        verdict="fail" if wrong else "pass",
        compared=len(tokens) * trace.out.shape[1],
        differing=wrong,
        message=message,
    )


def rows_of(batch: Routed, tokens: list[int]) -> Routed:
    """Return the batch of some tokens."""
    weights = None if batch.weights is None else batch.weights[tokens].contiguous()
    return Routed(x=batch.x[tokens], ids=batch.ids[tokens].contiguous(), weights=weights)
