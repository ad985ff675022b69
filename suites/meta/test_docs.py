"""The documentation says what the code does: generated parts, commands, examples, links.

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.  Write them all
anew with ``python suites/meta/test_docs.py`` after a decision, a kernel or a measurement changed.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
import tomllib
from argparse import _SubParsersAction
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from moe_parity import kernels
from moe_parity.harness.checks.flow import check
from moe_parity.harness.cli import commands as cli
from moe_parity.harness.cli import new_kernel
from moe_parity.harness.cli.listing import decisions_markdown
from moe_parity.harness.evidence.near_tolerance import SCENARIOS
from moe_parity.kernels.ours.op_list import OPS
from moe_parity.references.language import Case, Values, case, decisions, parse_id
from moe_parity.references.recipes import ALL
from moe_parity.references.stages import STAGES
from moe_parity.references.stages.mistakes.layer import CARRIED
from moe_parity.reports.records import Record, RunEnd, RunInfo
from moe_parity.suites.faulty.kinds import AXES, REPORTED, Kind
from moe_parity.suites.faulty.table import FAULTS
from moe_parity.suites.meta import measured
from moe_parity.suites.meta.measured import table
from moe_parity.suites.mistaken import settings
from moe_parity.suites.scale_formats import cells

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
QUANTIZER = ROOT / "examples/torch_act_quant.py"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CODE = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:parity|pytest) [^`]*--[^`]*)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


# --- generated parts -----------------------------------------------------------------------------


def kernel_table() -> str:
    """List the kernels that the project itself registers."""
    folder = Path(inspect.getfile(kernels)).parent
    own = [k for k in kernels.all_kernels() if k.source.is_relative_to(folder)]
    rows = [(f"`{k.name}`", k.stage.name, k.note) for k in own]
    return table("kernel|stage|what it is", rows)


def op_table() -> str:
    """List our custom ops; ``suites/test_ops.py`` holds them against what torch knows."""
    rows = [(f"`{op.name}`", op.does, ", ".join(f"`{a}`" for a in op.changes)) for op in OPS]
    return table("op|what it gives|arguments that it writes", rows)


def recipe_table() -> str:
    """List the named recipes."""
    return table("recipe|the code it describes", [(f"`{r.name}`", r.source) for r in ALL.values()])


def decision_tables() -> str:
    """Document the decisions of every part of a recipe."""
    parts = {type(part): part for recipe in ALL.values() for part in recipe.parts.values()}
    found = {d.name: d for part in parts.values() for d in decisions(part).values()}
    return decisions_markdown(found.values())


def stage_table() -> str:
    """List the stages: what a kernel gets, what it returns, which words of a case they read."""
    rows = []
    for name, stage in STAGES.items():
        made = stage.inputs(Case())
        given = ", ".join(f"`{field}`" for field in vars(made))
        returned = ", ".join(f"`{output}`" for output in stage.outputs(Case(), made))
        words = ", ".join(word for word in vars(Case()) if word in stage.reads)
        rows.append((f"`{name}`", given, returned, words))
    return table("stage|`call.inputs`|outputs, in order|words of a case", rows)


def mistake_table() -> str:
    """List the catalogue by name: its words, the stages that have them, the layer's share."""
    found: dict[str, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for stage, own in settings().items():
        for setting in own if stage != "layer" else ():
            for name, words, _ in setting.mistakes:
                found[name][words.rstrip(",")][stage] = None
    rows = []
    for name, phrases in sorted(found.items()):
        for stages in dict.fromkeys(tuple(s) for s in phrases.values()):
            words = "; ".join(w for w, own in phrases.items() if tuple(own) == stages)
            carried = ", ".join(s for s in stages if name in CARRIED.get(s, ()))
            rows.append((f"`{name}`", words, ", ".join(stages), carried))
    return table("name|words|stages|carried on to a layer from", rows)


def kind_table(kinds: tuple[Kind, ...]) -> str:
    """List kinds of faults: the check, the suites, what plants them, or why nothing does."""
    rows = []
    for kind in kinds:
        own = [fault for fault in FAULTS if kind.name in fault.kinds]
        planted = [f"`{fault.name}` ({fault.stage})" for fault in own]
        planted += [f"`{test}`" for test in kind.tests]
        why = f"not expressed: {kind.reason}" if kind.reason and not planted else kind.reason
        where = "; ".join([*filter(None, [", ".join(planted), why])])
        checks, _, shown = kind.checks.partition(";")
        rows.append((f"`{kind.name}`", kind.words, checks, shown.strip(), where))
    return table("kind|what goes wrong|check|shown by|planted", rows)


@cache
def word_table() -> str:
    """List the words of a case id that come from enumerations."""
    rows = [
        (name, ", ".join(f"`{word.value}`" for word in kind), case._DEFAULTS[name])
        for name, kind in case._ENUMS
    ]
    return table("field|words|default", rows)


def scale_format_table() -> str:
    """List what decides the scale format of a quantization, and what then arrives quantized."""
    head = "set for it|set for the layer|checkpoint|backend|global default|format|arrives quantized"
    return table(head, list(cells()))


def starters() -> str:
    """Show what `parity new-kernel` writes for every stage, in each form that it has."""
    parts = []
    for stage in STAGES.values():
        parts.append(f"### `{stage}`\n")
        for form in new_kernel.FORMS:
            if form == "triton" and stage.name in new_kernel.NO_TRITON:
                parts.append(f"No Triton form: {new_kernel.NO_TRITON[stage.name]}.\n")
                continue
            suffix = "_triton" if form == "triton" else ""
            text = new_kernel.starter(f"my_{stage}{suffix}", stage.name, form)
            parts.append(f"```python\n{text}```\n")
    return "\n".join(parts)


def subcommand_table() -> str:
    """List the subcommands of `parity`."""
    (commands,) = (a for a in cli._parser()._actions if isinstance(a, _SubParsersAction))
    rows = [(f"`parity {action.dest}`", str(action.help)) for action in commands._choices_actions]
    return table("command|what it does", rows)


def record_field_table() -> str:
    """List the fields of each kind of line of a results file, with types and defaults."""
    rows = []
    for kind, line in (("run", RunInfo), ("record", Record), ("end", RunEnd)):
        for field in dataclasses.fields(line):
            free = field.default is dataclasses.MISSING
            default = "" if free and field.default_factory is dataclasses.MISSING else "{}"
            default = default if free else f"{field.default!r}"
            words = str(field.type).replace("|", "or")
            rows.append((kind, f"`{field.name}`", words, f"`{default}`" if default else ""))
    return table("line|field|type|default", rows)


GENERATED: dict[str, Callable[[], str]] = {
    "kernels": kernel_table,
    "starters": starters,
    "subcommands": subcommand_table,
    "record_fields": record_field_table,
    "ops": op_table,
    "stages": stage_table,
    "recipes": recipe_table,
    "decisions": decision_tables,
    "words": word_table,
    "scale_formats": scale_format_table,
    "mistakes": mistake_table,
    "reported_faults": lambda: kind_table(REPORTED),
    "fault_axes": lambda: kind_table(AXES),
    "fault_measurements": measured.fault_measurements,
    "fault_commands": measured.fault_commands,
    "kernel_measurements": measured.kernel_measurements,
    "model_measurements": measured.model_measurements,
    "check_measurements": measured.check_measurements,
    "production_measurements": measured.production_measurements,
    "vllm_stored": lambda: measured.stored_measurements("E"),
    "vllm_stored_linear": lambda: measured.stored_measurements("N"),
    "accuracy_bf16": lambda: measured.accuracy_measurements("bf16", "l2"),
    "accuracy_bf16_mean": lambda: measured.accuracy_measurements("bf16", "mean"),
    "accuracy_bf16_max": lambda: measured.accuracy_measurements("bf16", "max"),
    "accuracy_dequantized": lambda: measured.accuracy_measurements("dequantized", "l2"),
    "near_own": measured.near_own,
    "first_seed": lambda: measured.seed_measurements(measured.UE8M0, "first_seed_"),
    "second_seed": lambda: measured.seed_measurements(measured.SECOND, "second_seed_"),
    "second_checks": measured.second_checks,
    "prefix_arms": measured.arms_measurements,
    "invariance_h200": lambda: measured.invariance_measurements(measured.MAPS),
    "near_e8m0": lambda: measured.near_measurements(SCENARIOS[0].name),
    "near_bf16_silu": lambda: measured.near_measurements(SCENARIOS[1].name),
    "near_fp32_silu": lambda: measured.near_measurements(SCENARIOS[2].name),
}


def renewed(text: str) -> str:
    """Return a page with its generated parts made anew."""
    return BLOCK.sub(lambda m: f"{m[1]}\n{GENERATED[m[2]]()}\n{m[4]}", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem.lower())
def test_generated_parts_are_those_of_the_code(page: Path):
    text = page.read_text()
    assert renewed(text) == text, f"{page.name} is stale: run python suites/meta/test_docs.py"


def test_every_generator_has_its_place():
    used = [m[2] for page in PAGES for m in BLOCK.finditer(page.read_text())]
    assert sorted(used) == sorted(GENERATED)


# --- commands, examples, links -------------------------------------------------------------------


def commands() -> list[tuple[str, list[str]]]:
    """Return (page, words) of every command in the documentation, in a block or in a sentence."""
    found = []
    for page in PAGES:
        found += [(page.name, shlex.split(line)) for line in INLINE.findall(page.read_text())]
        for block in CODE.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                for part in line.split(" && "):
                    if words := shlex.split(part, comments=True):
                        found.append((page.name, words))
    return found


def test_commands_exist(pytestconfig: pytest.Config):
    """Each `parity` command parses; each of pytest has options, paths and selections that exist."""
    seen = Counter()
    for page, words in commands():
        name, args = words[0].rpartition("/")[2], words[1:]
        seen[page, name] += 1
        if name == "parity":
            numbered = ["7" if word == "N" else word for word in args]
            cli._parser().parse_args(numbered)
            for value in [args[n + 1] for n, word in enumerate(args) if word == "--kernel"]:
                assert not value.startswith("examples/") or (ROOT / value).is_file(), value
            if args[0] == "repro" and not args[1].startswith("<"):
                parse_id(args[1])
        if name == "pytest":
            unknown = pytestconfig._parser.parse_known_and_unknown_args(args)[1]
            assert not unknown, f"{page}: {unknown}"
            assert (ROOT / args[0]).exists(), f"{page}: {args[0]}"
            for option in ("-k", "-m"):
                if option in args:
                    Expression.compile(args[args.index(option) + 1])
    assert seen["README.md", "parity"] >= 5
    assert seen["README.md", "pytest"] >= 3


def test_the_readme_sets_up_in_two_commands():
    """The first block is the whole set-up and a check, then the tests."""
    lines = CODE.findall((ROOT / "README.md").read_text())[0].splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("python3 -m venv ")
    assert lines[0].endswith("parity check")
    assert "-c constraints.txt" in lines[0]
    assert "pytest suites/" in lines[1]


def test_links_lead_somewhere():
    for page in PAGES:
        for target in LINK.findall(page.read_text()):
            if "://" not in target:
                path, _, anchor = target.partition("#")
                found = page.parent / path if path else page
                assert found.exists(), f"{page.name}: {target}"
                if anchor:
                    heads = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
                    slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}
                    assert anchor in slugs, f"{page.name}: {target}"


