"""A token's bits are its own: alone, in any batch, on both paths; replays too."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from moe_parity.harness.checks.compare import comparable
from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.references.language import Case, Routing, ScaleFormat, Values
from moe_parity.references.stages.layer.inputs import layer_inputs
from moe_parity.references.stages.layer.stage import rows_of
from moe_parity.references.stages.routing import draw_ids

moe = pytest.importorskip("moe_parity.kernels.ours.moe", reason="needs Triton")
virtual_gpu = pytest.importorskip("moe_parity.kernels.virtual_gpu", reason="needs Triton")
activating = pytest.importorskip("moe_parity.kernels.ours.activation_kernels", reason="needs Triton")  # fmt: skip  # noqa: E501
kernels = pytest.importorskip("moe_parity.kernels.ours.layer_kernels", reason="needs Triton")
aligning = pytest.importorskip("moe_parity.kernels.ours.align_kernels", reason="needs Triton")
quantizing = pytest.importorskip("moe_parity.kernels.ours.quant_kernels", reason="needs Triton")  # fmt: skip  # noqa: E501

BASE = Case(m=33, e=4, k=2, h=256, i=256, values=Values.AIMED)


def run(batch, experts, **options):
    return moe.run_moe(batch.x, batch.ids, batch.weights, experts, **options)


@pytest.mark.parametrize("scale", [ScaleFormat.FP32, ScaleFormat.UE8M0], ids=lambda s: s.value)
def test_around_the_threshold(scale: ScaleFormat, parity_device: str, parity_recorder: Recorder):
    """The same tokens in batches of 33 (large), 32 and 31 (decode), 33 forced, and alone."""
    made = layer_inputs(dataclasses.replace(BASE, scale=scale), parity_device)
    two = scale.is_power_of_two
    full = comparable(run(made.batch, made.experts, power_of_two=two))
    compared = wrong = 0
    batches = [(list(range(n)), None) for n in (31, 32)] + [(list(range(33)), "decode")]
    batches += [([n], None) for n in (0, 17, 32)] + [([32, 3, 20], None)]
    for tokens, path in batches:
        part = run(rows_of(made.batch, tokens), made.experts, power_of_two=two, path=path)
        wrong += int((comparable(part) != full[tokens]).sum())
        compared += part.numel()
    fault = f"{wrong} of {compared} outputs depend on the batch." if wrong else ""
    claim(
        parity_recorder, "batch_invariant", fault, recipe="ours", kernel="run_moe", stage="layer",
        scale=scale.value, shape="m31-m32-m33", compared=compared, differing=wrong,
    )  # fmt: skip


def test_replay_with_changed_routing(parity_device: str):
    """A recorded launch list replays on new ids and activations, with a larger call in between.

    On a CPU the tape freezes host scalars, grids and tensors, as a CUDA graph does.
    """
    if parity_device != "cpu":
        pytest.skip("a CUDA graph takes its place on a GPU: test_replay.py")
    case = dataclasses.replace(BASE, m=3, i=128)
    made = layer_inputs(case, spoil=False)
    with virtual_gpu.record() as tape:
        out = run(made.batch, made.experts)
    first = out.clone()
    run(layer_inputs(dataclasses.replace(case, m=6)).batch, made.experts)
    other = layer_inputs(dataclasses.replace(case, seed=9), spoil=False)
    made.batch.x.copy_(other.batch.x)
    for how in (Routing.UNIFORM, Routing.ONE, Routing.HOLES):
        made.batch.ids.copy_(draw_ids(dataclasses.replace(case, seed=4, routing=how), "cpu"))
        tape.replay()
        assert torch.equal(comparable(out), comparable(run(made.batch, made.experts)))
    made.batch.ids.fill_(-1)
    tape.replay()
    assert bool((out.view(torch.int16) == 0).all())
    assert not torch.equal(first.view(torch.int16), out.view(torch.int16))


BATCH_DEPENDENT = {
    (quantizing, "act_quant_kernel"): {"rows"},
    (quantizing, "act_quant_packed_kernel"): {"rows"},
    (aligning, "align_small_kernel"): {"pairs", "blocks"},
    (aligning, "count_kernel"): {"pairs"},
    (aligning, "prefix_kernel"): {"blocks"},
    (aligning, "place_kernel"): {"pairs"},
    (kernels, "gemm_kernel"): {"pairs", "a_scale_row", "a_scale_column"},
    (activating, "swiglu_kernel"): {"pairs"},
    (activating, "swiglu_quant_kernel"): {"pairs", "padded", "scales_row", "scales_column"},
    (activating, "quant_rows_kernel"): {"pairs", "padded", "scales_row", "scales_column"},
}


def specialised(kernel, module) -> set[str]:
    """Return the integers of a kernel that are specialised and may change with the batch."""
    kept = {p.name for p in kernel.params if p.do_not_specialize}
    integers = {p.name for p in kernel.params if not p.is_constexpr and not p.name.endswith("_ptr")}
    strides = {name for name in integers if name.endswith(("_row", "_column", "_expert"))}
    weights = {"groups", "columns"} if module is quantizing else set()
    return integers - kept - strides - weights


@pytest.mark.parametrize(("module", "name"), BATCH_DEPENDENT, ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip  # noqa: E501
def test_no_integer_of_the_batch_is_specialised(module, name: str):
    """A specialised integer compiles anew for 1 and for multiples of 16, inside a served step."""
    kernel = getattr(module, name)
    assert BATCH_DEPENDENT[module, name] <= {p.name for p in kernel.params if p.do_not_specialize}
    assert not specialised(kernel, module), f"{name} specialises {specialised(kernel, module)}"


def test_a_specialised_integer_is_seen(tmp_path):
    """The GEMM's source without its list: the number of pairs would be specialised."""
    line = '@triton.jit(do_not_specialize=["pairs", "a_scale_row", "a_scale_column"])'
    source = Path(kernels.__file__).read_text()
    assert source.count(line) == 1
    path = tmp_path / "mutant_specialised.py"
    path.write_text(source.replace(line, "@triton.jit"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    assert specialised(mutant.gemm_kernel, kernels) == {"pairs"}


@pytest.mark.parametrize("topk", [1, 2, 3, 4, 6, 8, 9, 22])
def test_prewarm_meets_every_class(topk: int, monkeypatch):
    """Every kernel with every compile-time constant of any batch up to 200 tokens was prewarmed."""
    seen = set()

    def note(kernel, grid, *args, **options):
        types = tuple(str(a.dtype) if isinstance(a, torch.Tensor) else "" for a in args)
        seen.add((kernel.fn.__name__, types, tuple(sorted(options.items()))))

    for module in (moe.steps, moe.quant, moe.activation):
        monkeypatch.setattr(module, "dispatch", note)
    case = Case(m=200, e=32, k=topk, h=128, i=128)
    made = layer_inputs(case, spoil=False)
    moe.prewarm(made.experts, topk=topk)
    warmed = set(seen)
    for m in range(1, 200):
        run(rows_of(made.batch, list(range(m))), made.experts)
    assert len(warmed) > 10
    assert seen == warmed, f"not prewarmed: {sorted(map(str, seen - warmed))}"


def test_prewarm_makes_the_calls_that_are_named(monkeypatch):
    """Both paths at each number of tokens, with the options given; tokens may be any iterable."""
    made = layer_inputs(Case(e=4, h=256, i=128), spoil=False)
    calls = []

    def run_moe(x, ids, weights, experts, **options):
        assert (x.dtype, ids.dtype, weights.dtype) == (torch.bfloat16, torch.int32, torch.float32)
        assert ids.shape == weights.shape == (x.shape[0], 3)
        assert x.shape[1] == 256
        assert experts is made.experts
        # No pair is anybody's: nothing is computed on weights that may hold anything.
        assert bool((ids == -1).all())
        calls.append((x.shape[0], options))

    monkeypatch.setattr(moe, "run_moe", run_moe)
    options = {"limit": 7.0, "clamp": "after", "power_of_two": True, "mid_power_of_two": False}
    options |= {"formats": None, "down": "sorted"}
    assert moe.prewarm(made.experts, topk=3, tokens=iter((5, 1)), **options) == 4
    assert [count for count, _ in calls] == [5, 5, 1, 1]
    two = [moe.Path.DECODE, moe.Path.LARGE]
    assert [given for _, given in calls] == [{**options, "path": path} for path in two] * 2
    assert moe.prewarm(made.experts, topk=3, tokens=()) == 0
    assert moe.prewarm(made.experts, topk=3) == 2 * len(moe.token_classes(3))
    plain = {"limit": None, "clamp": "before", "formats": None}
    plain |= {"power_of_two": None, "mid_power_of_two": None, "down": "route_major"}
    assert calls[-1][1] == {**plain, "path": moe.Path.LARGE}


def test_prewarm_runs_on_the_weights_that_are_given(parity_device: str):
    """Experts that hold NaN throughout, since they are not loaded yet, are never read."""
    made = layer_inputs(Case(m=0, e=3, h=256, i=128), parity_device)
    assert bool(torch.isnan(made.experts.w13_scale).all())
    assert moe.prewarm(made.experts, topk=2, tokens=(0, 3), limit=1.0) == 4


def test_none_weights_are_ones_and_no_token_is_no_work(parity_device: str):
    made = layer_inputs(dataclasses.replace(BASE, m=2, i=128), parity_device)
    ones = dataclasses.replace(made.batch, weights=torch.ones_like(made.batch.weights))
    none = dataclasses.replace(made.batch, weights=None)
    assert torch.equal(comparable(run(ones, made.experts)), comparable(run(none, made.experts)))
    with virtual_gpu.record() as tape:
        empty = run(rows_of(made.batch, []), made.experts)
    assert empty.shape == (0, 256)
    assert not tape.launches
