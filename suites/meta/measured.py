"""Tables of committed measurements, as pages of the documentation show them."""

from __future__ import annotations

import json
import lzma
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from moe_parity.harness.evidence import accuracy
from moe_parity.kernels.vendors.vllm import stored, tiles
from moe_parity.reports import maps
from moe_parity.reports.records import Record, Run, RunInfo, from_json
from moe_parity.suites.faulty.table import FAULTS

DATA = Path(__file__).resolve().parents[2] / "docs/measurements/data"
RUN = DATA / "h200-2026-11-29.jsonl.xz"
CHECK = DATA / "check-h200-2026-11-30.jsonl.xz"
PLANTED = DATA / "faults.jsonl.xz"
ACCURACY = DATA / "accuracy-2026-11-30.jsonl"
NEAR = DATA / "near-tolerance-2026-11-30.jsonl"
STORED = Path(__file__).resolve().parents[1] / "vllm_stored_tiles.jsonl"
"""Beside the suites, which an installed package has, and its docs not."""
NEAR_OWN = DATA / "near-tolerance-h200-2026-12-01.jsonl"
UE8M0 = DATA / "check-ue8m0-h200-2026-12-01.jsonl.xz"
SECOND = DATA / "second-seed-h200-2026-12-01.jsonl.xz"
ARMS = DATA / "prefix-arms-h200-2026-12-01.jsonl"
MAPS = DATA / "invariance-h200-2026-12-01.jsonl.xz"
PRODUCTION = DATA / "production-h200-2026-11-29.jsonl.xz"


