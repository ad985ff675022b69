"""The builder that Triton's language drives here in place of its IR builder: values, not IR.

What is exact in numpy is inherited from ``plain``.  A float operation asks ``lowering`` which
instructions it compiles to under the installed Triton and ``models`` what those compute.  A method
that neither class has does not exist: calling it raises, so an operation this package has never
heard of stops the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import triton
import triton.language as tl
from triton._C.libtriton import ir

from moe_parity.kernels.virtual_gpu import abreast, contraction, lowering, models
from moe_parity.kernels.virtual_gpu.atomics import AtomicOperations
from moe_parity.kernels.virtual_gpu.descriptors import DescriptorOperations
from moe_parity.kernels.virtual_gpu.errors import UnmodelledOperation, unmodelled
from moe_parity.kernels.virtual_gpu.memory import Memory
from moe_parity.kernels.virtual_gpu.order import Order
from moe_parity.kernels.virtual_gpu.plain import PlainOperations
from moe_parity.kernels.virtual_gpu.values import Array, Value, numpy_type, signature_name
from moe_parity.references.chips import Unit, tensor_core

_IMPRECISE = 2**30
"""Triton's default for E4M3 dots on sm_90: the accumulator never leaves the unit."""

_FOLDED = {"fdiv", "precise_divf", "exp", "exp2", "log2", "__nv_expf"}
"""Operations that the compiler's own folding of constants would round otherwise."""

_NO_OPS = ("griddepcontrol.wait; // dummy $0", "griddepcontrol.launch_dependents; // dummy $0")
"""Inline assembly that moves no value: programs run one after another here."""

_LIBDEVICE = {"__nv_expf"}
"""libdevice symbols with a probe; the rest raise."""

_FOUND: dict[tuple[bool, tuple[str, tuple[str, ...], str]], tuple[models.Model, str]] = {}
"""Whether products are contracted, operation and types -> model and instructions, of all launches:
to give Triton back to its compiler and take it again costs more than most operations."""


