"""The house keeps its order: imports go one way and never in a circle, rooms stay small."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from torch import Tensor

import moe_parity.references
from moe_parity.harness.cases.budget import skip_of
from moe_parity.harness.session import environment
from moe_parity.kernels import Call, all_kernels, find
from moe_parity.references.arithmetic.formats import E4M3
from moe_parity.references.chips import CHIPS, why_not_modelled
from moe_parity.references.language import Case, Values, Why
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import STAGES
from moe_parity.references.stages.quant.decisions import QuantRecipe
from moe_parity.references.stages.quant.reference import act_quant
from moe_parity.suites.planted import kernel_of, red, right

ROOT = Path(moe_parity.references.__path__[0]).parent
FOLDERS = ("references", "kernels", "reports", "harness", "suites")
BELOW = {
    "references": set(),
    "kernels": {"references"},
    "reports": {"references"},
    "harness": {"references", "kernels", "reports"},
    "suites": {"references", "kernels", "reports", "harness"},
}
"""Folder -> the folders that it may import besides itself."""


def modules() -> dict[str, Path]:
    """Return every module of the five folders by its dotted name."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[f"moe_parity.{name}"] = path
    return found


MODULES = modules()


def imports(path: Path, *, late: bool) -> Iterator[str]:
    """Yield the modules of ours that a file imports, at its start or, with ``late``, anywhere."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if late else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moe_parity"):
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in MODULES)


def test_imports_go_one_way():
    """References <- kernels <- harness <- suites, and reports below harness; late ones too."""
    wrong = []
    for name, path in MODULES.items():
        folder = name.split(".")[1]
        for other in imports(path, late=True):
            theirs = other.split(".")[1] if "." in other else folder
            if theirs != folder and theirs not in BELOW[folder]:
                wrong.append(f"{name} imports {other}")
    assert not wrong


def test_no_import_goes_in_a_circle():
    graph = {name: set(imports(path, late=False)) - {name} for name, path in MODULES.items()}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(error.args[1])}")
    assert len(order) >= 150


def test_a_circle_would_be_seen():
    with pytest.raises(CycleError):
        list(TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order())


def test_a_module_has_at_most_400_lines():
    long = {n: len(p.read_text().splitlines()) for n, p in MODULES.items()}
    assert not {name: lines for name, lines in long.items() if lines > 400}


@pytest.mark.parametrize("stage", STAGES.values(), ids=str)
def test_a_stage_owns_what_it_says(stage):
    """Its outputs are those of its reference, its masks and subsets name them."""
    case = next(stage.witness_cases(), Case(m=3, e=4, k=2, h=256, i=256))
    inputs = stage.inputs(case)
    outputs = stage.outputs(case, inputs)
    assert stage.live(case, inputs).keys() <= outputs.keys()
    for part in stage.subsets(case, inputs):
        assert part.rows.keys() <= outputs.keys()
        stage.check(part.case)
    assert stage.cost(case) > 0
    assert all(hasattr(Case(), size) for size in stage.sizes)


def test_a_code_format_is_one_object(monkeypatch: pytest.MonkeyPatch):
    """References, checks and sentences of the quantizers ask the case for it."""
    low = dataclasses.replace(
        E4M3, name="e4m3_240", largest=240.0, rounds_to_largest=248.0, top=0x77,
        encode=lambda x: E4M3.encode(x.clamp(-240.0, 240.0)),
    )  # fmt: skip
    monkeypatch.setattr(Case, "codes", property(lambda case: low))
    case = Case(m=24, h=512, values=Values.AIMED)
    kernel = kernel_of("act_quant", right)
    assert not red(kernel, case)
    made = kernel.stage.reference(case, kernel.stage.inputs(case), OURS)
    finite = made["codes"][~low.is_nan(made["codes"])]
    assert int((finite & 0x7F).max()) == 0x77

    def other(call: Call) -> dict[str, Tensor]:
        x, part = call.inputs.x, OURS.of("act_quant", QuantRecipe)
        return vars(act_quant(x, part, group=call.case.group, form=E4M3))

    assert "expected 0x" in red(kernel_of("act_quant", other), case)["exact"]


# --- chips ---------------------------------------------------------------------------------------


def test_a_gpu_without_a_model_accuses_nothing(monkeypatch: pytest.MonkeyPatch):
    """Kernels whose bits depend on the chip are skipped with one sentence, the others run."""
    monkeypatch.setattr(environment, "gpu", lambda: environment.Gpu("RTX 4090", "sm_89", "1"))
    sentence = "sm_89: the FP8 unit of Ada takes 16 products a step, its model is not here."
    skipped = set()
    for kernel in all_kernels():
        case = next(kernel.stage.witness_cases(), Case(m=3, e=4, k=2, h=256, i=256))
        reason = skip_of(kernel, case, "cuda")
        if reason is not None and reason.why is Why.NEEDS_CHIP and "sm_89" in reason.sentence:
            assert reason.sentence == f"{kernel.name}: {sentence}"
            skipped.add(kernel.name)
    ours = {name for name in skipped if name.startswith("ours_")}
    assert ours == {
        "ours_fc1_decode", "ours_fc1_large", "ours_fc2_decode", "ours_fc2_large", "ours_swiglu",
        "ours_swiglu_quant", "ours_swiglu_quant_after", "ours_swiglu_quant_limits",
        "ours_swiglu_quant_scalar", "ours_decode", "ours_large", "ours_fc1_batched",
        "ours_swiglu_quant_batched", "ours_fc2_sorted", "ours_sorted", "ours_fc1_prefix",
        "ours_fc2_prefix", "ours_swiglu_quant_prefix", "ours_prefix_sum",
        "ours_quant_gemm",
    }  # fmt: skip
    assert skip_of(find("ours_act_quant"), Case(m=3), "cuda") is None


def test_every_chip_says_what_it_is():
    assert why_not_modelled("sm_90") is None
    assert why_not_modelled("sm_77") == "sm_77: its units and tables were never measured, its model is not here"  # fmt: skip  # noqa: E501
    data = ROOT / "references/arithmetic/data"
    for chip in CHIPS.values():
        assert chip.units
        assert all((data / file).is_file() for file in chip.tables.values())
