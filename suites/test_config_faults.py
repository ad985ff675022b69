"""What the sweep of configurations catches: a configuration of several that is wrong, by its name.

And what an autotuner and heuristics make of a launch on the virtual GPU.
"""

# Triton kernels have no Python types: their arguments are pointers and compile-time constants.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.cases.sequences import base_of
from moe_parity.harness.cases.sweep import swept
from moe_parity.harness.checks.configs import configs, edges
from moe_parity.harness.checks.expect import repro
from moe_parity.harness.checks.flow import bits
from moe_parity.harness.checks.verdict import Verdict
from moe_parity.harness.cli.repro import run as reproduce
from moe_parity.kernels import Call, Kernel, load_file, registry
from moe_parity.kernels.choice import choosing
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case
from moe_parity.references.recipes import recipe_named
from moe_parity.suites.planted import following

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")
import triton.language as tl  # noqa: E402

from moe_parity.kernels.ours import activation, activation_kernels, quant_kernels  # noqa: E402
from moe_parity.kernels.virtual_gpu import configured, dispatch, record  # noqa: E402

Config = triton.Config
right = following()


def kernel_of(stage: str, run: Callable[[Call], Any], **words: Any) -> Kernel:
    words = {"recipes": "ours", **words}
    registry.register("tuned", stage=stage, **words)(run)
    return registry._KERNELS.pop("tuned")


def judged(kernel: Kernel) -> list[Verdict]:
    cases = edges(kernel, "cpu")
    assert cases
    return [verdict for case in cases for verdict in configs(kernel, case, "cpu")]


def red(kernel: Kernel) -> list[Verdict]:
    """Return the red verdicts of the first case that has any."""
    for case in edges(kernel, "cpu"):
        found = [verdict for verdict in configs(kernel, case, "cpu") if verdict.failed]
        if found:
            return found
    return []


# --- autotuned kernels --------------------------------------------------------------------------