class VirtualBuilder(PlainOperations, DescriptorOperations, AtomicOperations):
    """One launch: its memory, the program that runs, and what it has used."""

    def __init__(
        self,
        memory: Memory,
        *,
        num_warps: int,
        read_unit: Callable[[], Unit],
        compiling: Callable[[], AbstractContextManager[None]],
        lanes: Order,
        contract: bool = False,
    ) -> None:
        """Prepare a launch.

        ``compiling`` gives a context in which Triton's compiler may run, ``read_unit`` the unit
        of the kernel's dots, ``lanes`` the order of atomics within a block.
        ``contract`` makes an FMA of a product and an addition, as Triton does by default.
        """
        self.contract = contract
        self.block = 0
        """Counts stretches of straight-line code: no contraction across their ends."""
        self.memory = memory
        self.lanes = lanes
        self.program = (0, 0, 0)
        """That runs, or the first of those that run as one."""
        self._ids: list[Array] = []
        self.grid = (1, 1, 1)
        self.unit: Unit | None = None
        self.used: dict[str, str] = {}
        """Operation and types -> the instructions it stands for."""
        self.texts: dict[tuple[str, tuple[str, ...], str], str] = {}
        self._read_unit = read_unit
        self._compiling = compiling
        self._models: dict[tuple[str, tuple[str, ...], str], models.Model] = {}
        self.codegen_fns = {"min_dot_size": lambda _a, _b: (1, 1, 1)}
        self.options = SimpleNamespace(
            arch="sm90",
            backend_name="cuda",
            debug=True,  # device_assert is checked
            sanitize_overflow=False,
            num_warps=num_warps,
            num_ctas=1,
            supported_fp8_dtypes=("fp8e5", "fp8e4nv", "fp8e4b15"),
            deprecated_fp8_dot_operand_dtypes=("fp8e4b15",),
            default_dot_input_precision="tf32",
            allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"),
            max_num_imprecise_acc_default=_IMPRECISE,
        )

    def take(self, programs: Array) -> None:
        """Say which programs run from here on, by their numbers [n]; axis 0 is the fastest."""
        x, y, _ = self.grid
        self._ids = [
            n.astype(np.int32) for n in (programs % x, programs // x % y, programs // (x * y))
        ]
        first_x, first_y, first_z = (int(n[0]) for n in self._ids)
        self.program = first_x, first_y, first_z

    def forget(self, used: dict[str, str]) -> None:
        """Go back to what had been used: an operation that comes again is entered again."""
        self.used, self._models = used, {}

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        """Stand in for every builder method that has no model."""
        if not name.startswith(("create_", "get_")):
            raise AttributeError(name)
        return lambda *_, **__: unmodelled(name.removeprefix("create_"))

    # float operations --------------------------------------------------------------------------

    def _float(self, op: str, *arguments: Value, to: Any = None, variant: str = "") -> Value:
        """Apply the model of ``op``; ``variant`` names the probe where a constant matters."""
        constant = all(a.constant for a in arguments)
        if constant and op in _FOLDED:
            raise UnmodelledOperation(
                f"{op} of compile-time constants is folded by the compiler, not computed on the "
                "GPU: compute it in Python and pass the result as a constexpr."
            )
        inputs = tuple(signature_name(a.dtype) for a in arguments)
        target = arguments[-1].dtype if to is None else to
        key = (op + variant, inputs, signature_name(target))
        model = self._models.get(key) or self._find(key)
        data = [a.data for a in arguments]
        if any(x.ndim != data[0].ndim for x in data):
            data = list(abreast.level(*data))
        result = Value(model(*data), target, constant)
        if self.contract:
            contraction.mark(op, self.texts[key], arguments, result, self.block)
        return result

    def _find(self, key: tuple[str, tuple[str, ...], str]) -> models.Model:
        known = self.contract, key
        if known not in _FOUND:
            _FOUND[known] = self._look_up(key)
        model, text = _FOUND[known]
        op, inputs, output = key
        self._models[key] = model
        self.texts[key] = text
        self.used[f"{op} {' '.join(inputs)} -> {output}"] = text
        return model

    def _look_up(self, key: tuple[str, tuple[str, ...], str]) -> tuple[models.Model, str]:
        op, inputs, output = key
        with self._compiling():
            text = lowering.instructions(op, inputs, output)
            if self.contract:
                contraction.check(
                    op, text, lowering.instructions(op, inputs, output, contracted=True)
                )
        model = models.find(text, output)
        if model is None:
            raise UnmodelledOperation(
                f"{op} of {', '.join(inputs)} compiles to `{text}` under Triton "
                f"{triton.__version__}, which has no exact model here; use another operation, or "
                "add the sequence to kernels/virtual_gpu/models.py once it is measured."
            )
        return model, text

    def create_fadd(self, a: Value, b: Value) -> Value:
        """Return ``a + b``, one FMA where one of them is a product to be contracted."""
        fused = contraction.addition(a, b, self.block)
        return self._float("fma", *fused) if fused else self._float("fadd", a, b)

    def create_fsub(self, a: Value, b: Value) -> Value:
        """Return ``a - b``; up to Triton 3.7 ``-b`` comes here too, as ``0 - b``."""
        contraction.refuse(a, b)
        return self._float("fsub", a, b)

    def create_fmul(self, a: Value, b: Value) -> Value:
        """Return ``a * b``."""
        return self._float("fmul", a, b)

    def create_fneg(self, a: Value) -> Value:
        """Return ``-a``, from Triton 3.8 on."""
        return self._float("fneg", a)

    def create_fabs(self, a: Value) -> Value:
        """``tl.abs``."""
        return self._float("fabs", a)

    def create_fma(self, a: Value, b: Value, c: Value) -> Value:
        """``tl.fma``."""
        return self._float("fma", a, b, c)

    def create_fdiv(self, a: Value, b: Value) -> Value:
        """Return ``a / b``: another instruction for a constant b from Triton 3.9 on."""
        variant = "_constant" if b.constant else "_of_constant" if a.constant else ""
        return self._float("fdiv", a, b, variant=variant)

    def create_precise_divf(self, a: Value, b: Value) -> Value:
        """``tl.math.div_rn``."""
        return self._float("precise_divf", a, b, variant="_constant" if b.constant else "")

    def create_clampf(self, x: Value, low: Value, high: Value, nan: Any) -> Value:
        """``tl.clamp``.

        A range known to be symmetric takes another instruction, which treats a NaN in another
        way.  Whether the compiler knows is certain for constants only.
        """
        propagate = nan != ir.PROPAGATE_NAN.NONE
        variant = "_nan" if propagate else ""
        value, bottom, top = (models.widen(v.data, v.dtype.name) for v in (x, low, high))
        abreast.alone("tl.clamp", low, high)
        opposite = bool((bottom == -top).all())
        if opposite and low.constant and high.constant:
            variant += "_symmetric"
        elif opposite and (np.isnan(value).any() or not (top > 0).all()):
            raise UnmodelledOperation(
                "tl.clamp to a range that is symmetric but not constant met a NaN or a limit that "
                "is not positive, and the instruction for it depends on the compiler: write "
                "tl.minimum(tl.maximum(x, low), high)."
            )
        return self._float("clampf", x, low, high, variant=variant)

    # casts -------------------------------------------------------------------------------------

    def _cast(self, a: Value, ty: Any, rounding: Any = None) -> Value:
        if rounding is not None and rounding != ir.ROUNDING_MODE.RTNE:
            unmodelled(f"a cast of {a.dtype} to {ty.scalar} rounded toward zero")
        if a.constant and a.dtype.is_int() and not a.data.any():
            return Value(np.zeros(a.data.shape, numpy_type(ty)), ty.scalar, constant=True)
        return self._float("cast", a, to=ty.scalar)

    def create_fp_to_fp(self, a: Value, ty: Any, rounding: Any) -> Value:
        """Cast to or from FP8."""
        return self._cast(a, ty, rounding)

    def create_fp_trunc(self, a: Value, ty: Any) -> Value:
        """Round to a narrower float."""
        return self._cast(a, ty)

    create_fp_ext = create_si_to_fp = create_ui_to_fp = create_fp_to_si = create_fp_to_ui = (
        create_fp_trunc
    )

    # memory ------------------------------------------------------------------------------------

    def create_masked_load(
        self, pointer: Value, mask: Value | None, other: Value | None, *_: Any
    ) -> Value:
        """``tl.load``."""
        ty = pointer.dtype.element_ty
        data = self.memory.load(
            pointer,
            None if mask is None else mask.data,
            None if other is None else other.data,
            numpy_type(ty),
        )
        return Value(data, ty)

    def create_load(self, pointer: Value, *_: Any) -> Value:
        """``tl.load`` without a mask."""
        return self.create_masked_load(pointer, None, None)

    def create_masked_store(
        self, pointer: Value, value: Value, mask: Value | None, *_: Any
    ) -> None:
        """``tl.store``."""
        self.memory.store(pointer, value.data, None if mask is None else mask.data)

    def create_store(self, pointer: Value, value: Value, *_: Any) -> None:
        """``tl.store`` without a mask."""
        self.create_masked_store(pointer, value, None)

    # dot ---------------------------------------------------------------------------------------

    def create_dot(self, a: Value, b: Value, c: Value, precision: Any, imprecise: int) -> Value:
        """``tl.dot`` of two E4M3 blocks, the accumulator going into the unit."""
        if not (a.dtype.is_fp8e4nv() and b.dtype.is_fp8e4nv()):
            unmodelled(f"tl.dot of {a.dtype} and {b.dtype} (input precision {precision})")
        if not c.dtype.is_fp32() or a.data.ndim != 3 or imprecise != _IMPRECISE:
            unmodelled(
                f"tl.dot of {a.data.ndim - 1}-d blocks into {c.dtype} with "
                f"max_num_imprecise_acc={imprecise}"
            )
        if self.unit is None:
            with self._compiling():
                self.unit = self._read_unit()
        operands = [x.data for x in (a, b, c)]
        results = [
            tensor_core.dot(*map(models.tensor, program), unit=self.unit).numpy()
            for program in abreast.each(*operands)
        ]
        return Value(np.stack(results), tl.float32)

    # everything else ---------------------------------------------------------------------------

    def create_extern_elementwise(
        self, _lib: str, _path: str, symbol: str, args: list[Value], ty: Any, _pure: bool
    ) -> Value:
        """Call libdevice, where the function has a model."""
        if symbol not in _LIBDEVICE:
            unmodelled(f"libdevice's {symbol}")
        return self._float(symbol, *args, to=ty.scalar)

    def create_inline_asm(
        self, text: str, _constraints: str, _args: Any, types: list[Any], *_: Any
    ) -> Any:
        """Accept the assembly of ``gdc_wait`` and ``gdc_launch_dependents``, which does nothing."""
        if text not in _NO_OPS:
            unmodelled(f"inline assembly `{text.strip()}`")
        result = self.get_null_value(types[0])
        return SimpleNamespace(get_result=lambda _: result)

    def create_grid_dependency_wait(self) -> None:
        """``gdc_wait`` from Triton 3.9 on."""

    def create_grid_dependency_launch_dependents(self) -> None:
        """``gdc_launch_dependents`` from Triton 3.9 on."""

    def create_barrier(self) -> None:
        """Wait for nothing: a program is one thread here."""

    def create_get_program_id(self, axis: int) -> Value:
        """``tl.program_id``."""
        return Value(self._ids[axis], tl.int32)

    def create_get_num_programs(self, axis: int) -> Value:
        """``tl.num_programs``."""
        return Value(np.array([self.grid[axis]], np.int32), tl.int32)

    def create_assert(self, condition: Value, message: str) -> None:
        """``tl.device_assert``."""
        if not condition.data.all():
            raise AssertionError(f"a device_assert failed: {message}")

    def create_assume(self, condition: Value) -> None:
        """``tl.assume``: what the compiler is promised is checked."""
        if not condition.data.all():
            raise AssertionError("a tl.assume does not hold, so the compiled kernel is undefined")

    def create_print(self, prefix: str, _hex: bool, values: list[Value], *_: Any) -> None:
        """``tl.device_print``."""
        if self.memory.undo is not None:  # what is printed is not undone, not by one program either
            raise abreast.Alone("tl.device_print")
        print(self.program, prefix, *(v.data[0] for v in values))


def _simple(op: str, arity: int, output: Any = None) -> Callable[..., Value]:
    def method(self: VirtualBuilder, *arguments: Value) -> Value:
        result = self._float(op, *arguments[:arity], to=output)
        if output is None:
            return result
        return Value(result.data.astype(bool), tl.int1)

    return method


for _op in ("exp", "exp2", "log2", "floor", "ceil"):
    setattr(VirtualBuilder, f"create_{_op}", _simple(_op, 1))
for _op in ("maxnumf", "minnumf", "maximumf", "minimumf"):
    setattr(VirtualBuilder, f"create_{_op}", _simple(_op, 2))
for _op in ("OLT", "OLE", "OGT", "OGE", "OEQ", "UNE"):
    setattr(VirtualBuilder, f"create_fcmp{_op}", _simple(f"fcmp{_op}", 2, tl.int32))
