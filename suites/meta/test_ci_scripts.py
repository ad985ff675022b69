"""The scripts of the workflows and of the action, run against stand-ins.

That of the comment runs with node, where there is one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moe_parity.harness.cli import commands as cli
from moe_parity.suites.meta.workflows import ACTION, ROOT, named, scripts


def run(step: dict[str, Any], folder: Path, **values: str) -> subprocess.CompletedProcess[str]:
    """Run a step's shell where ``parity`` notes its arguments, one a line, and gives ``STATUS``."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    stand_in = programs / "parity"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$NOTED"\nexit "${STATUS:-0}"\n')
    stand_in.chmod(0o755)
    files = {name: str(folder / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "NOTED")}  # fmt: skip  # noqa: E501
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder, env={**files, "PATH": path, **values}, capture_output=True, text=True,
    )  # fmt: skip


def test_the_action_gives_parity_its_inputs_as_words_and_never_as_code(tmp_path):
    step = named(ACTION, "Check")
    given = dict.fromkeys(step["env"], "")
    hostile = "a b; touch planted $(touch planted) `touch planted`"
    (tmp_path / "o ut").mkdir()
    (tmp_path / "o ut/summary.md").write_text("### it\n")
    given |= {"KERNELS": f"k.py\n{hostile}\n", "OUT": "o ut", "SHARD": "2/4", "DEVICE": "cpu"}
    given |= {"REQUIRE_GPU": "true", "SHAPES": "m33", "SEED": "7"}
    done = run(step, tmp_path, **given, STATUS="3")
    assert done.returncode == 3, done.stderr
    words = (tmp_path / "noted").read_text().splitlines()
    args = cli._parser().parse_args(words)
    assert args.kernel == ["k.py", hostile]
    assert (str(args.out), args.shard, args.device, args.seed) == ("o ut", "2/4", "cpu", 7)
    assert (args.shapes, args.require_gpu) == ("m33", True)
    assert (tmp_path / "github_output").read_text() == "status=3\n"
    assert (tmp_path / "github_step_summary").read_text() == "### it\n"
    assert not (tmp_path / "planted").exists()


def test_the_action_gives_no_option_for_an_empty_input(tmp_path):
    step = named(ACTION, "Check")
    given = dict.fromkeys(step["env"], "") | {"KERNELS": "k.py", "OUT": "out"}
    assert run(step, tmp_path, **given).returncode == 0
    words = (tmp_path / "noted").read_text().splitlines()
    assert words == ["check", "--out", "out", "--kernel", "k.py"]


@pytest.mark.parametrize(("status", "ends"), [(0, 0), (1, 0), (2, 2), (3, 3)])
def test_changed_bits_alone_do_not_fail_the_comparison(tmp_path, status, ends):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/k.py").touch()
    step = named(ROOT / "docs/ci/parity.yml", "Compare")
    done = run(step, tmp_path, KERNEL="k.py", STATUS=str(status))
    assert done.returncode == ends, done.stderr


def test_a_kernel_that_the_base_has_not_is_said(tmp_path):
    step = named(ROOT / "docs/ci/parity.yml", "Compare")
    assert run(step, tmp_path, KERNEL="k.py").returncode == 0
    assert "The base has no k.py" in (tmp_path / "compared/summary.md").read_text()
    assert not (tmp_path / "noted").exists()


