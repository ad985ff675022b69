"""``silu(gate) * up`` in torch's own ops, as it stands in a graph: where our op has its bits.

torch rounds SiLU to BF16 and then the product, which is our op's form "torch".  Two kinds of graph
have SiLU whole: Dynamo's (Inductor's pass before the gradients), in which a tensor may be written
in place, and the functional one of AOTAutograd without decompositions.  After its gradients
Inductor has taken SiLU apart, and what it generates from the parts has bits of its own.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

_ATEN = torch.ops.aten
SILU = (torch.nn.functional.silu, _ATEN.silu, _ATEN.silu.default)
PRODUCT = (operator.mul, torch.mul, torch.multiply, _ATEN.mul, _ATEN.mul.Tensor)
READS = (
    *SILU, *PRODUCT, operator.getitem, torch.chunk, torch.split,
    torch.tensor_split, torch.narrow, _ATEN.slice, _ATEN.split,
)  # fmt: skip
"""Functions without a schema, in Dynamo's graph, that write nothing."""
READING_METHODS = ("chunk", "split", "tensor_split", "narrow", "mul")
PARTS = (_ATEN.exp.default, _ATEN.sigmoid.default)
QUOTIENTS = (_ATEN.div.Tensor, _ATEN.mul.Tensor)
"""What SiLU is taken apart into, by all versions of torch."""

TAKEN_APART = (
    "SiLU is taken apart here, and what Inductor makes of the parts is not rounded as torch's own "
    "kernels round it; give the pass to Inductor as pre_grad_custom_pass too."
)
ELSEWHERE = "SiLU or its product is used elsewhere too."
IN_PLACE = "SiLU is written into its gate."
UNKNOWN = "the graph does not say which shapes its tensors have."
DTYPE = "the rows are not BF16."
HALVES = "gate and up are not the first and the second half of contiguous rows [P, 2 * I]."
WRITTEN = "something between the halves and their product may write to them."
ON_A_CPU = (
    "on a CPU torch's SiLU takes another exponential, and nothing holds its bits to a GPU's, which "
    "the fused op has; SwigluQuantFusion(cpu=True) fuses it all the same."
)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A SiLU times something, in a graph."""

    mul: fx.Node
    silu: fx.Node
    up: fx.Node

    def why_not(self, *, cpu: bool) -> str | None:
        """Return why our op on the rows may have other bits; None where it has not.

        ``cpu`` takes tensors of a CPU for those of a GPU.
        """
        if len(self.mul.users) > 1 or len(self.silu.users) > 1:
            return ELSEWHERE
        if self.silu.kwargs.get("inplace") or any(self.silu.args[1:]):
            return IN_PLACE
        gate, up, rows = _seen(self.gate), _seen(self.up), _seen(self.rows)
        if gate is None or up is None:
            return UNKNOWN
        if any(seen.dtype is not torch.bfloat16 for seen in (gate, up)):
            return DTYPE
        if rows is None or not _are_halves(rows, gate, up):
            return HALVES
        if rows.device.type != "cuda" and not cpu:
            return ON_A_CPU
        return WRITTEN if self._may_be_written() else None

    @property
    def gate(self) -> Any:
        """What SiLU is of."""
        return self.silu.args[0] if self.silu.args else self.silu.kwargs.get("input")

    @property
    def rows(self) -> fx.Node | None:
        """What gate and up are both cut from, by one node or by a list of parts."""
        found = _cut_from(self.gate)
        return found if found is _cut_from(self.up) else None

    def erase(self) -> None:
        """Take the product out of its graph, and what is of no other use."""
        rows, parts = self.rows, [self.gate, self.up]
        parts += [part.all_input_nodes[0] for part in parts]
        for node in dict.fromkeys((self.mul, self.silu, *parts)):
            if node is not rows and not node.users:
                node.graph.erase_node(node)

    def _may_be_written(self) -> bool:
        """Whether anything from the first half to the product might write: the op reads once."""
        order = list(self.mul.graph.nodes)
        first = min(map(order.index, (self.gate, self.up)))
        return not all(map(_only_reads, order[first : order.index(self.mul)]))


def product_of(x: Any) -> Product | None:
    """Return the product of a SiLU that a node is, either factor first."""
    for silu, up in _factors(x):
        if silu.target in SILU:
            return Product(mul=x, silu=silu, up=up)
    return None


def is_taken_apart(x: Any) -> bool:
    """Whether a node is a product with what Inductor makes of SiLU, rounded to BF16.

    That is g / (1 + exp(-g)) or g * sigmoid(g), by torch's version, in fp32.
    """
    for rounded, _ in _factors(x):
        for whole in rounded.all_input_nodes:
            if whole.target not in QUOTIENTS or len(whole.all_input_nodes) != 2:
                continue
            gate, below = whole.all_input_nodes
            above = {below: None}
            for _ in range(3):
                above |= dict.fromkeys(n for node in above for n in node.all_input_nodes)
            if gate in above and any(node.target in PARTS for node in above):
                return True
    return False


def _factors(x: Any) -> list[tuple[fx.Node, fx.Node]]:
    """Return the two factors of a product, in both orders; nothing of what is no product."""
    if not isinstance(x, fx.Node) or x.kwargs or len(x.args) != 2:
        return []
    one, other = x.args
    multiplies = x.target in PRODUCT or (x.op == "call_method" and x.target == "mul")
    if not multiplies or not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return []
    return [(one, other), (other, one)]


def _seen(node: Any) -> Tensor | None:
    """Return the tensor without values that a graph knows of a node."""
    if not isinstance(node, fx.Node):
        return None
    seen = node.meta.get("val", node.meta.get("example_value"))
    return seen if isinstance(seen, Tensor) else None


def _cut_from(part: Any) -> fx.Node | None:
    """Return what a part is cut from, through the list of parts where there is one."""
    for _ in range(2):
        if not isinstance(part, fx.Node) or not part.all_input_nodes:
            return None
        part = part.all_input_nodes[0]
        if _seen(part) is not None:
            break
    return part if isinstance(part, fx.Node) else None


def _are_halves(rows: Tensor, gate: Tensor, up: Tensor) -> bool:
    """Whether gate and up are the memory of the two halves: whichever ops cut them."""
    if rows.dim() != 2 or type(rows.shape[1]) is not int or rows.stride() != (rows.shape[1], 1):
        return False
    width, start = rows.shape[1] // 2, rows.storage_offset()
    shape = (rows.shape[0], width)
    return rows.shape[1] == 2 * width and all(
        part.shape == shape
        and part.stride() == rows.stride()
        and part.storage_offset() == start + offset
        and part.untyped_storage()._cdata == rows.untyped_storage()._cdata
        and not part.is_neg()
        for part, offset in ((gate, 0), (up, width))
    )


def _only_reads(node: fx.Node) -> bool:
    """Whether a node is known to write to no tensor."""
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op == "call_method":
        return node.target in READING_METHODS
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable
    return node.target in READS and "out" not in node.kwargs and not node.kwargs.get("inplace")
