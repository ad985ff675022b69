"""Run a kernel on a case: poisoned outputs in, canonical outputs out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.harness.calling.poison import POISONS, Output, PoisonedAllocator
from moe_parity.harness.inputs import quant_input
from moe_parity.kernels import Call, Kernel
from moe_parity.kernels.call import scale_strides
from moe_parity.references import quant
from moe_parity.references.arithmetic.formats import (
    E4M3_NAN,
    bits_of,
    canonical_nan,
    ue8m0_decode,
    unpack_ue8m0,
)
from moe_parity.references.language import Case, QuantOutput, QuantRecipe, ScaleFormat, Stage


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One call: its canonical result and the outputs it was given."""

    result: QuantOutput
    outputs: list[Output]
    input_kept: bool
    """Whether the input's whole storage is as it was; it is put back where not."""


class BadOutputError(ValueError):
    """A kernel returned something that its stage does not have; the text is a sentence."""


def run(kernel: Kernel, case: Case, x: Tensor, poison: int = POISONS[0]) -> Ran:
    """Call the kernel on ``x`` and return canonical CPU tensors.

    Raises BadOutputError, in a sentence, where the kernel returns other shapes, dtypes or layouts
    than its stage has; whatever the kernel itself raises passes through.
    """
    memory = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    before = memory.clone()
    new = PoisonedAllocator(device=str(x.device), poison=poison)
    call = Call(case=case, stage=kernel.stage, x=x, new=new)
    returned = kernel.run(call)
    if x.is_cuda:
        torch.cuda.synchronize()
    kept = torch.equal(memory, before)
    memory.copy_(before)
    result = canonical(kernel, call, *_pair(kernel, returned))
    return Ran(result=result, outputs=new.outputs, input_kept=kept)


def _pair(kernel: Kernel, returned: object) -> tuple[Tensor, Tensor]:
    if isinstance(returned, tuple | list) and len(returned) == 2:
        codes, scales = returned
        if isinstance(codes, Tensor) and isinstance(scales, Tensor):
            return codes, scales
    raise BadOutputError(
        f"{kernel.name} returned {type(returned).__name__}, expected the tensors (codes, scales)."
    )


def canonical(kernel: Kernel, call: Call, codes: Tensor, scales: Tensor) -> QuantOutput:
    """Return what a kernel returned as codes uint8 [M, K] and fp32 scales, on the CPU."""
    if codes.dtype not in (torch.uint8, torch.float8_e4m3fn) or codes.shape != call.x.shape:
        raise BadOutputError(
            f"{kernel.name} returned codes {codes.dtype} {list(codes.shape)}, expected uint8 or "
            f"float8_e4m3fn {list(call.x.shape)}."
        )
    shape = call.scale_shape
    if call.case.scale is ScaleFormat.UE8M0_PACKED:
        width = -(-shape[1] // 4)
        if scales.dtype is not torch.int32 or scales.shape != (shape[0], width):
            raise BadOutputError(
                f"{kernel.name} returned packed scales {scales.dtype} {list(scales.shape)}, "
                f"expected int32 {[shape[0], width]}."
            )
        words = unpack_ue8m0(scales.cpu(), 4 * width)
        if bool((words[:, shape[1] :] != 0).any()):
            raise BadOutputError(
                f"{kernel.name} packs exponents of groups that do not exist: the last word of a "
                f"row of {shape[1]} groups must end in zeros."
            )
        wide = ue8m0_decode(words[:, : shape[1]])
    elif scales.dtype is torch.float32 and scales.shape == shape:
        _check_layout(kernel, call, scales)
        wide = scales.cpu().contiguous()
    else:
        raise BadOutputError(
            f"{kernel.name} returned scales {scales.dtype} {list(scales.shape)}, expected float32 "
            f"{list(shape)}."
        )
    return one_nan(QuantOutput(codes=codes.view(torch.uint8).cpu().contiguous(), scales=wide))


def _check_layout(kernel: Kernel, call: Call, scales: Tensor) -> None:
    """Raise BadOutputError where fp32 scales lie otherwise than the case asks."""
    wanted = scale_strides(*call.scale_shape, call.case.layout)
    sizes = zip(scales.shape, scales.stride(), wanted, strict=True)
    if any(size > 1 and got != want for size, got, want in sizes):
        raise BadOutputError(
            f"{kernel.name} returned scales with strides {tuple(scales.stride())}, expected "
            f"{wanted} for layout {call.case.layout}."
        )


def one_nan(output: QuantOutput) -> QuantOutput:
    """Return the output with every NaN made the same one.

    The rule for NaN, stated here once: what is compared is that a value is NaN, not its sign or
    payload, which projects leave to the library (0x7f or 0xff, 0x7fffffff or 0x7fc00000).  The
    sign of zero is compared.
    """
    nan = torch.full_like(output.codes, E4M3_NAN)
    codes = torch.where((output.codes & E4M3_NAN) == E4M3_NAN, nan, output.codes)
    return QuantOutput(codes=codes, scales=canonical_nan(output.scales))


def reference(stage: Stage, case: Case, x: Tensor, recipe: QuantRecipe) -> QuantOutput:
    """Return what the recipe gives on ``x``, computed where x lies, on the CPU."""
    ue8m0 = case.scale.is_power_of_two
    if stage is Stage.WEIGHT_QUANT:
        out = quant.weight_quant(x, recipe, ue8m0=ue8m0)
    else:
        out = quant.act_quant(x, recipe, group=case.group, ue8m0=ue8m0)
    scales = out.scales.cpu()
    if case.scale is ScaleFormat.UE8M0_PACKED:
        # A byte has no infinity: 255, its exponent field, is the NaN of UE8M0.
        scales = ue8m0_decode((bits_of(scales) >> 23).to(torch.uint8))
    return one_nan(QuantOutput(codes=out.codes.cpu(), scales=scales))


def make_input(kernel: Kernel, case: Case, device: str) -> Tensor:
    """Return the kernel's input for the case."""
    return quant_input(case, kernel.stage, device)