def test_what_is_collected_has_the_number_and_a_file_for_each_job(tmp_path):
    for name in ("parity-check-1", "parity-compare", "parity-check-2"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
        if name != "parity-check-2":  # it ended before there was a summary
            (tmp_path / "jobs" / name / "summary.md").write_text(name)
    done = run(named(ROOT / "docs/ci/parity.yml", "Collect"), tmp_path, NUMBER="12")
    assert done.returncode == 0, done.stderr
    found = {file.name: file.read_text() for file in (tmp_path / "comment").iterdir()}
    assert found == {
        "number": "12\n", "parity-check-1.md": "parity-check-1",
        "parity-compare.md": "parity-compare",
    }  # fmt: skip


# --- the comment ---------------------------------------------------------------------------------

DRIVER = """
const given = JSON.parse(require('fs').readFileSync(0, 'utf8')), done = {};
const note = (name) => async (what) => { done[name] = what; };
const github = {
  paginate: async () => given.comments,
  rest: {
    pulls: { get: async (what) => { done.asked = what.pull_number; return { data: given.pull }; } },
    issues: { listComments: null, createComment: note('created'), updateComment: note('updated') },
  },
};
const said = (name) => (why) => { done[name] = why; };
const core = { setFailed: said('failed'), notice: said('notice') };
const payload = { workflow_run: given.run };
const context = { repo: { owner: 'o', repo: 'r' }, payload };
const body = new (Object.getPrototypeOf(async () => {}).constructor)(
  'github', 'context', 'core', 'require', given.script);
body(github, context, core, require).then(() => console.log(JSON.stringify(done)));
"""
RUN = {
    "head_sha": "c0ffee", "head_repository": {"id": 5}, "conclusion": "failure",
    "html_url": "https://github.com/o/r/actions/runs/1",
}  # fmt: skip
PULL = {"head": {"sha": "c0ffee", "repo": {"id": 5}}}


def comment(folder: Path, files: dict[str, str], *, number: str = "12\n", **given: Any) -> Any:
    """Run the comment's script on an artifact of these files; return what it did to GitHub."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed, and the script of the comment is JavaScript.")
    artifact = folder / "untrusted"
    artifact.mkdir(exist_ok=True)
    for name, text in {"number": number, **files}.items():
        (artifact / name).write_text(text)
    script = list(scripts(ROOT / "docs/ci/parity-comment.yml"))[-1]
    asked = {"script": script, "comments": [], "pull": PULL, "run": RUN, **given}
    done = subprocess.run(
        ["node", "-e", DRIVER], input=json.dumps(asked), cwd=folder, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_comment_shows_text_and_nothing_of_it_is_live(tmp_path):
    text = (
        "### ✗ <img src=x> @all\n</pre></details><script>x</script> &lt; <!-- moe-parity -->\n"
        "  /merge\n/ok\n\x1b[31m\u202e | a | `b` |\n"
    )
    done = comment(tmp_path, {"parity-compare.md": text, "other.md": "no", "parity-x.sh": "no"})
    body = done["created"]["body"]
    assert (done["created"]["issue_number"], done["asked"]) == (12, 12)
    assert body.startswith("<!-- moe-parity -->\n**moe-parity did not pass**: [the run")
    assert RUN["html_url"] in body
    assert "| a | `b` |" in body
    assert "no\n" not in body
    tags = re.findall(r"<[^>]*>", body.removeprefix("<!-- moe-parity -->"))
    assert tags == ["<details>", "<summary>", "<code>", "</code>", "<code>", "</code>",
                    "</summary>", "<pre>", "</pre>", "</details>"]  # fmt: skip
    assert "&amp;lt;" in body
    assert not re.search(r"@\w|^\s*/|[\x00-\x09\x0b-\x1f\u202e]", body, re.MULTILINE)


def test_a_comment_is_never_longer_than_github_takes(tmp_path):
    long = {f"parity-check-{n}.md": f"### {n}\n" + "<&@é\n" * 90_000 for n in range(1, 4)}
    files = {**long, "parity-compare.md": "short\n", "parity-check-9.md": "<" * 90_000}
    body = comment(tmp_path, files)["created"]["body"]
    assert 55_000 < len(body.encode()) <= 60_000
    assert body.count("(the rest is in the artifacts of the run)") == 3
    assert all(f"<code>### {n}</code>" in body for n in (1, 2, 3))
    assert body.count("<pre>") == body.count("</pre>") == 5
    assert not re.search(r"&(?!amp;|lt;|gt;)", body)


def test_many_files_are_not_all_shown(tmp_path):
    files = {f"parity-check-{n}.md": "a\n" for n in range(40)}
    assert comment(tmp_path, files)["created"]["body"].count("<pre>") == 16


@pytest.mark.parametrize("number", ["", "0", "1e3", "12; x", "-1", "../1", "1\n2", "9" * 10])
def test_what_is_no_number_of_a_request_is_refused(tmp_path, number):
    assert comment(tmp_path, {}, number=number) == {"failed": "comment/number holds no number."}


@pytest.mark.parametrize(
    "head",
    [{"sha": "other", "repo": {"id": 5}}, {"sha": "c0ffee", "repo": {"id": 6}},
     {"sha": "c0ffee", "repo": None}],
    ids=["commit", "repository", "gone"],
)  # fmt: skip
def test_a_run_comments_on_no_request_but_its_own(tmp_path, head):
    done = comment(tmp_path, {"parity-compare.md": "a"}, pull={"head": head})
    assert set(done) == {"asked", "notice"}


def test_a_link_in_the_artifact_is_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("of the runner")
    (tmp_path / "untrusted").mkdir()
    (tmp_path / "untrusted/parity-compare.md").symlink_to(secret)
    body = comment(tmp_path, {"parity-check-1.md": "a"})["created"]["body"]
    assert "of the runner" not in body
    assert body.count("<pre>") == 1


def test_there_is_one_comment_and_it_is_our_own(tmp_path):
    mark = "<!-- moe-parity -->\nold"
    others = [
        {"id": 1, "user": {"login": "someone"}, "body": mark},
        {"id": 2, "user": {"login": "github-actions[bot]"}, "body": f"quoting {mark}"},
        {"id": 3, "user": None, "body": None},
    ]
    ours = {"id": 4, "user": {"login": "github-actions[bot]"}, "body": mark}
    assert "created" in comment(tmp_path, {}, comments=others)
    done = comment(tmp_path, {}, comments=[*others, ours], run={**RUN, "conclusion": "success"})
    assert done["updated"]["comment_id"] == 4
    assert "**moe-parity passed**" in done["updated"]["body"]