def test_the_packages_are_the_folders():
    """Every folder of modules is installed, and nothing that is gone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tops = ("references", "kernels", "harness", "suites", "reports")
    found = [p.parent for top in tops for p in ROOT.glob(f"{top}/**/__init__.py")]
    names = [".".join(("moe_parity", *folder.relative_to(ROOT).parts)) for folder in found]
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(names)


SMALL = {
    "act_quant": Case(m=64, h=512, values=Values.AIMED),
    "weight_quant": Case(i=300, h=256, values=Values.AIMED),
    "fc1": Case(m=6, e=4, k=2, h=256, i=128, values=Values.AIMED),
    "fc2": Case(m=6, e=4, k=2, h=256, i=256, values=Values.AIMED),
    "swiglu_quant": Case(m=64, e=3, i=256, values=Values.AIMED),
    "combine": Case(m=8, e=8, k=4, h=256, values=Values.AIMED),
    "layer": Case(m=4, e=4, k=2, h=256, i=256, values=Values.AIMED),
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_passes(path: Path):
    """A kernel of each stage in at most 15 lines, green on aimed values, with ranks too."""
    (kernel,) = kernels.load_file(path)
    code = path.read_text().partition("@register(")[2]
    assert len(code.strip().splitlines()) <= 15
    small = SMALL[kernel.stage.name]
    ranks = {"ep_rank": 1, "ep_size": 2} if "ep_size" in kernel.stage.reads else {}
    for one in (small, dataclasses.replace(small, **ranks)):
        verdicts = list(check(kernel, one, "cpu"))
        assert {v.verdict for v in verdicts} <= {"pass", "skip"}, [v.message for v in verdicts]
        assert sum(v.verdict == "pass" for v in verdicts) >= 3


def test_there_is_an_example_of_each_stage_that_computes():
    found = {kernels.load_file(path)[0].stage.name for path in EXAMPLES}
    assert found >= {"act_quant", "fc1", "swiglu_quant", "combine", "layer"}


def test_the_readme_shows_its_example():
    assert QUANTIZER.read_text().strip() in (ROOT / "README.md").read_text()


def test_the_red_check_of_the_readme_is_real(tmp_path: Path):
    """Dividing instead of multiplying by a reciprocal gives the message that the README shows."""
    changed = QUANTIZER.read_text().replace("x * (1 / scales[..., None])", "x / scales[..., None]")  # fmt: skip  # noqa: E501
    assert changed != QUANTIZER.read_text()
    changed = changed.replace("torch_act_quant", "torch_divides")
    (tmp_path / "red.py").write_text(changed)
    (kernel,) = kernels.load_file(tmp_path / "red.py")
    verdict = next(iter(check(kernel, SMALL["act_quant"], "cpu")))
    assert verdict.verdict == "fail"
    shown = " ".join((ROOT / "README.md").read_text().split())
    assert verdict.message in shown, verdict.message


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text()
        if (after := renewed(before)) != before:
            page.write_text(after)
            print(page.relative_to(ROOT))
