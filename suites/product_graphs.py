"""Graphs in which ``silu(gate) * up`` in torch's own ops is quantized: fused, and left alone."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parity.suites.test_fusion import QUANT, SWIGLU, WIDTH, Model, Outputs, both  # isort: skip
from moe_parity.kernels.ours import torch_product as product  # isort: skip

silu = torch.nn.functional.silu
PLAIN = (128, "fp32", "row")

# --- what is fused --------------------------------------------------------------------------------


def by_slices(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :WIDTH]) * rows[:, WIDTH:], *PLAIN)


def up_first(rows: Tensor) -> Outputs:
    return QUANT(rows[..., WIDTH:] * silu(rows[..., :WIDTH]), *PLAIN)


def by_chunk(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, -1)
    return QUANT(torch.mul(silu(gate), up), *PLAIN)


def by_split(rows: Tensor) -> Outputs:
    gate, up = torch.split(rows, WIDTH, dim=-1)
    return QUANT(up.mul(silu(gate, inplace=False)), *PLAIN)


def by_tensor_split(rows: Tensor) -> Outputs:
    gate, up = torch.tensor_split(rows, 2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def by_sections(rows: Tensor) -> Outputs:
    gate, up = rows.split([WIDTH, WIDTH], 1)
    return QUANT(silu(gate) * up, *PLAIN)


def as_aten_ops(rows: Tensor) -> Outputs:
    aten = torch.ops.aten
    gate, up = aten.slice(rows, 1, 0, WIDTH), aten.slice(rows, 1, WIDTH)
    return torch.ops.moe_parity.act_quant(aten.mul(aten.silu(gate), up), *PLAIN)


def a_part_of_a_larger_tensor(rows: Tensor) -> Outputs:
    """Rows that are whole do not start where their memory does."""
    gate, up = rows[2:].chunk(2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def written_afterwards(rows: Tensor) -> Outputs:
    """Put the fused op where the product stood, and it reads what that read."""
    y = silu(rows[:, :WIDTH]) * rows[:, WIDTH:]
    rows.mul_(3)
    return QUANT(y, *PLAIN)


def our_op_in_torchs_form(rows: Tensor) -> Outputs:
    return QUANT(SWIGLU(rows, None, 0, 1, "none", 0.0, None, 1.0, 0.0, "torch"), *PLAIN)


FUSED = [
    by_slices, up_first, by_chunk, by_split, by_tensor_split, by_sections, as_aten_ops,
    a_part_of_a_larger_tensor, written_afterwards, our_op_in_torchs_form,
]  # fmt: skip


# --- what is not fused ----------------------------------------------------------------------------


def second_half_first_by_slices(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, WIDTH:]) * rows[:, :WIDTH], *PLAIN)


def second_half_first(rows: Tensor) -> Outputs:
    up, gate = rows.chunk(2, -1)
    return QUANT(silu(gate) * up, *PLAIN)


def short_slices(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :128]) * rows[:, WIDTH : WIDTH + 128], *PLAIN)


def neighbours(rows: Tensor) -> Outputs:
    """Cut the shape of halves in another place."""
    return QUANT(silu(rows[:, 128 : WIDTH + 128]) * rows[:, WIDTH:], *PLAIN)


def every_other_column(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, ::2]) * rows[:, 1::2], *PLAIN)


def every_other_row(rows: Tensor) -> Outputs:
    gate, up = rows[::2].chunk(2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def halves_of_the_rows(rows: Tensor) -> Outputs:
    gate, up = rows[:4].chunk(2, 0)
    return QUANT(silu(gate) * up, *PLAIN)


def columns_that_are_rows(rows: Tensor) -> Outputs:
    gate, up = rows.t().contiguous().t().chunk(2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def rows_with_gaps(rows: Tensor) -> Outputs:
    gate, up = torch.cat((rows, rows), 1)[:, : 2 * WIDTH].chunk(2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def three_dimensions(rows: Tensor) -> Outputs:
    pairs = rows.view(5, 2, WIDTH)
    return QUANT(silu(pairs[:, 0]) * pairs[:, 1], *PLAIN)


def batched_rows(rows: Tensor) -> Outputs:
    """Quantized through a view."""
    gate, up = rows.view(1, 5, 2 * WIDTH).chunk(2, -1)
    return QUANT((silu(gate) * up).view(5, WIDTH), *PLAIN)


def a_copy_of_the_gate(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, list(range(WIDTH))]) * rows[:, WIDTH:], *PLAIN)


def one_column_of_up(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :WIDTH]) * rows[:, WIDTH : WIDTH + 1], *PLAIN)


def up_of_another_tensor(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :WIDTH]) * (rows + 1)[:, WIDTH:], *PLAIN)


def gate_and_gate(rows: Tensor) -> Outputs:
    gate = rows[:, :WIDTH]
    return QUANT(silu(gate) * gate, *PLAIN)


def clamped_gate(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :WIDTH].clamp(max=1.0)) * rows[:, WIDTH:], *PLAIN)


def clamped_product(rows: Tensor) -> Outputs:
    return QUANT((silu(rows[:, :WIDTH]) * rows[:, WIDTH:]).clamp(-1.0, 1.0), *PLAIN)


def in_half(rows: Tensor) -> Outputs:
    gate, up = rows.half().chunk(2, 1)
    return QUANT(silu(gate) * up, *PLAIN)


def rounded_once(rows: Tensor) -> Outputs:
    """In fp32 up to the product: other bits than torch's form has."""
    gate, up = rows.chunk(2, 1)
    return QUANT(silu(gate.float()) * up.float(), *PLAIN)


