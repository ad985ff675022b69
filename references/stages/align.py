"""The stage ``align``: pairs sorted into blocks of one expert each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_parity.references.arithmetic.formats import BLOCK, WHOLE_SCALES
from moe_parity.references.language.case import Case, Hazard, Values
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Acting, Recipe
from moe_parity.references.language.stage import Kind, Output, Outputs, Reads, Stage
from moe_parity.references.stages.gemm.stage import operand
from moe_parity.references.stages.hazards import surround
from moe_parity.references.stages.mistakes import placing
from moe_parity.references.stages.mistakes.placing_told import align_told
from moe_parity.references.stages.owned import CODES, IDS, Own, experts_of
from moe_parity.references.stages.routing import draw_ids, expert_map, local_expert, place

FEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class RoutedRows:
    """Quantized rows and where they go: the input of ``align`` and ``permute``."""

    codes: Tensor
    """E4M3 codes [M, H], uint8."""
    scales: Tensor
    """fp32 [M, H / 128], in ``permute`` with the strides of the case's layout."""
    ids: Tensor
    """Global expert ids int32 [M, k]."""
    expert_map: Tensor | None
    """int32 [E]: the local expert of a global one, or -1; None where the rank owns all."""
    expert: Tensor
    """The local expert of each pair, int64 [P]; -1 where the rank does not own it."""
    first: int
    """The global id of expert 0."""
    experts: int
    """Local experts."""
    block: int
    """Rows of a block of ``align``: 16 for up to 64 tokens, else 64, as vLLM's default has it."""


def routed_rows(case: Case, device: str) -> RoutedRows:
    """Return quantized rows [m, h] and their routing."""
    codes, scales = operand(case, "a", case.m, case.h, 1, device)
    ids = draw_ids(case, device)
    return RoutedRows(
        codes=codes, scales=scales, ids=ids, expert_map=expert_map(case, device),
        expert=local_expert(ids, case.first_expert, case.local_experts),
        first=case.first_expert, experts=case.local_experts,
        block=16 if case.m <= FEW_TOKENS else 64,
    )  # fmt: skip


class Align(Stage[RoutedRows]):
    """Sort pairs into blocks; inside an expert they keep their order."""

    name = "align"
    reads: ClassVar[Reads] = {
        **dict.fromkeys(("m", "e", "k", "h", "ep_rank", "ep_size", "routing")),
        "scale": WHOLE_SCALES,
        "values": frozenset({Values.NORMAL, Values.AIMED}),
        "hazard": frozenset(Hazard) - {Hazard.STRIDED, Hazard.TRANSPOSED, Hazard.FAR},
    }
    acting: ClassVar[Acting] = {}
    sizes: ClassVar[tuple[str, ...]] = ("m", "e", "k")

    def inputs(self, case: Case, device: str = "cpu") -> RoutedRows:
        """Return the routing of m tokens."""
        return surround(routed_rows(self.check(case), device), case.hazard)

    def given(self, case: Case, tensors: Mapping[str, Tensor]) -> tuple[Case, RoutedRows]:
        """Take ``ids`` [M, k]; ``codes`` [M, H] and ``scales`` [M, H / 128] where they matter."""
        own = Own(self.name, tensors)
        ids = own.take("ids", 2, IDS).int()
        tokens, fp32 = ids.shape[0], (torch.float32,)
        codes = torch.zeros((tokens, BLOCK), dtype=torch.uint8, device=ids.device)
        scales = torch.ones((tokens, 1), device=ids.device)
        if "codes" in own or self.name != "align":
            codes = own.take("codes", 2, CODES, (tokens,))
            scales = own.take("scales", 2, fp32, (tokens, -(-codes.shape[1] // BLOCK)))
        e = experts_of(case, ids)
        case = dataclasses.replace(case, m=tokens, k=ids.shape[1], e=e, h=codes.shape[1])
        made = routed_rows(dataclasses.replace(case, m=0), str(ids.device))
        expert = local_expert(ids, case.first_expert, case.local_experts)
        block = 16 if tokens <= FEW_TOKENS else 64
        return case, dataclasses.replace(
            made, codes=codes, scales=scales, ids=ids, expert=expert, block=block
        )

    def cost(self, case: Case) -> int:
        """Count a third of what counts and places an expert's pairs, 512 at a time.

        These programs only compare integers: six of them take what one of a GEMM does.
        """
        return 1 + case.local_experts * -(-case.m * case.k // 512) // 3

    def witness_cases(self) -> Iterator[Case]:
        """Yield eight experts a token."""
        yield Case(m=24, e=8, k=8, h=256, values=Values.AIMED, seed=11)

    def outputs(self, case: Case, inputs: RoutedRows) -> Mapping[str, Output]:
        """Return the expert of each block in use, and the pairs in their slots."""
        placed = place(inputs.expert, inputs.experts, inputs.block)

        def integers(count: int, axis: str) -> Output:
            return Output(
                kind=Kind.INTEGERS,
                shape=(count,),
                dtype=torch.int32,
                axes=(axis,),
                any_length=True,
            )

        return {
            "experts": integers(placed.used // inputs.block, "block"),
            "slots": integers(placed.used, "slot"),
        }

    def reference(self, case: Case, inputs: RoutedRows, recipe: Recipe) -> dict[str, Tensor]:
        """Return blocks and slots; a slot without a pair holds P."""
        placed = place(inputs.expert, inputs.experts, inputs.block)
        return {"experts": placed.block_expert(), "slots": placed.pairs().int()}

    def mistakes(self, case: Case, inputs: RoutedRows, recipe: Recipe) -> Iterator[Mistake]:
        """Yield those of an alignment."""
        yield from placing.of_align(inputs, lambda given: self.reference(case, given, recipe))

    def told(self, case: Case, inputs: RoutedRows, got: Outputs) -> str:
        """Return which block, expert or pair is wrong."""
        return align_told(inputs, got)

    def sealed(self, inputs: RoutedRows) -> list[Tensor]:
        """Return rows and routing."""
        found = (inputs.codes, inputs.scales, inputs.ids, inputs.expert_map)
        return [tensor for tensor in found if tensor is not None]


ALIGN = Align()
