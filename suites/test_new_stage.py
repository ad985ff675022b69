"""A stage that is one object passes through every check, the ids and the records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from moe_parity.harness.checks.expect import expect
from moe_parity.harness.checks.flow import check
from moe_parity.harness.cli import new_kernel
from moe_parity.kernels import Call, registry
from moe_parity.references.arithmetic import random_bits
from moe_parity.references.arithmetic.formats import f32_to_bf16
from moe_parity.references.errors import ParityError
from moe_parity.references.language import Case, Recipe
from moe_parity.references.language.case import parse_id
from moe_parity.references.language.recipe import Acting
from moe_parity.references.language.stage import Kind, Output, Reads, Stage, Subset, every_second
from moe_parity.references.recipes.ours import NO_ROUNDING
from moe_parity.references.stages import STAGES


@dataclass(frozen=True, kw_only=True)
class Rows:
    """fp32 [m, h]."""

    x: Tensor


class Cast(Stage[Rows]):
    """Round rows to BF16."""

    name = "cast"
    reads: ClassVar[Reads] = {"m": None, "h": None}
    acting: ClassVar[Acting] = {}
    sizes = ("m", "h")

    def inputs(self, case: Case, device: str = "cpu") -> Rows:
        self.check(case)
        return Rows(x=random_bits.normal(case.seed, "cast", case.m, case.h, device=device))

    def cost(self, case: Case) -> int:
        return case.m

    def witness_cases(self) -> Iterator[Case]:
        yield Case(m=5)

    def outputs(self, case: Case, inputs: Rows) -> Mapping[str, Output]:
        shape = tuple(inputs.x.shape)
        return {
            "rows": Output(
                kind=Kind.VALUES, shape=shape, dtype=torch.bfloat16, axes=("token", "column"),
                noun="outputs",
            )
        }  # fmt: skip

    def reference(self, case: Case, inputs: Rows, recipe: Recipe) -> dict[str, Tensor]:
        return {"rows": f32_to_bf16(inputs.x)}

    def subsets(self, case: Case, inputs: Rows) -> Iterator[Subset]:
        odd = every_second(case.m, inputs.x)
        part = dataclasses.replace(case, m=odd.numel())
        yield Subset(case=part, inputs=Rows(x=inputs.x[odd]), rows={"rows": odd})


CAST = Cast()


def kernel_that(run: Any) -> registry.Kernel:
    registry.register("torch_cast", stage="cast", recipes=NO_ROUNDING)(run)
    return registry._KERNELS.pop("torch_cast")


@pytest.fixture(autouse=True)
def _one_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STAGES, "cast", CAST)


def rounds(call: Call) -> Tensor:
    return call.new("rows").copy_(call.inputs.x)


def truncates(call: Call) -> Tensor:
    cut = call.inputs.x.view(torch.int32) & -65536
    return call.new("rows").copy_(cut.view(torch.float32))


def test_a_new_stage_is_checked_like_the_others(parity_recorder):
    kernel, case = kernel_that(rounds), Case(m=9, h=64)
    expect(kernel, case, "cpu", parity_recorder, power=True)
    verdicts = {v.check: v for v in check(kernel, case, "cpu")}
    assert set(verdicts) == {
        "exact", "input_kept", "finite", "write_set", "rerun", "row_subset",
    }  # fmt: skip
    assert {v.verdict for v in verdicts.values()} == {"pass"}
    assert verdicts["exact"].compared == 9 * 64


def test_a_wrong_kernel_of_a_new_stage_is_red_in_its_words():
    case = Case(m=9, h=64)
    (red,) = [v for v in check(kernel_that(truncates), case, "cpu") if v.failed]
    start = (
        "Unexplained rows, each next to the one expected (cut, not rounded), in cast of torch_cast"
    )
    assert red.message.startswith(f"{start}: at token ")
    assert "of 576 outputs (at most 1 ulp)" in red.message
    assert parse_id(f"torch_cast-{case.id}")[1] == case
    assert CAST.refusal(Case(m=9, e=3)) == "cast does not read the word e (here 3)"


def test_a_new_stage_has_a_file_to_begin_with(tmp_path: Path):
    """`parity new-kernel` knows a stage by its description alone."""
    text = new_kernel.starter("mine", "cast")
    assert "    x  float32 [M, H]\n" in text
    assert "    rows  bfloat16 [M, H]\n" in text
    (tmp_path / "mine.py").write_text(text)
    (kernel,) = registry.load_file(tmp_path / "mine.py")
    del registry._KERNELS["mine"]
    assert {v.verdict for v in check(kernel, Case(m=9, h=64), "cpu")} == {"pass"}
    with pytest.raises(ParityError, match=r"^cast has no triton form: nobody has written one\."):
        new_kernel.starter("mine", "cast", "triton")
