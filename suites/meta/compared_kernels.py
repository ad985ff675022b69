"""Files of kernels for the tests of `parity compare`: a base, and a candidate with its changes."""

from pathlib import Path

BASE = """
import os

import torch
import triton
import triton.language as tl

import beside
from moe_parity.kernels import register
from moe_parity.kernels.virtual_gpu import dispatch


@triton.jit
def quantize(x, codes, scales, h, GROUP: tl.constexpr):
    row, group = tl.program_id(0), tl.program_id(1)
    at = row * h + group * GROUP + tl.arange(0, GROUP)
    v = tl.load(x + at).to(tl.float32)
    s = tl.div_rn(tl.maximum(tl.max(tl.abs(v)), 1e-4), 448.0)
    q = v * tl.div_rn(1.0, s)
    tl.store(codes + at, q.to(tl.float8e4nv))
    tl.store(scales + row * (h // GROUP) + group, s)


def takes(case, device):
    return None if case.scale == "fp32" and case.layout == "row" else "fp32 rows only."


def kernel(name, **options):
    return register(name, stage="act_quant", recipes="deepgemm", supports=takes, **options)


def plain(call, blocks=None):
    codes, scales = call.new("codes"), call.new("scales")
    x = call.inputs.x.float().unflatten(1, (-1, 128))
    scales.copy_(x.abs().amax(2).clamp(1e-4) / torch.tensor(448.0))
    made = (x * (1 / scales[..., None]))[:, :blocks].flatten(1)
    codes.view(torch.float8_e4m3fn)[:, : made.shape[1]].copy_(made)
    return codes.view(torch.float8_e4m3fn), scales


@kernel("rounding", triton=True)
def rounding(call):
    codes, scales = call.new("codes"), call.new("scales")
    m, h = call.inputs.x.shape
    out = codes.view(torch.float8_e4m3fn)
    dispatch(quantize, (m, h // 128), call.inputs.x, out, scales, h, GROUP=128)
    return out, scales


@kernel("remark")
def remark(call):
    return plain(call)


@kernel("block")
def block(call):
    return plain(call, None)


@kernel("new_nan")
def new_nan(call):
    codes, scales = plain(call)
    return codes, scales


@kernel("other_type")
def other_type(call):
    codes, scales = plain(call)
    return codes, scales


@kernel("sibling")
def sibling(call):
    codes, scales = plain(call)
    return codes, scales.mul_(beside.FACTOR)


@kernel("mended")
def mended(call):
    raise ValueError("not yet")


@kernel("away")
def away(call):
    return plain(call)


@kernel("zz_dies")
def dies(call):
    return plain(call)
"""

CHANGES = {
    "rounding": ("", ""),
    "remark": ("    return plain(call)", "    # another remark\n    return plain(call)"),
    "block": ("plain(call, None)", "plain(call, -1)"),
    "new_nan": ("    return codes", "    scales[1, 1] = float('nan')\n    return codes"),
    "other_type": ("codes, scales\n\n", "codes, scales.double()\n\n"),
    "sibling": ("", ""),
    "mended": ('raise ValueError("not yet")', "return plain(call)"),
    "away": ('@kernel("away")', '@kernel("away", unavailable=lambda: "No such chip.")'),
    "zz_dies": ("    return", "    os.kill(os.getpid(), 9)\n    return"),
}
"""Kernel -> what stands in it, and what the candidate has instead."""
ROUNDING = "q = v * tl.div_rn(1.0, s)", "q = tl.div_rn(v, s)"


def changed() -> str:
    """Return the text of the candidate."""
    head, *kernels = BASE.replace(*ROUNDING).split("@kernel(")
    made = [head]
    for text in kernels:
        before, after = CHANGES[text.split('"')[1]]
        whole = "@kernel(" + text
        assert not before or whole.count(before) == 1, whole
        made.append(whole.replace(before, after) if before else whole)
    return "".join(made)


def written(folder: Path) -> tuple[Path, Path]:
    """Write both files, of one name, each with a module of one name beside it."""
    files = []
    for name, source, factor in (("base", BASE, 1), ("candidate", changed(), 2)):
        (folder / name).mkdir()
        (folder / name / "beside.py").write_text(f"FACTOR = {factor}\n")
        files.append(folder / name / "k.py")
        files[-1].write_text(source)
    return files[0], files[1]