def table(head: str, rows: list[tuple[object, ...]]) -> str:
    """Return a Markdown table; integers get thousands separators and stand right."""
    names = head.split("|")
    numbers = [bool(rows) and isinstance(rows[0][n], int) for n in range(len(names))]
    lines = [names, ["--:" if number else "---" for number in numbers]]
    lines += [[f"{c:,}" if isinstance(c, int) else str(c) for c in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fault_lines() -> list[dict[str, Any]]:
    """Return what was measured of planted faults, a line for each kernel, seed and way."""
    return [json.loads(line) for line in lzma.decompress(PLANTED.read_bytes()).splitlines()]


def fault_measurements() -> str:
    """Say of each planted fault what the default check of its kernel said."""
    rows = []
    for fault in FAULTS:
        every = [line for line in fault_lines() if line["name"] == fault.name]
        own = [line for line in every if "way" not in line]
        seeds = [line for line in own if line["seed"] is not None]
        asked = [line for line in every if "way" in line]
        for line in own:
            if line["seed"] is None:
                causes = ", ".join(f"`{cause}`" for cause in line["causes"])
                rows.append((f"`{fault.name}`", fault.stage, fault.words, line["suite"] or "none",
                             "yes" if line["named"] else "no", causes, red_and_named(seeds),
                             red_and_named(asked)))  # fmt: skip
    head = "kernel|stage|what it does wrong|red in|named|causes|other seeds: red, named"
    return table(f"{head}|the command: red, named", rows)


def red_and_named(lines: list[dict[str, Any]]) -> str:
    """Return under how many seeds some lines are red, and named, of how many; ci is one."""
    seeds = {line["seed"] for line in lines}
    red, named = (len({x["seed"] for x in lines if x[key]}) for key in ("suite", "named"))
    return f"{red}, {named} of {len(seeds)}" if seeds else ""


def fault_commands() -> str:
    """Say of the faults that the whole command was run on what was red."""
    rows = []
    for line in fault_lines():
        if line.get("tests") == "":
            suites = ", ".join(f"`{suite.removesuffix('.py')}`" for suite in line["suites"])
            causes = ", ".join(f"`{cause}`" for cause in line["causes"])
            rows.append((f"`{line['name']}`", line["stage"], line["seed"] or "ci",
                         line["red"], suites, "yes" if line["named"] else "no", causes,
                         f"{line['seconds']:.0f} s, {line['together']}"))  # fmt: skip
    head = "kernel|stage|seed|tests red|red in|named|causes"
    return table(f"{head}|wall time, of so many kernels together", rows)


def measured() -> list[dict[str, object]]:
    """Return the check records of the committed run."""
    lines = lzma.decompress(RUN.read_bytes()).decode().splitlines()
    return [r for r in map(json.loads, lines[1:-1]) if r["check"] != "test"]


def kernel_measurements() -> str:
    """Sum the committed run of the quantizers."""
    return sums_of(measured())


def production_measurements() -> str:
    """Sum the exact checks of the production run."""
    lines = lzma.decompress(PRODUCTION.read_bytes()).decode().splitlines()
    names = ("exact", "virtual_gpu", "same_rows", "every_amax", "exact_layer", "write_set")
    return sums_of([r for r in map(json.loads, lines) if r["check"] in names])


def check_measurements() -> str:
    """Sum every check of the last whole run by stage and kernel."""
    lines = lzma.decompress(CHECK.read_bytes()).decode().splitlines()
    total: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for r in map(json.loads, lines[1:-1]):
        if r["check"] != "test" and r["verdict"] != "skip" and r.get("device") == "cuda":
            sums = {key: r.get(key) or 0 for key in ("compared", "differing", "could_show")}
            key = r.get("stage", ""), r.get("kernel", "").partition("-")[0]
            total[key].update({"records": 1, **sums})
    rows = [
        (stage, kernel, n["records"], n["compared"], n["differing"], n["could_show"] or "")
        for (stage, kernel), n in sorted(total.items())
    ]
    head = "stage|kernel|records|outputs compared|differing|could have been red"
    return table(head, rows)


def invariance_measurements(file: Path) -> str:
    """Show the bands of the invariance maps of a committed run of `parity map`, xz-packed."""
    lines = lzma.decompress(file.read_bytes()).decode().splitlines()
    found = [from_json(Record, r, file.name) for r in map(json.loads, lines[1:-1])]
    rows = maps.rows(Run(RunInfo(started=""), tuple(found), None))
    return table("|".join(maps.HEAD), [tuple(row) for row in rows])


TILE = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
RULES = {stored.FOLDER: tiles.recipe_of, stored.LINEAR: tiles.linear_recipe_of}
"""What a tile of a folder's files decides: of the grouped GEMM, of the dense one."""


def stored_lines() -> list[dict[str, Any]]:
    """Return what the stored configurations of the vLLM at hand decide, a line for each file.

    Its entries too, so that each can be called where the files are not.
    """
    return [
        {"file": name, "spans": [list(span) for span in tiles.spans(file, rule)],
         "tiles": {str(m): [file[m][word] for word in TILE] for m in sorted(file)}}
        for folder, rule in RULES.items()
        for name, file in stored.read(folder).items()
    ]  # fmt: skip


def stored_files() -> list[dict[str, Any]]:
    """Return the committed lines: what vLLM 0.33.0 stores, and what it decides."""
    return [json.loads(line) for line in STORED.read_text().splitlines()]


def stored_measurements(first: str) -> str:
    """Say of each stored file whose name begins so what it decides at how many tokens."""
    rows = []
    for line in stored_files():
        if line["file"].startswith(first):
            for at, last, order, unit, interval in line["spans"]:
                to = f"{at} to {last}" if last < 8192 else f"from {at} on"
                rows.append((f"`{line['file']}`", to, f"`{order}`", f"`{unit}`", f"`{interval}`"))
    return table("file|tokens|scale order|unit|K at once", rows)


def sums_of(records: list[dict[str, object]]) -> str:
    """Sum records by kernel, check and recipe."""
    total: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for r in records:
        if r["check"] != "model" and r["verdict"] != "skip":
            names = [str(r.get(key, "")) for key in ("kernel", "check", "recipe")]
            sums = {key: r.get(key, 0) for key in ("compared", "differing", "could_show")}
            total[names[0], names[1], names[2]].update({"records": 1, **sums})
    rows = [
        (*key, n["records"], n["compared"], n["differing"], n["could_show"] or "")
        for key, n in sorted(total.items())
    ]
    head = "kernel|check|recipe|records|outputs compared|differing|could have been red"
    return table(head, rows)


def model_measurements() -> str:
    """Sum the committed run by arithmetic model."""
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for r in measured():
        if r["check"] == "model":
            name = str(r["kernel"]).removeprefix("model_").partition("-")[0]
            total[name].update(records=1, compared=r["compared"], differing=r.get("differing", 0))
    rows = [(f"`{k}`", n["records"], n["compared"], n["differing"]) for k, n in sorted(total.items())]  # fmt: skip  # noqa: E501
    return table("model|records|outputs compared|differing", rows)


def accuracy_measurements(against: str, norm: str) -> str:
    """Show the committed accuracy table in one norm against one yardstick."""
    rows: list[tuple[object, ...]] = list(accuracy.cells(accuracy.read(ACCURACY), against, norm))
    return table("|".join(accuracy.HEAD), rows)


def near_measurements(scenario: str) -> str:
    """Show how close each rounding comes to the tolerance, between two sides."""
    rows = []
    for one in map(json.loads, NEAR.read_text().splitlines()):
        if one["scenario"] == scenario:
            few, changed = one["largest"], one["changed"]
            tokens = f"{few} of {one['m']}" if few else str(one["m"])
            name = changed if changed == "all of them" else f"`{changed}`"
            seen = [f"{one['codes']:.2%}", f"{one['rms']:.2g}", f"{one['worst']:.2f}"]
            share = f"{one['flip']:.0%}" if one["flip"] is not None else ""
            rows.append((name, tokens, *seen, one["over"], one["small"], share))
    return table("as the kernel has it|tokens|codes|rms|worst|over|small|one code", rows)


def near_own() -> str:
    """Show of each case of the test how many outputs fail, and the farthest, by scenario."""
    lines = [json.loads(line) for line in NEAR_OWN.read_text().splitlines()]
    names = list(dict.fromkeys(one["scenario"] for one in lines))
    found = {(one["m"], one["e"], one["k"], one["scenario"]): one for one in lines}
    cases = sorted({key[:3] for key in found})
    shown = [[found.get((*case, name)) for name in names] for case in cases]
    rows: list[tuple[object, ...]] = [
        (*case, *(f"{one['over']} ({one['worst']:.2f})" if one else "" for one in own))
        for case, own in zip(cases, shown, strict=True)
    ]
    failing = [sum(bool(own[n] and own[n]["over"]) for own in shown) for n in range(len(names))]
    rows.append(("cases that fail", "", "", *map(str, failing)))
    return table("|".join(["M", "E", "top-k", *names]), rows)


def seed_measurements(path: Path, prefix: str) -> str:
    """Sum the records of a seed's tests, a row for each way and shape."""
    rows: list[tuple[object, ...]] = []
    total: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for r in map(json.loads, lzma.decompress(path.read_bytes()).splitlines()):
        check = str(r.get("check", ""))
        if check.startswith(prefix):
            way, _, tokens = check.removeprefix(prefix).rpartition("_m")
            key = (way, tokens) if tokens.isdigit() else (check.removeprefix(prefix), "")
            sums = {n: r.get(n) or 0 for n in ("examples", "compared", "differing")}
            total[key].update(sums)
    for (way, tokens), n in sorted(total.items(), key=lambda one: (one[0][0], int(one[0][1] or 0))):
        rows.append((way, tokens, n["examples"], n["compared"], n["differing"]))
    return table("way|M|cases|outputs compared|differing", rows)


def second_checks() -> str:
    """Sum what else the second seed's run held: the activation, both fused layers, both builds."""
    total: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for r in map(json.loads, lzma.decompress(SECOND.read_bytes()).splitlines()):
        check = str(r.get("check", ""))
        named = ("exact", "exact_layer", "vendor_agrees", "write_set", "build", "refuted")
        if check in named and r["verdict"] == "pass" and r.get("device") == "cuda":
            sums = {n: r.get(n) or 0 for n in ("compared", "differing")}
            total[r["kernel"], check, r.get("recipe") or ""].update({"records": 1, **sums})
    rows: list[tuple[object, ...]] = [
        (*key, n["records"], n["compared"], n["differing"]) for key, n in sorted(total.items())
    ]
    return table("kernel|check|recipe|records|outputs compared|differing", rows)


def arms_measurements() -> str:
    """Show the medians of each arm of the prefix-sum timings."""
    lines = [json.loads(line) for line in ARMS.read_text().splitlines()]
    arms = [one for one in lines if "arm" in one]
    names = list(dict.fromkeys(one["arm"] for one in arms))
    rows: list[tuple[object, ...]] = []
    for capacity, live, powers in dict.fromkeys(
        (one["capacity"], one["live"], one["powers"]) for one in arms
    ):
        own = {
            one["arm"]: one["p50_us"]
            for one in arms
            if (one["capacity"], one["live"], one["powers"]) == (capacity, live, powers)
        }
        scales = "powers of two" if powers else "plain"
        rows.append((f"{capacity} / {live}", scales, *(f"{own[name]:.1f}" for name in names)))
    return table("|".join(["capacity / live", "scales", *names]), rows)
