"""Workflows that users copy, the action and our own: no token where other people's code runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_parity.harness.cli import commands as cli
from moe_parity.suites.meta.workflows import (
    ACTION,
    COPIED,
    EMPTY,
    OURS,
    ROOT,
    copied,
    load,
    scripts,
    steps,
    triggers,
)  # fmt: skip

TAGS = {
    "actions/cache": "v4", "actions/checkout": "v4", "actions/download-artifact": "v4",
    "actions/github-script": "v7", "actions/setup-python": "v5", "actions/upload-artifact": "v4",
    "OWNER/moe-parity": "v1",
}  # fmt: skip
"""Actions -> the tag of a version that exists; ours is put in by who copies."""
SHELL = {
    "[", "case", "cat", "cp", "do", "done", "echo", "else", "esac", "exit", "fi", "for", "if",
    "mkdir", "pip", "printf", "python", "rm", "then", "unzip", "while", "parity",
}  # fmt: skip


# --- what may be done with which token -----------------------------------------------------------


@pytest.mark.parametrize("path", [*COPIED, *OURS], ids=lambda path: path.stem)
def test_nothing_runs_a_request_with_the_rights_of_the_base(path):
    assert "pull_request_target" not in triggers(load(path))


@pytest.mark.parametrize("path", [*COPIED, *OURS], ids=lambda path: path.stem)
def test_what_runs_code_may_only_read(path):
    flow = load(path)
    for name, job in flow["jobs"].items():
        rights = job.get("permissions", flow["permissions"])
        runs = any("run" in step or "checkout" in step.get("uses", "") for step in job["steps"])
        assert isinstance(rights, dict), f"{path.name}: {name}"
        if runs:
            assert rights.items() <= {("contents", "read")}, f"{path.name}: {name}"
        assert "secrets." not in json.dumps(job)
        assert "secrets" not in job
        if runs:
            assert "github.token" not in json.dumps(job)


@pytest.mark.parametrize("path", [*COPIED, *OURS], ids=lambda path: path.stem)
def test_a_checkout_leaves_no_token_behind(path):
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", COPIED, ids=lambda path: path.stem)
def test_a_copied_workflow_gives_no_right_to_all_of_its_jobs(path):
    flow = load(path)
    assert flow["permissions"] == {}
    assert all("permissions" in job for job in flow["jobs"].values())
    assert all(job["timeout-minutes"] <= 60 for job in flow["jobs"].values())


@pytest.mark.parametrize("path", [*COPIED, *OURS, ACTION], ids=lambda path: path.stem)
def test_no_expression_stands_in_a_script(path):
    assert not [script for script in scripts(path) if "${{" in script]


@pytest.mark.parametrize("path", [*COPIED, ACTION], ids=lambda path: path.stem)
def test_actions_are_named_by_the_tag_of_a_version(path):
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert all(TAGS[name] == tag for name, _, tag in (one.partition("@") for one in used))


@pytest.mark.parametrize("path", [*COPIED, *OURS], ids=lambda path: path.stem)
def test_a_machine_of_ones_own_never_runs_a_request(path):
    flow = load(path)
    own = any("self-hosted" in job["runs-on"] for job in flow["jobs"].values())
    assert own == ("gpu" in path.stem)
    assert not (own and {"pull_request", "workflow_run"} & set(triggers(flow)))


def test_the_comment_is_written_where_nothing_of_a_request_runs():
    flow = copied("parity-comment")
    assert set(triggers(flow)) == {"workflow_run"}
    assert triggers(flow)["workflow_run"]["workflows"] == [copied("parity")["name"]]
    (job,) = flow["jobs"].values()
    assert job["permissions"] == {"actions": "read", "pull-requests": "write"}
    used = [step["uses"].partition("@")[0] for step in job["steps"]]
    assert used == ["actions/download-artifact", "actions/github-script"]
    assert "workflow_run.event == 'pull_request'" in job["if"]
    said = "eval|require\\((?!'fs'\\))|child_process|exec|import\\(|process|Function"
    assert not re.search(rf"\b(?:{said})", job["steps"][1]["with"]["script"])


def test_what_one_job_uploads_another_finds():
    for path in COPIED:
        jobs = load(path)["jobs"].values()
        up, down = (
            [s["with"] for job in jobs for s in job["steps"]
             if f"actions/{way}-" in s.get("uses", "")]
            for way in ("upload", "download")
        )  # fmt: skip
        sent = {w["name"].replace("${{ matrix.shard }}", "1") for w in up}
        if path.stem == "parity":
            assert {w["name"] for w in down if "name" in w} <= sent
            (pattern,) = [w["pattern"] for w in down if "pattern" in w]
            kept = {n for n in sent if Path(n).match(pattern)}
            assert kept == {"parity-check-1", "parity-compare"}
            (taken,) = [s["with"]["name"] for s in steps(ROOT / "docs/ci/parity-comment.yml")
                        if "download" in s["uses"]]  # fmt: skip
            assert taken in sent


# --- commands ------------------------------------------------------------------------------------


def lines(script: str) -> Iterator[str]:
    for line in script.replace("\\\n", " ").splitlines():
        yield re.sub(r"^'|'$", "", line.strip())


@pytest.mark.parametrize("path", [*COPIED, ACTION], ids=lambda path: path.stem)
def test_every_command_of_parity_exists(path):
    found = 0
    for script in filter(None, (step.get("run") for step in steps(path))):
        for line in lines(script):
            given = re.sub(r" \|\| .*| >> .*", "", line)
            if given.startswith("parity "):
                words = shlex.split(given.replace("$SHARD/4", "1/4"))[1:]
                cli._parser().parse_args([w for w in words if w != "${options[@]}"])
                found += 1
    assert found == {"parity": 2, "action": 1}.get(path.stem, 0)


def test_the_shards_are_as_many_as_each_says():
    shards = copied("parity")["jobs"]["check"]["strategy"]["matrix"]["shard"]
    (command,) = [s for s in scripts(ROOT / "docs/ci/parity.yml") if "--shard" in s]
    assert f'"$SHARD/{len(shards)}"' in command
    assert shards == list(range(1, len(shards) + 1))


def test_kernels_that_workflows_name_are_registered():
    text = "".join(path.read_text() for path in COPIED)
    names = set(re.findall(r"\b(?:vllm|deepgemm)_\w+", text))
    assert names >= {"vllm_silu_mul_colmajor", "deepgemm_contiguous"}
    assert all(cli_knows(name) for name in names)


def cli_knows(name: str) -> bool:
    from moe_parity.kernels import find

    return find(name).name == name


@pytest.mark.parametrize("path", [*COPIED, *OURS, ACTION], ids=lambda path: path.stem)
def test_bash_understands_every_script(path):
    for script in (step["run"] for step in steps(path) if "run" in step):
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


# --- the action ----------------------------------------------------------------------------------


def test_every_input_of_the_action_is_described_and_used():
    action = load(ACTION)
    text = json.dumps(action["runs"]) + json.dumps(action["outputs"])
    asked = set(re.findall(r"inputs\.([\w-]+)", text))
    assert asked == set(action["inputs"])
    page = (ROOT / "docs/ci.md").read_text()
    for name, one in action["inputs"].items():
        shown = f"`{one['default']}`" if one["default"] else ""
        assert one["description"]
        assert f"| `{name}` | {shown} | {one['description']} |" in page
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"
        for name in step["env"]:
            assert re.search(rf"\${{?{name}\b", step["run"]), name


def test_workflows_give_the_action_inputs_that_it_has():
    inputs = set(load(ACTION)["inputs"])
    given = [s for p in COPIED for s in steps(p) if s.get("uses") == "OWNER/moe-parity@v1"]
    assert len(given) == 3
    assert all(set(step.get("with", EMPTY)) <= inputs for step in given)
