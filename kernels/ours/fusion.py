"""A pass over graphs of torch.compile: SwiGLU and its quantization become one op, same bits.

``moe_parity.swiglu`` whose only use is ``moe_parity.act_quant`` becomes ``moe_parity.swiglu_quant``
with the clamp of the one and the group, the scale format and the layout of the other.  What is not
exactly that stays as it is, and the pass says why (:attr:`SwigluQuantFusion.left`).

``silu(gate) * up`` in torch's own ops is left alone: torch rounds SiLU to BF16 before it
multiplies, ours multiplies in fp32 and rounds once, so that fusing would change bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from moe_parity.kernels.ours import ops

log = logging.getLogger("moe_parity")

_OURS = getattr(torch.ops, ops.NAMESPACE)
SWIGLU, ACT_QUANT, FUSED = _OURS.swiglu, _OURS.act_quant, _OURS.swiglu_quant.default


class SwigluQuantFusion(CustomGraphPass):
    """The pass: for Inductor's ``post_grad_custom_post_pass``, or called with any graph.

    ``fused`` counts what it replaced, ``left`` has a sentence for each quantized SwiGLU that it did
    not, over all graphs that it was called with.
    """

    def __init__(self) -> None:
        self.fused = 0
        self.left: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place."""
        for quant in list(graph.nodes):
            if not _calls(quant, ACT_QUANT):
                continue
            given = _arguments(quant, ACT_QUANT)
            swiglu = given["x"]
            if not _calls(swiglu, SWIGLU):
                continue
            reason = _why_not(swiglu, given)
            if reason is not None:
                sentence = f"{quant.name} of {swiglu.name} is not fused: {reason}"
                self.left.append(sentence)
                _say(sentence)
                continue
            _fuse(graph, swiglu, quant, given)
            self.fused += 1

    def uuid(self) -> Any:
        """Return what Inductor's cache of compiled graphs knows the pass by."""
        return get_hash_for_files((__file__,))


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
    if any(isinstance(quant[name], fx.Node) for name in ("group", "scale", "layout")):
        return "the group is not a constant."
    return None


def _fuse(graph: fx.Graph, swiglu: fx.Node, quant: fx.Node, given: dict[str, Any]) -> None:
    """Put the fused op where SwiGLU was: its rows may be written between the two."""
    kept = [given[name] for name in ("group", "scale", "layout")]
    taken = _arguments(swiglu, SWIGLU)
    with graph.inserting_before(swiglu):
        one = graph.call_function(FUSED, (*(taken[name] for name in _names(SWIGLU)), *kept))
    one.meta.update(quant.meta)
    _state_strides(one, swiglu, kept)
    quant.replace_all_uses_with(one)
    graph.erase_node(quant)
    graph.erase_node(swiglu)


def _state_strides(one: fx.Node, swiglu: fx.Node, kept: list[Any]) -> None:
    """Say with which strides eager mode calls the op: Inductor keeps to them."""
    eager = one.meta.pop("eager_input_vals", None)
    if eager is not None and "eager_input_vals" in swiglu.meta:
        args, named = swiglu.meta["eager_input_vals"]
        taken = {**dict(zip(_names(SWIGLU), args, strict=False)), **named}
        one.meta["eager_input_vals"] = ((*(taken[name] for name in _names(SWIGLU)), *kept), {})


@lru_cache(maxsize=64)
def _say(sentence: str) -> None:
    """Log a sentence once."""
    log.warning("%s", sentence)
