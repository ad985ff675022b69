"""Run a kernel on a case: poisoned outputs in, canonical outputs out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parity.harness.inputs import quant_input
from moe_parity.harness.memory import POISONS, Output, PoisonedAllocator
from moe_parity.kernels import Call, Kernel
from moe_parity.references import quant
from moe_parity.references.formats import (
    E4M3_NAN,
    bits_of,
    canonical_nan,
    ue8m0_decode,
    unpack_ue8m0,
)
from moe_parity.references.spec import Case, QuantOutput, QuantRecipe, ScaleFormat, Stage


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One call: its canonical result and the outputs it was given."""

    result: QuantOutput
    outputs: list[Output]


def run(kernel: Kernel, case: Case, x: Tensor, poison: int = POISONS[0]) -> Ran:
    """Call the kernel on ``x`` and return canonical CPU tensors.

    Raises ValueError, in a sentence, where the kernel returns other shapes or dtypes than its stage
    has; whatever the kernel itself raises passes through.
    """
    new = PoisonedAllocator(device=str(x.device), poison=poison)
    call = Call(case=case, stage=kernel.stage, x=x, new=new)
    codes, scales = kernel.run(call)
    if x.is_cuda:
        torch.cuda.synchronize()
    return Ran(result=canonical(kernel, call, codes, scales), outputs=new.outputs)


def canonical(kernel: Kernel, call: Call, codes: Tensor, scales: Tensor) -> QuantOutput:
    """Return what a kernel returned as codes uint8 [M, K] and fp32 scales, on the CPU."""
    if codes.element_size() != 1 or codes.shape != call.x.shape:
        raise ValueError(
            f"{kernel.name} returned codes {codes.dtype} {list(codes.shape)}, expected uint8 or "
            f"float8_e4m3fn {list(call.x.shape)}."
        )
    shape = call.scale_shape
    if scales.dtype is torch.int32:
        width = -(-shape[1] // 4)
        if scales.shape != (shape[0], width):
            raise ValueError(
                f"{kernel.name} returned packed scales {list(scales.shape)}, expected "
                f"{[shape[0], width]}."
            )
        wide = ue8m0_decode(unpack_ue8m0(scales.cpu(), shape[1]))
    elif scales.dtype is torch.float32 and scales.shape == shape:
        wide = scales.cpu().contiguous()
    else:
        raise ValueError(
            f"{kernel.name} returned scales {scales.dtype} {list(scales.shape)}, expected float32 "
            f"{list(shape)} or packed int32."
        )
    return one_nan(QuantOutput(codes=codes.view(torch.uint8).cpu().contiguous(), scales=wide))


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
