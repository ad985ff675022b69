"""Faults put into our prefix-sum kernels on purpose, each a hazard of rows that lie by expert.

A fault changes what a wrapper hands on, or one line in a copy of a kernel's file; the kernels that
are held to their checks are the registered ones.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_parity.kernels.ours import permute, permute_kernels, prefix_kernels, prefix_sum
from moe_parity.kernels.ours.permute import PrefixRows
from moe_parity.kernels.virtual_gpu import dispatch

GEMM, QUANT, COPY = "prefix_gemm_kernel", "prefix_quant_kernel", "copy_kernel"


@dataclass(frozen=True, kw_only=True)
class Planting:
    """Where a fault is put in."""

    patch: pytest.MonkeyPatch
    folder: Path
    kept: dict[Any, Any] = field(default_factory=dict)
    """What a faulty kernel keeps from call to call; cleared where a fresh process is meant."""

    def line(self, module: ModuleType, old: str, new: str) -> None:
        """Let a copy of a kernel's file be launched in which one line is changed."""
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        assert source.count(old) == 1, f"the line has changed, mend the fault: {old}"
        path = self.folder / f"planted_{Path(module.__file__).name}"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        for owner in (permute, prefix_sum):
            name = module.__name__.rpartition(".")[2]
            if hasattr(owner, name):
                self.patch.setattr(owner, name, copy)

    def launches(self, kernel: str, change: Callable[[Tensor], Tensor]) -> None:
        """Hand other ends of live rows to a kernel of the prefix-sum path."""

        def changed(launched: Any, grid: Any, *args: Any, **options: Any) -> Any:
            if launched.__name__ == kernel:
                at = launched.arg_names.index("ends_ptr")
                args = (*args[:at], change(args[at]), *args[at + 1 :])
            return dispatch(launched, grid, *args, **options)

        self.patch.setattr(prefix_sum, "dispatch", changed)

    def aligned(self, choose: Callable[[int], int]) -> None:
        """Compile another alignment into every kernel of the path than the one asked for."""

        def changed(launched: Any, grid: Any, *args: Any, **options: Any) -> Any:
            if "ALIGN" in options:
                options = {**options, "ALIGN": choose(options["ALIGN"])}
            return dispatch(launched, grid, *args, **options)

        for owner in (permute, prefix_sum):
            self.patch.setattr(owner, "dispatch", changed)

    def permuted(self, after: Callable[[PrefixRows], object]) -> None:
        """Do something to the rows that the permutation has laid out."""
        right = permute.permute

        def wrong(*given: Any, **options: Any) -> PrefixRows:
            made = right(*given, **options)
            after(made)
            return made

        self.patch.setattr(permute, "permute", wrong)


Plant = Callable[[Planting], None]


# --- stale ends, flags ----------------------------------------------------------------------------


def stale_ends(kernel: str) -> Plant:
    """Let a kernel take the ends of the first call of a shape."""

    def plant(planting: Planting) -> None:
        kept = planting.kept
        planting.launches(kernel, lambda ends: kept.setdefault(ends.shape, ends.clone()))

    return plant


def stale_ends_of_rows(planting: Planting) -> None:
    """Count the pairs of each expert in the first call of a shape alone."""
    kept = planting.kept

    def after(made: PrefixRows) -> None:
        made.ends.copy_(kept.setdefault((made.ends.shape, made.place.shape), made.ends.clone()))

    planting.permuted(after)


def surviving_flag(planting: Planting) -> None:
    """Set a flag on the device that says that places are known; nobody takes it back."""
    kept = planting.kept

    def after(made: PrefixRows) -> None:
        fresh = torch.zeros((), dtype=torch.bool, device=made.ends.device)
        done = kept.setdefault(made.ends.shape, fresh)
        mine = kept.setdefault((made.ends.shape, made.place.shape), made.ends.clone())
        mine.copy_(torch.where(done, mine, made.ends))
        made.ends.copy_(mine)
        done.fill_(True)

    planting.permuted(after)


# --- what is written ------------------------------------------------------------------------------


def line(module: ModuleType, old: str, new: str) -> Plant:
    return lambda planting: planting.line(module, old, new)


def zeroed_padding(planting: Planting) -> None:
    """Zero the last row of the buffer, as a padded layout would."""
    planting.permuted(lambda made: made.codes[-1].zero_())


GEMM_STORE = "mask=live[None, :] & (n < N)[:, None])"
gap_of_gemm = line(prefix_kernels, GEMM_STORE, "mask=(row >= 0)[None, :] & (n < N)[:, None])")
gap_of_quant = line(
    prefix_kernels, "tl.store(to, scale, mask=live)", "tl.store(to, scale, mask=inner >= 0)"
)
left_by_gemm = line(
    prefix_kernels, GEMM_STORE, "mask=(live & (row != end - 1))[None, :] & (n < N)[:, None])"
)
left_by_quant = line(
    prefix_kernels, "tl.store(to, scale, mask=live)",
    "tl.store(to, scale, mask=live & (inner != own - 1))",
)  # fmt: skip
left_by_copy = line(permute_kernels, "live = row >= 0", "live = (row >= 0) & (token != 1)")
left_by_sum = line(
    prefix_kernels, "element_ty), mask=inside)", "element_ty), mask=inside & (token != 1))"
)


# --- workspaces and aliases -----------------------------------------------------------------------


