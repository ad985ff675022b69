"""A pass over graphs of torch.compile: SwiGLU and its quantization become one op, same bits.

``moe_parity.swiglu`` whose only use is ``moe_parity.act_quant`` becomes ``moe_parity.swiglu_quant``
with the clamp of the one and the group, the scale format and the layout of the other.  What is not
exactly that stays as it is, and the pass says why (:attr:`SwigluQuantFusion.left`).

``silu(gate) * up`` in torch's own ops is fused too, with the op's form "torch", which rounds as
torch's kernels do on a GPU (``torch_product``).  Inductor takes SiLU apart before its pass after
the gradients: give it the same pass as ``pre_grad_custom_pass``, where SiLU still stands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from moe_parity.kernels.ours import ops, torch_product
from moe_parity.kernels.ours.torch_product import Product, is_taken_apart, product_of

log = logging.getLogger("moe_parity")

_OURS = getattr(torch.ops, ops.NAMESPACE)
SWIGLU, ACT_QUANT, FUSED = _OURS.swiglu, _OURS.act_quant, _OURS.swiglu_quant.default


class SwigluQuantFusion(CustomGraphPass):
    """The pass: Inductor's ``pre_grad_custom_pass``, its ``post_grad_custom_post_pass``, or both.

    It may be called with any graph.  torch's own product is fused on CUDA tensors; ``cpu=True``
    fuses it on tensors of a CPU as well, with the bits that a GPU gives.  ``fused`` counts what it
    replaced, ``left`` has a sentence for each quantized SwiGLU that it did not, over all graphs
    that it was called with.
    """

    def __init__(self, *, cpu: bool = False) -> None:
        self.cpu = cpu
        self.fused = 0
        self.left: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place."""
        for quant in list(graph.nodes):
            if not _calls(quant, ACT_QUANT):
                continue
            given = _arguments(quant, ACT_QUANT)
            y = given["x"]
            product = product_of(y)
            if _calls(y, SWIGLU):
                reason = _why_not(y, given)
            elif product is not None:
                reason = _not_constant(given) or product.why_not(cpu=self.cpu)
            elif is_taken_apart(y):
                reason = torch_product.TAKEN_APART
            else:
                continue
            if reason is not None:
                sentence = f"{quant.name} of {y.name} is not fused: {reason}"
                self.left.append(sentence)
                _say(sentence)
                continue
            if product is None:
                _fuse(graph, y, quant, given)
            else:
                _fuse_product(graph, product, quant, given)
            self.fused += 1

    def uuid(self) -> Any:
        """Return what Inductor's cache of compiled graphs knows the pass by."""
        return get_hash_for_files((__file__, torch_product.__file__), str(self.cpu))


def fuse(module: fx.GraphModule) -> fx.GraphModule:
    """Apply the pass to a module, in place, for a backend of one's own; return the module."""
    SwigluQuantFusion()(module.graph)
    module.recompile()
    return module


def eager_backend(fusion: SwigluQuantFusion) -> Callable[..., Any]:
    """Return a backend of torch.compile that applies a pass and runs the graph as it then is.

    Nothing is generated, so it needs no compiler: ``torch.compile(f, backend=eager_backend(...))``.
    """
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    def run(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:  # noqa: ARG001
        fusion(module.graph)
        module.recompile()
        boxed: Callable[..., Any] = make_boxed_func(module.forward)
        return boxed

    made: Callable[..., Any] = aot_autograd(fw_compiler=run)
    return made


def _calls(node: Any, op: Any) -> bool:
    """Whether a node calls an op: as Dynamo writes it, or as a functional graph does."""
    return isinstance(node, fx.Node) and node.target in (op, op.default)


def _names(op: Any) -> list[str]:
    return [argument.name for argument in op.default._schema.arguments]


def _arguments(node: fx.Node, op: Any) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip(_names(op), node.args, strict=False)), **node.kwargs}


def _why_not(swiglu: fx.Node, quant: dict[str, Any]) -> str | None:
    """Return why the bits could differ, or a tensor be missing; None where they cannot."""
    if len(swiglu.users) > 1:
        return "the BF16 activation is used elsewhere too."
    if _arguments(swiglu, SWIGLU)["ids"] is not None:
        return "rows of other ranks would be quantized by one and left alone by the other."
    return _not_constant(quant)


def _not_constant(quant: dict[str, Any]) -> str | None:
    if any(isinstance(quant[name], fx.Node) for name in ("group", "scale", "layout")):
        return "the group is not a constant."
    return None


def _fuse(graph: fx.Graph, swiglu: fx.Node, quant: fx.Node, given: dict[str, Any]) -> None:
    """Put the fused op where SwiGLU was: its rows may be written between the two."""
    kept = {name: given[name] for name in ("group", "scale", "layout")}
    one = _replace(graph, swiglu, quant, _in_order({**_arguments(swiglu, SWIGLU), **kept}))
    if "eager_input_vals" in quant.meta and "eager_input_vals" in swiglu.meta:
        args, named = swiglu.meta["eager_input_vals"]
        taken = {**dict(zip(_names(SWIGLU), args, strict=False)), **named}
        one.meta["eager_input_vals"] = (_in_order({**taken, **kept}), {})
    graph.erase_node(swiglu)


def _fuse_product(
    graph: fx.Graph, product: Product, quant: fx.Node, given: dict[str, Any]
) -> None:  # fmt: skip
    """Put the fused op where torch's product was: its rows may be written between the two."""
    rest = (None, 0, 1, "none", 0.0, None, 1.0, 0.0)
    kept = (*rest, given["group"], given["scale"], given["layout"], "torch")
    one = _replace(graph, product.mul, quant, (product.rows, *kept))
    if "eager_input_vals" in quant.meta and product.rows is not None:
        one.meta["eager_input_vals"] = ((product.rows.meta["val"], *kept), {})
    product.erase()


def _in_order(named: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fused op's arguments; the last ones may be left to their defaults."""
    return tuple(named[name] for name in _names(_OURS.swiglu_quant) if name in named)


def _replace(graph: fx.Graph, at: fx.Node, quant: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    """Put the fused op at a node in place of the quantizer.

    Inductor keeps to the strides with which eager mode calls an op (``eager_input_vals``): the
    caller says them, those of the quantizer are dropped.
    """
    with graph.inserting_before(at):
        one = graph.call_function(FUSED, args)
    one.meta.update({name: said for name, said in quant.meta.items() if name != "eager_input_vals"})
    quant.replace_all_uses_with(one)
    graph.erase_node(quant)
    return one


@lru_cache(maxsize=64)
def _say(sentence: str) -> None:
    """Log a sentence once."""
    log.warning("%s", sentence)
