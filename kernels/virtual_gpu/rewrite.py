"""The source of a ``@triton.jit`` function, rewritten to run as Python with the compiler's meaning.

Triton gives ``and``, ``not``, ``if``, chained comparisons and ``range`` a meaning on blocks and on
runtime scalars that plain Python objects cannot have, so these become calls of ``helpers``.  An
assignment turns a Python number into a constant tensor, as in the compiler.
"""

from __future__ import annotations

import ast
from types import CodeType
from typing import Any

HELPERS = "_virtual_gpu"
"""The global name under which a rewritten function finds its helpers."""


_code: dict[Any, CodeType] = {}


def rewritten(kernel: Any) -> CodeType:
    """Return the code object of a JITFunction's rewritten body; line numbers are the source's."""
    if kernel.fn in _code:
        return _code[kernel.fn]
    tree = kernel.parse()
    header = next(n for n, line in enumerate(kernel.raw_src) if line.lstrip().startswith("def "))
    ast.increment_lineno(tree, kernel.starting_line_number + header - 1)
    function = tree.body[0]
    function.returns = None
    function.args.defaults, function.args.kw_defaults = [], [None] * len(function.args.kwonlyargs)
    for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        argument.annotation = None
    tree = ast.fix_missing_locations(_Rewriter().visit(tree))
    module = compile(tree, kernel.fn.__code__.co_filename, "exec", dont_inherit=True)
    _code[kernel.fn] = next(c for c in module.co_consts if isinstance(c, CodeType))
    return _code[kernel.fn]


def _helper(name: str, *arguments: ast.expr) -> ast.Call:
    function = ast.Attribute(ast.Name(HELPERS, ast.Load()), name, ast.Load())
    return ast.Call(function, list(arguments), [])


def _delayed(value: ast.expr) -> ast.Lambda:
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(nothing, value)


class _Rewriter(ast.NodeTransformer):
    """One pass over a function body."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """``x = 1`` makes a constant tensor."""
        self.generic_visit(node)
        node.value = _helper("assigned", node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """``x += 1`` is ``x = x + 1``."""
        self.generic_visit(node)
        node.value = _helper("assigned", node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """``x: tl.constexpr = 1`` stays a Python value, any other annotation is dropped."""
        self.generic_visit(node)
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        constant = ast.unparse(node.annotation).endswith("constexpr")
        value = node.value if constant else _helper("assigned", node.value)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """``and`` and ``or`` are elementwise on tensors and short-circuit on constants."""
        self.generic_visit(node)
        first, *rest = node.values
        name = "all_of" if isinstance(node.op, ast.And) else "any_of"
        return ast.copy_location(_helper(name, first, *map(_delayed, rest)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """``not`` is elementwise on tensors."""
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            return ast.copy_location(_helper("negated", node.operand), node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Read ``a < b < c`` as ``(a < b) and (b < c)``."""
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        if not all(isinstance(m, (ast.Name, ast.Constant)) for m in node.comparators[:-1]):
            # The middle operand would run twice.
            return ast.copy_location(_helper("unsupported_chain"), node)
        left = [node.left, *node.comparators[:-1]]
        first, *rest = (
            ast.Compare(a, [op], [b])
            for a, op, b in zip(left, node.ops, node.comparators, strict=True)
        )
        return ast.copy_location(_helper("all_of", first, *map(_delayed, rest)), node)

    def visit_If(self, node: ast.If) -> ast.AST:
        """Take a scalar as condition."""
        return self._conditional(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        """Take a scalar as condition."""
        return self._conditional(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Take a scalar as condition."""
        return self._conditional(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """``assert`` is a device_assert."""
        self.generic_visit(node)
        message = node.msg or ast.Constant("")
        return ast.copy_location(ast.Expr(_helper("asserted", node.test, message)), node)

    def _conditional(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.test = _helper("truth", node.test)
        return node  # type: ignore[no-any-return]