def quantizer(kernel: Any) -> Kernel:
    """Return a quantizer that launches an autotuned form of ours."""

    def run(call: Call) -> Any:
        x, codes, scales = call.inputs.x, call.new("codes"), call.new("scales")
        rows, groups = x.shape[0], scales.shape[1]
        dispatch(
            kernel, lambda words: (-(-rows // words["ROWS"]), groups), x, codes, scales, rows,
            *x.stride(), codes.stride(0), *scales.stride(), G=call.case.group, POWER_OF_TWO=False,
        )  # fmt: skip
        return codes, scales

    def fp32(case: Case, device: str) -> str | None:
        return None if case.scale == "fp32" and case.m else "fp32 scales of some rows."

    return kernel_of("act_quant", run, triton=True, supports=fp32)


def tuned(kernel: Any, *several: Any, **words: Any) -> Any:
    return triton.autotune(configs=list(several), key=["rows"], **words)(kernel)


@triton.jit
def _careless(x, codes, scales, rows, xr, xc, cr, sr, sc, G: tl.constexpr, ROWS: tl.constexpr,
              POWER_OF_TWO: tl.constexpr):  # fmt: skip
    """Quantize like ours, the first 16 rows of a larger block with another one's scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * G + tl.arange(0, G)
    live = (row < rows)[:, None]
    x_ = tl.load(x + row[:, None] * xr + column[None, :] * xc, mask=live, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x_), 1)
    if ROWS == 32:
        amax = tl.zeros_like(amax) + tl.max(amax, 0)
    scale, factor = quant_kernels.scale_and_multiplier(amax, POWER_OF_TWO)
    code = (x_ * factor[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes + row[:, None] * cr + column[None, :], code, mask=live)
    tl.store(scales + row * sr + tl.program_id(1) * sc, scale, mask=row < rows)


def test_every_configuration_of_an_autotuner_is_run_and_all_are_right():
    few = [Config({"ROWS": 16}), Config({"ROWS": 32}, num_warps=8), Config({"ROWS": 4})]
    verdicts = judged(quantizer(tuned(quant_kernels.act_quant_kernel, *few)))
    assert {verdict.verdict for verdict in verdicts} == {"pass"}
    one = edges(quantizer(tuned(quant_kernels.act_quant_kernel, few[0])), "cpu")[0]
    # three times the outputs of the case: codes, and a scale for each 128
    assert verdicts[0].compared == 3 * (one.m * one.h + one.m * one.h // 128)


def test_the_wrong_configuration_of_a_quantizer_is_named():
    kernel = quantizer(tuned(_careless, Config({"ROWS": 16}), Config({"ROWS": 32}, num_warps=8)))
    found = red(kernel)
    assert {v.config for v in found} == {"1"}
    start = "configuration ROWS=32, num_warps=8, num_stages=3 of _careless of tuned: "
    assert found[0].message.startswith(start)
    assert "--config '1'" in repro(kernel, Case(), found[0])


def test_a_kernel_with_one_configuration_is_skipped_with_that_reason():
    for one in (quantizer(tuned(quant_kernels.act_quant_kernel, Config({"ROWS": 16}))),
                kernel_of("act_quant", right),
                kernel_of("align", right, recipes="no_rounding")):  # fmt: skip
        verdict = judged(one)[0]
        assert (verdict.verdict, verdict.reason) == ("skip", "it has one configuration")


@triton.jit
def _gemm(w, w_scale, a, a_scale, out, expert, N: tl.constexpr, K: tl.constexpr,
          TOP: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Multiply one pair by 64 rows of a weight; a block of K takes one scale: grid (P, N / 64)."""
    pair = tl.program_id(0)
    e = tl.load(expert + pair)
    if e < 0:
        return
    n, k, one = tl.program_id(1) * 64 + tl.arange(0, 64), tl.arange(0, BLOCK_K), tl.arange(0, 16)
    acc = tl.zeros((64, 16), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        w_ = tl.load(w + (e * N + n[:, None]) * K + start + k[None, :], mask=inside[None, :] &
                     (n < N)[:, None], other=0).to(tl.float8e4nv, bitcast=True)  # fmt: skip
        a_ = tl.load(a + pair // TOP * K + start + k[:, None] + 0 * one[None, :],
                     mask=inside[:, None], other=0).to(tl.float8e4nv, bitcast=True)  # fmt: skip
        scales = (N + 127) // 128 * (K // 128)
        s = tl.load(a_scale + pair // TOP * (K // 128) + start // 128) * tl.load(
            w_scale + e * scales + tl.program_id(1) // 2 * (K // 128) + start // 128
        )
        acc = tl.fma(tl.dot(w_, a_), tl.zeros_like(acc) + s, acc)
    place = out + pair * N + n[:, None] + 0 * one[None, :]
    tl.store(place, acc.to(tl.bfloat16), mask=(n < N)[:, None] & (one == 0)[None, :])


def gemm(kernel: Any) -> Kernel:
    def run(call: Call) -> Tensor:
        of, out = call.inputs, call.new("rows")
        _, n, k = of.w.shape
        dispatch(
            kernel, (of.expert.numel(), -(-n // 64)), of.w, of.w_scale, of.a, of.a_scale, out,
            of.expert, N=n, K=k, TOP=of.top_k,
        )  # fmt: skip
        return out

    def plain(case: Case, device: str) -> str | None:
        usual = case.layout == "row" and case.hazard == "none" and not case.h % 128 and case.m
        return None if usual and not case.scale.is_packed else "usual layouts."

    return kernel_of("fc1", run, triton=True, supports=plain)


def test_a_block_of_k_larger_than_the_group_is_found_in_a_gemm():
    several = [Config({"BLOCK_K": 128}), Config({"BLOCK_K": 256})]
    found = red(gemm(triton.autotune(configs=several, key=["K"])(_gemm)))
    assert {verdict.config for verdict in found} == {"1"}
    assert "configuration BLOCK_K=256, num_warps=4, num_stages=3 of _gemm" in found[0].message


def test_the_wrong_configuration_of_a_swiglu_is_named_and_reproduced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "mine.py"
    path.write_text(
        "from moe_parity.kernels import register\n"
        "from moe_parity.references.recipes.ours import OURS\n"
        "@register('mine', stage='swiglu', recipes='ours', configs={'few': 4, 'many': 64})\n"
        "def mine(call):\n"
        "    made = call.stage.reference(call.case, call.inputs, OURS)['rows']\n"
        "    if call.config == 64:\n"
        "        made[-1, -1] = 7.0\n"
        "    return call.new('rows', tuple(made.shape)).copy_(made)\n"
    )
    try:
        (kernel,) = load_file(path)
        found = red(kernel)
        assert {verdict.config for verdict in found} == {"many"}
        base = base_of(kernel, "cpu")
        assert base is not None
        line = f"mine-{base.id}"
        assert reproduce([line], 0, "cpu", config="many") == 1
        assert reproduce([line], 0, "cpu", config="0") == 0
        assert reproduce([line], 0, "cpu") == 0
        with pytest.raises(ParityError, match=r"no configuration 'none' .* it has few, many"):
            reproduce([line], 0, "cpu", config="none")
        capsys.readouterr()
    finally:
        registry._KERNELS.pop("mine", None)


# --- recipes of configurations ------------------------------------------------------------------

TWO = {"up": "ours", "down": "deepgemm"}


def by_config(call: Call) -> dict[str, Tensor]:
    return following(recipe_named(call.config))(call)


def test_configurations_that_follow_several_recipes_are_told_apart():
    both = (recipe_named("ours"), recipe_named("deepgemm"))
    kernel = kernel_of("act_quant", by_config, recipes=lambda case, device: both, configs=TWO)
    verdict = next(v for v in judged(kernel) if v.message)
    assert verdict.verdict == "pass"
    assert verdict.message == "2 configurations follow ours by up, deepgemm by down"


def test_a_recipe_may_belong_to_a_configuration():
    def swapped(case: Case, device: str, config: str) -> tuple[Any, ...]:
        return (recipe_named("deepgemm" if config == "ours" else "ours"),)

    def own(case: Case, device: str, config: str) -> tuple[Any, ...]:
        return (recipe_named(config),)

    assert not red(kernel_of("act_quant", by_config, recipes=own, configs=TWO))
    found = red(kernel_of("act_quant", by_config, recipes=swapped, configs=TWO))
    assert {verdict.config for verdict in found} == {"up", "down"}


def test_configurations_that_are_no_mapping_are_refused():
    with pytest.raises(ParityError, match="configs must map names to anything"):
        kernel_of("act_quant", right, configs=["a", "b"])


# --- what a launch makes of them ----------------------------------------------------------------


def launched(kernel: Any, **words: Any) -> dict[str, Any]:
    """Return the options of a launch of SwiGLU's kernel on a few rows."""
    rows, out = torch.zeros(4, 256, dtype=torch.bfloat16), torch.zeros(4, 128, dtype=torch.bfloat16)
    fixed: dict[str, Any] = {
        "WIDTH": 128, "HAS_IDS": True, "VECTOR": True, **activation.Activation().constants, **words,
    }  # fmt: skip
    with record() as tape:
        dispatch(
            kernel, lambda seen: (-(-4 // seen["ROWS"]), 1), rows, out,
            torch.zeros(4, dtype=torch.int32), out, 4, 0, 1, 0.0, 1.0, 0.0, 256, 1, 128, **fixed,
        )  # fmt: skip
    (item,) = tape.launches
    assert item.kernel is activation_kernels.swiglu_kernel
    return {**item.options, "grid": item.grid}


def test_heuristics_are_evaluated_from_the_arguments_of_the_launch():
    kernel = triton.heuristics({"ROWS": lambda given: given["pairs"] // 2})(
        activation_kernels.swiglu_kernel
    )
    options = launched(kernel)
    assert (options["ROWS"], options["grid"]) == (2, (2, 1))


def test_a_configuration_is_chosen_by_its_number_and_pruned_ones_are_not_there():
    def keep(several: list[Any], named: Mapping[str, Any], **_: Any) -> list[Any]:
        return [one for one in several if one.kwargs["ROWS"] <= named["pairs"]]

    ran: list[int] = []
    several = [Config({"ROWS": n}, pre_hook=lambda given: ran.append(given["ROWS"]))
               for n in (1, 2, 4, 8)]  # fmt: skip
    kernel = triton.autotune(
        configs=several, key=["pairs"], prune_configs_by={"early_config_prune": keep}
    )(activation_kernels.swiglu_kernel)
    assert launched(kernel)["ROWS"] == 1
    for number, rows in enumerate((1, 2, 4, 1)):
        with configured(number):
            assert launched(kernel)["ROWS"] == rows
    assert ran == [1, 1, 2, 4, 1]
    assert not kernel.cache
    with choosing() as choice:
        launched(kernel)
    assert [len(names) for names in choice.met.values()] == [3]


def test_a_word_that_both_the_launch_and_the_configuration_give_is_refused():
    kernel = triton.autotune(configs=[Config({"ROWS": 2})], key=[])(
        activation_kernels.swiglu_kernel
    )
    with pytest.raises(ParityError, match="swiglu_kernel: ROWS is given to the launch and by"):
        launched(kernel, ROWS=4)


def test_heuristics_that_are_wrong_for_one_number_of_rows_are_found():
    for rows in (3, 27, 112):
        kernel = quantizer(
            triton.heuristics({"ROWS": lambda given, bad=rows: 32 if given["rows"] == bad else 16})(
                _careless
            )
        )
        cases = swept(kernel, "cpu", 200)
        met = [case for case in cases if case.m == rows]
        assert [bits(kernel, case, "cpu").failed for case in met[:1]] == [True], rows


def test_a_launch_without_dispatch_is_told_so():
    def direct(call: Call) -> Any:
        x, codes, scales = call.inputs.x, call.new("codes"), call.new("scales")
        quant_kernels.act_quant_kernel[(1, 1)](
            x, codes, scales, 1, *x.stride(), 1, *scales.stride(), G=128, ROWS=1,
            POWER_OF_TWO=False,
        )  # fmt: skip
        return codes, scales

    verdict = bits(kernel_of("act_quant", direct, triton=True), Case(m=1), "cpu")
    assert "launch it with moe_parity.kernels.virtual_gpu.dispatch" in verdict.message
    assert len(verdict.message.splitlines()) == 1