def another_activation(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    return QUANT(torch.nn.functional.gelu(gate) * up, *PLAIN)


def silu_is_needed(rows: Tensor) -> Outputs:
    s = silu(rows[:, :WIDTH])
    return (*both(QUANT(s * rows[:, WIDTH:], *PLAIN)), s)


def product_is_needed(rows: Tensor) -> Outputs:
    """LoRA adds to the BF16 activation."""
    y = silu(rows[:, :WIDTH]) * rows[:, WIDTH:]
    return (*both(QUANT(y, *PLAIN)), y)


def product_is_quantized_twice(rows: Tensor) -> Outputs:
    y = silu(rows[:, :WIDTH]) * rows[:, WIDTH:]
    return (*both(QUANT(y, *PLAIN)), *both(QUANT(y, 64, "ue8m0", "row")))


def product_is_changed(rows: Tensor) -> Outputs:
    y = silu(rows[:, :WIDTH]) * rows[:, WIDTH:]
    y.mul_(0.75)
    return QUANT(y, *PLAIN)


def silu_is_changed(rows: Tensor) -> Outputs:
    s = silu(rows[:, :WIDTH])
    s.mul_(0.75)
    return QUANT(s * rows[:, WIDTH:], *PLAIN)


def silu_in_place(rows: Tensor) -> Outputs:
    return QUANT(silu(rows[:, :WIDTH], inplace=True) * rows[:, WIDTH:], *PLAIN)


def up_is_written_after_silu(rows: Tensor) -> Outputs:
    """Neither place is right for one op: SiLU reads before, the product after."""
    s = silu(rows[:, :WIDTH])
    rows.mul_(3)
    return QUANT(s * rows[:, WIDTH:], *PLAIN)


def a_view_is_written_after_silu(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    s = silu(gate)
    rows[1:, WIDTH:].fill_(0.5)
    return QUANT(s * up, *PLAIN)


def up_is_assigned_after_silu(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    s = silu(gate)
    rows[1:, WIDTH:] = 0.5
    return QUANT(s * up, *PLAIN)


def up_is_written_by_an_op_after_silu(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    s = silu(gate)
    torch.ops.aten.mul_.Tensor(up, 3)
    return QUANT(s * up, *PLAIN)


def up_is_an_output_after_silu(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    s = silu(gate)
    torch.mul(rows, 3, out=rows)
    return QUANT(s * up, *PLAIN)


def up_is_written_by_silu_after_silu(rows: Tensor) -> Outputs:
    gate, up = rows.chunk(2, 1)
    s = silu(gate)
    silu(up, inplace=True)
    return QUANT(s * up, *PLAIN)


SAID: dict[Model, list[str]] = {
    second_half_first: [product.HALVES],
    short_slices: [product.HALVES],
    neighbours: [product.HALVES],
    every_other_column: [product.HALVES],
    every_other_row: [product.HALVES],
    halves_of_the_rows: [product.HALVES],
    columns_that_are_rows: [product.HALVES],
    rows_with_gaps: [product.HALVES],
    three_dimensions: [product.HALVES],
    batched_rows: [],
    a_copy_of_the_gate: [product.HALVES],
    one_column_of_up: [product.HALVES],
    up_of_another_tensor: [product.HALVES],
    gate_and_gate: [product.HALVES],
    clamped_gate: [product.HALVES],
    clamped_product: [],
    in_half: [product.DTYPE],
    rounded_once: [product.DTYPE],
    another_activation: [],
    silu_is_needed: [product.ELSEWHERE],
    product_is_needed: [product.ELSEWHERE],
    product_is_quantized_twice: [product.ELSEWHERE] * 2,
    product_is_changed: [product.ELSEWHERE],
    silu_is_changed: [product.ELSEWHERE],
    silu_in_place: [product.IN_PLACE],
    up_is_written_after_silu: [product.WRITTEN],
    a_view_is_written_after_silu: [product.WRITTEN],
    up_is_assigned_after_silu: [product.WRITTEN],
    up_is_written_by_an_op_after_silu: [product.WRITTEN],
    up_is_an_output_after_silu: [product.WRITTEN],
    up_is_written_by_silu_after_silu: [product.WRITTEN],
}
"""What is said of each in Dynamo's graph; nothing where the product is not what is quantized."""
