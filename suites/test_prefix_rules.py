"""What the prefix-sum path applies to, row by row of its table, and how DeepGEMM is called."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.compare import comparable
from moe_parity.references.errors import ParityError
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.suites.test_prefix_layer import SMALL, ran

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
dispatch = pytest.importorskip("moe_parity.kernels.ours.dispatch", reason="needs Triton")
prefix_sum = pytest.importorskip("moe_parity.kernels.ours.prefix_sum", reason="needs Triton")

PLAIN = dispatch.Request(tokens=1, dtype=torch.bfloat16)
BROKEN: dict[str, dict[str, Any]] = {
    "weights": {"weights": (torch.bfloat16, torch.float32)},
    "activation": {"activation": "relu2"},
    "dtype": {"dtype": torch.float16},
    "lora": {"has_lora": True},
    "fused": {"fused": False},
    "bias": {"has_bias": True, "gemm": dispatch.Gemm.DEEPGEMM},
    "sizes": {"width": 192},
    "experts": {"experts": 0},
    "alignment": {"alignment": 48},
}
MET: dict[str, list[dict[str, Any]]] = {
    "weights": [{}],
    "activation": [{"activation": "swiglu_alpha_beta"}, {"has_tensor_clamp": True}],
    "dtype": [{"dtype": torch.uint8, "is_quantized": True}],
    "lora": [{}],
    "fused": [{}],
    "bias": [{"has_bias": True}, {"gemm": dispatch.Gemm.DEEPGEMM}],
    "out": [{"has_out": True}],
    "tokens": [{"tokens": 0}, {"tokens": 4096}],
    "sizes": [{"hidden": 7168, "width": 2048}, {"hidden": 128, "width": 128}],
    "experts": [{"experts": 1}, {"experts": 257}],
    "alignment": [{"alignment": n} for n in (16, 32, 64, 128, 256)],
}


@pytest.mark.parametrize("rule", dispatch.prefix_rules(PLAIN), ids=lambda rule: rule.name)
def test_each_row_of_the_prefix_sum_table_decides_alone(rule: Any):
    """What breaks it breaks no other one, and is refused by its words; what it takes is taken."""
    for change in MET[rule.name]:
        choice = dispatch.choose(dataclasses.replace(PLAIN, **change), "prefix_sum")
        assert choice.reason == "the prefix_sum path was asked for."
    if not rule.otherwise:
        assert rule.name not in BROKEN
        return
    request = dataclasses.replace(PLAIN, **BROKEN[rule.name])
    assert [r.name for r in dispatch.prefix_rules(request) if not r.holds] == [rule.name]
    with pytest.raises(ParityError) as refused:
        dispatch.choose(request, "prefix_sum")
    assert str(refused.value) == f"run_moe: the prefix-sum path does not apply: {rule.otherwise}."
    assert rule.otherwise in dispatch.prefix_table()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora": object()}, "does not apply: LoRA"),
        ({"fused": False}, "does not apply: SwiGLU and its quantization are asked for apart"),
        ({"alignment": 100}, "does not apply: the alignment is none of 16, 32, 64, 128, 256"),
        ({"gemm": "deepgemm", "bias": True}, "does not apply: the experts have a bias, which Deep"),
        ({"gemm": "cublas"}, "run_moe: gemm must be one of 'ours', 'deepgemm', got 'cublas'"),
        ({"path": "large", "alignment": 64}, "'ours' and an alignment of 64 are the prefix-sum"),
        ({"path": None, "gemm": "deepgemm"}, "gemm = 'deepgemm' and an alignment of 128 are the"),
        ({"half": True}, "does not apply: the input is not BF16"),
        ({"wide": True}, "does not apply: the weights are not block-FP8"),
        ({"narrow": True}, "does not apply: H and I must be positive multiples of 128"),
    ],
)
def test_what_a_prefix_sum_call_is_refused(changes: dict[str, Any], sentence: str):
    made = layer_inputs(SMALL, spoil=False)
    given, experts, x = dict(changes), made.experts, made.batch.x
    if given.pop("bias", False):
        experts = dataclasses.replace(experts, bias13=torch.zeros(5, 256))
    if given.pop("half", False):
        x = x.half()
    if given.pop("wide", False):
        experts = dataclasses.replace(experts, w13_scale=experts.w13_scale.bfloat16())
    if given.pop("narrow", False):
        experts = dataclasses.replace(experts, w2=experts.w2[:, :, :100])
    with pytest.raises(ParityError, match=sentence):
        moe.run_moe(x, made.batch.ids, None, experts, **{"path": "prefix_sum", **given})


def test_the_prefix_sum_path_is_taken_only_where_it_is_asked_for():
    made = layer_inputs(SMALL, spoil=False)
    for tokens in (1, 32, 33, 4096):
        x = torch.empty((tokens, 128), dtype=torch.bfloat16)
        assert moe.plan(x, made.experts).path is not dispatch.Path.PREFIX_SUM
    choice = moe.plan(x, made.experts, path="prefix_sum", alignment=16)
    assert choice.path is dispatch.Path.PREFIX_SUM


# --- DeepGEMM's GEMMs -----------------------------------------------------------------------------


def test_deepgemm_is_asked_for_where_it_cannot_run_in_one_sentence():
    from moe_parity.kernels.vendors.deepgemm import api

    missing = api.unavailable()
    if missing is None:
        pytest.skip("DeepGEMM runs here; the tests of the second seed run it")
    made = layer_inputs(SMALL, spoil=False)
    with pytest.raises(ParityError) as refused:
        ran(made, "prefix_sum", gemm="deepgemm")
    assert str(refused.value) == f"run_moe: gemm='deepgemm' cannot run here: {missing}"


@pytest.mark.parametrize("alignment", [64, 128])
def test_deepgemm_gets_the_prefix_rows_as_they_are(alignment: int, monkeypatch: pytest.MonkeyPatch):
    """A stand-in that checks its operands as the adapter does and writes what DeepGEMM writes.

    In the padding of a slab of 64 rows whose first is live that is anything, in the rest of its
    tile zeros; nothing of it may reach the output.
    """
    from moe_parity.kernels.vendors.deepgemm import api

    made = layer_inputs(SMALL, spoil=False)
    seen = []

    def grouped(
        a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, out: Tensor, layout: Tensor,
        *, psum: bool, align: int,
    ) -> None:  # fmt: skip
        api.check_operands(a, a_scale, w, w_scale)
        seen.append((psum, align))
        start = 0
        for end in layout.tolist():
            stop = start + -(-(end - start) // align) * align
            for slab in range(start, stop, 64):
                out[slab : slab + 64] = float("nan") if slab < end else 0.0
            start = stop
        prefix_sum.prefix_gemm(a, a_scale, w, w_scale, layout, alignment=align, out=out)

    monkeypatch.setattr(api, "unavailable", lambda: None)
    monkeypatch.setattr(api, "grouped", grouped)
    want = ran(made, "large").out
    got = ran(made, "prefix_sum", gemm="deepgemm", alignment=alignment).out
    assert torch.equal(comparable(got), comparable(want))
    assert seen == [(True, alignment)] * 2
    empty = layer_inputs(dataclasses.replace(SMALL, m=0), spoil=False)
    assert ran(empty, "prefix_sum", gemm="deepgemm").out.shape == (0, 128)
    assert len(seen) == 2


def test_deepgemm_takes_scales_as_tma_reads_them_and_no_other_columns():
    from moe_parity.kernels.vendors.deepgemm import api

    a, w = torch.zeros((6, 256), dtype=torch.uint8), torch.zeros((1, 128, 256), dtype=torch.uint8)
    w_scale = torch.ones((1, 1, 2))
    for strides in ((2, 1), (1, 8)):
        api.check_operands(a, torch.empty_strided((6, 2), strides), w, w_scale)
    for strides in ((1, 6), (1, 12)):
        with pytest.raises(ParityError, match=r"a_scale must be .* with contiguous rows"):
            api.check_operands(a, torch.empty_strided((6, 2), strides), w, w_scale)