def grown_workspace(planting: Planting) -> None:
    """Make the layer's workspace anew for a call with more rows; a graph keeps the old one."""
    kept, right = planting.kept, prefix_sum.Workspace.empty

    def grown(pairs: int, experts: Any, *, alignment: int) -> Any:
        bound = permute.row_bound(pairs, experts.count, alignment)
        if pairs > kept.get("pairs", -1):
            kept["pairs"], kept["made"] = pairs, right(pairs, experts, alignment=alignment)
        made = kept["made"]
        scales = made.rows.scales
        cut = dataclasses.replace(
            made.rows, codes=made.rows.codes[:bound], place=made.rows.place[:pairs],
            scales=scales.as_strided((bound, scales.shape[1]), (1, -(-bound // 4) * 4)),
        )  # fmt: skip
        return dataclasses.replace(
            made, rows=cut, fc1=made.fc1[:bound], fc2=made.fc2[:bound],
            mid_codes=made.mid_codes[:bound], mid_scales=made.mid_scales[:bound],
        )  # fmt: skip

    planting.patch.setattr(prefix_sum.Workspace, "empty", staticmethod(grown))


def zeroed_once(planting: Planting) -> None:
    """Add a workspace that each call takes anew, inside the graph, and the first one zeroes."""
    kept, right = planting.kept, prefix_sum.prefix_gemm

    def wrong(a: Tensor, a_scale: Tensor, w: Tensor, *given: Any, **options: Any) -> Tensor:
        bias = torch.empty(w.shape[:2], dtype=torch.float32, device=a.device)
        if a.shape not in kept:
            kept[a.shape] = bias.zero_()
        return right(a, a_scale, w, *given, **{**options, "bias": bias})

    planting.patch.setattr(prefix_sum, "prefix_gemm", wrong)


def codes_over_rows(programs: int | None = None) -> Plant:
    """Quantize into the end of the rows that are quantized, which later tiles have yet to read."""

    def plant(planting: Planting) -> None:
        right = prefix_sum.prefix_swiglu_quant

        def wrong(rows: Tensor, *given: Any, codes: Tensor, **options: Any) -> Any:
            over = rows.view(torch.uint8).flatten()[-codes.numel() :].view(codes.shape)
            options["programs"] = programs or options["programs"]
            right(rows, *given, codes=over, **options)
            return codes.copy_(over), options["scales"]

        planting.patch.setattr(prefix_sum, "prefix_swiglu_quant", wrong)

    return plant


def overlaid(planting: Planting) -> None:
    """Lay what is written later over what nobody reads by then.

    The second GEMM's rows lie over the first one's, the second quantization's codes over the
    permuted ones: each kernel has ended that reads what they overwrite.
    """
    right = prefix_sum.Workspace.empty

    def laid(*given: Any, **options: Any) -> Any:
        made = right(*given, **options)
        fc2 = made.fc1.flatten()[: made.fc2.numel()].view(made.fc2.shape)
        mid = made.rows.codes.flatten()[: made.mid_codes.numel()].view(made.mid_codes.shape)
        return dataclasses.replace(made, fc2=fc2, mid_codes=mid)

    planting.patch.setattr(prefix_sum.Workspace, "empty", staticmethod(laid))


# --- alignment, host reads, ends ------------------------------------------------------------------


def alignment_of(rows: int) -> Plant:
    """Compile one alignment in, whatever is asked for."""
    return lambda planting: planting.aligned(lambda asked: rows)


def process_wide_alignment(planting: Planting) -> None:
    """Take the alignment that the first call of the process has set."""
    planting.aligned(lambda asked: planting.kept.setdefault("rows", asked))


def host_count(planting: Planting) -> None:
    """Read how many rows are live, to launch no more programs than those need."""
    right = prefix_sum.prefix_gemm

    def wrong(a: Tensor, s: Tensor, w: Tensor, ws: Tensor, ends: Tensor, **options: Any) -> Tensor:
        out: Tensor = options["out"]
        if ends[-1].item() == 0:
            return out
        return right(a, s, w, ws, ends, **options)

    planting.patch.setattr(prefix_sum, "prefix_gemm", wrong)


def mirrored_count(planting: Planting) -> None:
    """Read the last end in memory that both see, which no op shows, and launch that many tiles."""

    def changed(launched: Any, grid: Any, *args: Any, **options: Any) -> Any:
        if launched.__name__ == GEMM:
            ends = args[launched.arg_names.index("ends_ptr")]
            last = (ctypes.c_int32 * ends.numel()).from_address(ends.data_ptr())[-1]
            grid = (max(-(-last // options["BLOCK"]), 1), grid[1])
        return dispatch(launched, grid, *args, **options)

    planting.patch.setattr(prefix_sum, "dispatch", changed)


def ends_moved(kernel: str, by: int) -> Plant:
    """Hand ends to a kernel that are too small, or too large, by some rows."""
    return lambda planting: planting.launches(kernel, lambda ends: ends + by)


def ends_of_rows_moved(by: int) -> Plant:
    """Return ends that are too small, or too large, from the permutation."""
    return lambda planting: planting.permuted(lambda made: made.ends.add_(by))


# --- neighbours -----------------------------------------------------------------------------------

leaning_rows = line(
    prefix_kernels, "    if HAS_BIAS:\n",
    "    acc += 0.01 * tl.max(acc, 1)[:, None]\n    if HAS_BIAS:\n",
)  # fmt: skip
flushed_rows = line(
    prefix_kernels, "            scale = store_codes(",
    "            most = tl.max(tl.max(tl.abs(y), 1), 0)\n"
    "            y = tl.where(tl.abs(y) * 64.0 < most, 0.0, y)\n"
    "            scale = store_codes(",
)  # fmt: skip
