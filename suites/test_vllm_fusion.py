"""vLLM's own fusion pass, from the wheel's file: which options of the quantizer its op gets.

The file is run as it is, by torch's pattern matcher.  What it imports from vllm is stood in for by
the few lines that its patterns need; its ops are declared, since a graph calls none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from moe_parity.harness.session.skips import skip_test
from moe_parity.kernels.vendors.vllm import package
from moe_parity.references.language import Skip, Why

HOME = "vllm.compilation.passes.fusion"
FILE = "vllm/compilation/passes/fusion/act_quant_fusion.py"
FP8 = torch.float8_e4m3fn
SCHEMAS = (
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, "
    "float eps, float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, "
    "bool dummy_is_tma_aligned) -> ()",
    "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, "
    "Tensor? scale_ub=None, bool is_scale_transposed=False) -> ()",
)
"""As the library of 0.33.0 states them."""


@dataclass(frozen=True)
class Key:
    """How a tensor is quantized."""

    group: int
    dtype: torch.dtype = FP8

    @property
    def scale(self) -> Any:
        return SimpleNamespace(group_shape=(1, self.group))


@pytest.fixture
def patterns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return vLLM's pass with its patterns of block quantization, as on an H200."""
    found = package.located()
    if isinstance(found, str) or not found.file(FILE).is_file():
        skip_test(Skip(Why.ABSENT, f"vLLM's {FILE} is not here; unpack a whole wheel."))
    if hasattr(torch.ops._C, "silu_and_mul"):
        skip_test(Skip(Why.ABSENT, "vLLM's library is loaded: its ops are declared already."))
    matcher = importlib.import_module("torch._inductor.pattern_matcher")
    importlib.import_module("torch._inductor.fx_passes.post_grad")

    class Silu:
        def inputs(self) -> list[Tensor]:
            return [torch.empty(5, 4, dtype=torch.bfloat16)]

        def __call__(self, x: Tensor) -> Tensor:
            return silu(x)

    class Quantizer:
        def __init__(self, key: Key, **_: Any) -> None:
            self.QUANT_OP = torch.ops._C.per_token_group_fp8_quant.default

        def empty_f32(self, *shape: int) -> Tensor:
            return torch.empty(*shape)

    class Pass:
        def __init__(self, config: None, name: str) -> None:
            self.pm_pass = matcher.PatternMatcherPass(pass_name=name)

        def register(self, given: Any) -> None:
            if type(given).__name__ == "SiluMulBlockQuantPattern":
                with FakeTensorMode():
                    matcher.register_replacement(
                        given.pattern, given.replacement, given.get_inputs(), matcher.fwd_only,
                        self.pm_pass,
                    )  # fmt: skip

        def dump_patterns(self, *_: Any) -> None:
            """Nothing is written."""

    static, wide, narrow, small = Key(0), Key(128), Key(64), Key(16)
    platform = SimpleNamespace(
        fp8_dtype=lambda: FP8, is_cuda=lambda: True, is_cuda_alike=lambda: True, device_type="cpu"
    )
    given: dict[str, dict[str, Any]] = {
        "vllm.config": {"VllmConfig": object},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.platforms": {"current_platform": platform},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "QuantKey": Key, "kFp8Dynamic64Sym": narrow, "kFp8Dynamic128Sym": wide,
            "kFp8StaticTensorSym": static, "kNvfp4Dynamic": small,
        },
        "vllm.compilation.passes.vllm_inductor_pass": {
            "VllmPatternReplacement": object, "VllmFusionPatternMatcherPass": Pass,
        },
        f"{HOME}.matcher_utils": {"MatcherQuantFP8": Quantizer, "MatcherSiluAndMul": Silu},
        f"{HOME}.rms_quant_fusion": {
            "QUANT_OPS": dict.fromkeys((static, wide, narrow)), "empty_bf16": None,
            "empty_fp32": None, "empty_i32": None,
        },
    }  # fmt: skip
    for name in sorted({*given, HOME}):
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:n]))
            module.__path__ = []
            vars(module).update(given.get(module.__name__, {}))
            if n == len(parts) or module.__name__ not in sys.modules:
                monkeypatch.setitem(sys.modules, module.__name__, module)
    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        for schema in SCHEMAS:
            library.define(schema)
            library.impl(schema.split("(")[0], lambda *_, **__: None, "CompositeExplicitAutograd")
        spec = importlib.util.spec_from_file_location(f"{HOME}.act_quant_fusion", found.file(FILE))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module.ActivationQuantFusionPass(None)


def silu(x: Tensor) -> Tensor:
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    made: Any = auto_functionalized(torch.ops._C.silu_and_mul.default, result=out, input=x)
    after: Tensor = made[1]
    return after


def graph_that_asks(ue8m0: bool, column: bool, tma: bool, rows: int = 5) -> torch.fx.GraphModule:
    """Trace SiLU * mul and the quantizer with those options; the scales' memory is an input."""

    def model(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        y = silu(x)
        made: Any = auto_functionalized(
            torch.ops._C.per_token_group_fp8_quant.default, input=y,
            output_q=torch.empty(y.shape, dtype=FP8, device=y.device), output_s=scales,
            group_size=128, eps=1e-10, fp8_min=-448.0, fp8_max=448.0, scale_ue8m0=ue8m0,
            dummy_is_scale_transposed=column, dummy_is_tma_aligned=tma,
        )  # fmt: skip
        return made[1], made[2]

    with FakeTensorMode():
        x = torch.empty(rows, 512, dtype=torch.bfloat16)
        pitch = -(-rows // 4) * 4 if tma else rows
        strides = (1, pitch) if column else (2, 1)
        module = make_fx(model)(x, torch.empty_strided((rows, 2), strides))
    module.graph.eliminate_dead_code()
    return module


def replaced(patterns: Any, **asked: bool) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return what the fused op is given besides tensors, and the strides of its scales."""
    module = graph_that_asks(**asked)
    assert patterns.pm_pass.apply(module.graph) == 1
    ops = [n for n in module.graph.nodes if n.target is auto_functionalized]
    (fused,) = ops
    assert fused.args[0] is torch.ops._C.silu_and_mul_per_block_quant.default
    plain = {k: v for k, v in fused.kwargs.items() if not isinstance(v, torch.fx.Node)}
    return plain, fused.kwargs["scales"].meta["val"].stride()


def test_vllms_fusion_gives_its_op_no_scale_format(patterns: Any):
    """With UE8M0 asked for and without, the same call."""
    asked = [replaced(patterns, ue8m0=flag, column=False, tma=False) for flag in (False, True)]
    assert asked[0] == asked[1]
    assert asked[0][0] == {"group_size": 128, "scale_ub": None, "is_scale_transposed": False}


def test_vllms_fusion_gives_tma_scales_other_strides(patterns: Any):
    """Of five rows: the caller's column of scales is 8 long, the replacement's 5."""
    plain = replaced(patterns, ue8m0=False, column=True, tma=False)
    aligned = replaced(patterns, ue8m0=False, column=True, tma=True)
    assert plain[0] == aligned[0]
    module = graph_that_asks(ue8m0=False, column=True, tma=True)
    scales = [n for n in module.graph.nodes if n.op == "placeholder"][1]
    assert scales.meta["val"].stride() == (1, 8)
    assert aligned[1] == (1, 5)
