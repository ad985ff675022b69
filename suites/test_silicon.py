"""The arithmetic models against the instructions of a real GPU: the whole fp32 range of each."""

from __future__ import annotations

import pytest
import torch

from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.silicon.models import MODELS, DotCase, arguments, operands, result_bits
from moe_parity.references.arithmetic.formats import bits_of, from_bits
from moe_parity.references.chips import tensor_core, unit_named

CHUNK = 1 << 26
AIMED = 1 << 26
SEEDS = 8

UNARY = sorted(name for name, model in MODELS.items() if model.arity == 1)
OTHERS = sorted(name for name, model in MODELS.items() if model.arity > 1)


def _record(recorder: Recorder, name: str, compared: int, wrong: int, first: str) -> None:
    fault = f"model {name} differs from the GPU in {wrong} of {compared} results; {first}."
    claim(
        recorder, "model", fault if wrong else "", kernel=f"model_{name}", device="cuda",
        compared=compared, differing=wrong,
    )  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_every_argument(name: str, parity_gpu: str, parity_recorder: Recorder):
    """All 2^32 fp32 arguments of a function of one."""
    from moe_parity.harness.silicon import instructions

    model, wrong, first = MODELS[name], 0, ""
    for start in range(-(2**31), 2**31, CHUNK):
        word = torch.arange(start, start + CHUNK, device=parity_gpu, dtype=torch.int64).int()
        x = from_bits(word)
        got, want = instructions.run(model, (x,)), result_bits(model.model(x))
        bad = got != want
        count = int(bad.sum())
        if count and not wrong:
            at = int(bad.nonzero()[0, 0])
            first = f"at 0x{int(word[at]) & 0xFFFFFFFF:08x} GPU 0x{int(got[at]) & 0xFFFFFFFF:08x}, model 0x{int(want[at]) & 0xFFFFFFFF:08x}"  # fmt: skip  # noqa: E501
        wrong += count
    _record(parity_recorder, name, 2**32, wrong, first)


@pytest.mark.parametrize("name", OTHERS)
def test_aimed_arguments(name: str, parity_gpu: str, parity_recorder: Recorder):
    """2^26 aimed pairs or triples under several seeds."""
    from moe_parity.harness.silicon import instructions

    model, wrong, first = MODELS[name], 0, ""
    for seed in range(SEEDS):
        args = arguments(model, AIMED, seed, parity_gpu)
        got, want = instructions.run(model, args), result_bits(model.model(*args))
        bad = got != want
        if bool(bad.any()) and not wrong:
            at = int(bad.nonzero()[0, 0])
            given = ", ".join(f"0x{int(bits_of(t)[at]) & 0xFFFFFFFF:08x}" for t in args)
            first = f"at {given} GPU 0x{int(got[at]) & 0xFFFFFFFF:08x}, model 0x{int(want[at]) & 0xFFFFFFFF:08x}"  # fmt: skip  # noqa: E501
        wrong += int(bad.sum())
    _record(parity_recorder, name, AIMED * SEEDS, wrong, first)


DOTS = [
    DotCase(unit=unit, m=m, n=n, k=k, spread=spread, accumulator=accumulator, nan=nan)
    for unit, m, n in (("wgmma_fp8", 64, 16), ("wgmma_fp8", 128, 64), ("mma_f16", 16, 64))
    for k in (32, 64, 128)
    for spread in (1, 4, 16)
    for accumulator, nan in (("none", False), ("normal", False), ("wide", True), ("special", False))
]


@pytest.mark.parametrize("case", DOTS, ids=lambda case: case.name)
def test_tensor_core(case: DotCase, parity_gpu: str, parity_recorder: Recorder):
    """Both units, narrow and wide exponents, every kind of accumulator; the unit is the PTX's."""
    from moe_parity.harness.silicon import instructions

    compared = wrong = 0
    first = ""
    for seed in range(16):
        a, b, c = operands(case, seed, parity_gpu)
        got, unit = instructions.run_dot(case, a, b, c)
        assert unit == case.unit, f"Triton compiled {case.name} to {unit}"
        want = bits_of(tensor_core.dot(a, b, c, unit=unit_named(case.unit)))
        plain = bits_of(tensor_core.dot_plain(a, b, c, unit=unit_named(case.unit)))
        assert torch.equal(want, plain), f"{case.name}: the GPU form is not the plain form"
        bad = got != want
        if bool(bad.any()) and not wrong:
            at = tuple(int(n) for n in bad.nonzero()[0])
            old = "none" if c is None else f"0x{int(bits_of(c)[at]) & 0xFFFFFFFF:08x}"
            first = f"at {at} (c = {old}) GPU 0x{int(got[at]) & 0xFFFFFFFF:08x}, model 0x{int(want[at]) & 0xFFFFFFFF:08x}"  # fmt: skip  # noqa: E501
        compared += bad.numel()
        wrong += int(bad.sum())
    _record(parity_recorder, case.name, compared, wrong, first)
