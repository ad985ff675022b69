"""Every mistake of the catalogue, planted through the check that judges kernels: red, and named.

What a stage's settings show stands in ``mistaken.py``.
"""

from __future__ import annotations

import dataclasses
import re
import time

import pytest
import torch

from moe_parity.harness.checks import exact
from moe_parity.harness.checks.expect import Recorder, claim
from moe_parity.harness.diagnosis.cause import CauseKind
from moe_parity.harness.diagnosis.search import diagnose
from moe_parity.references.recipes.ours import OURS
from moe_parity.references.stages import STAGES
from moe_parity.suites.mistaken import Key, Setting, named, settings
from moe_parity.suites.planted import CASES

NEVER = {
    ("permute", "expert_of_neighbour"): (
        "a copy does not depend on its expert, and experts moved by one pair keep their counts"
    ),
}
"""(stage, name) -> why no input can show it."""


def planted(setting: Setting, key: Key, made, recorder: Recorder) -> None:
    """Claim that the check is red for these outputs and names the mistake."""
    verdict = setting.verdict(made)
    name, words, _ = key
    fault = ""
    if not verdict.failed:
        fault = f"{setting.stage}: {words} on {setting.case.id} is not red."
    elif name not in verdict.causes or verdict.cause_kind == CauseKind.PATTERN:
        fault = f"{setting.stage}: {words} on {setting.case.id} is called: {verdict.message}"
    elif ",," in verdict.message or ", ," in verdict.message:
        fault = f"{setting.stage}: two commas in: {verdict.message}"
    claim(
        recorder, "mistake_named", fault, stage=setting.stage.name, recipe=setting.recipe.name,
        device="reference", compared=sum(t.numel() for t in setting.right.values()),
        could_show=setting.differing(made),
    )  # fmt: skip


@pytest.mark.parametrize(("stage", "name"), named())
def test_a_mistake_is_red_and_named(
    stage: str, name: str, monkeypatch: pytest.MonkeyPatch, parity_recorder: Recorder
):
    allowed, shown = set(), set()
    for setting in settings()[stage]:
        for key, mistake in setting.mistakes.items():
            if key[0] != name:
                continue
            allowed.add(key)
            made = {} if key in shown else mistake.outputs()
            # where an earlier one has its bits that one is named, but not in every setting
            if setting.differing(made) and not (mistake.late and setting.said_before(made)):
                shown.add(key)
                with monkeypatch.context() as patch:
                    setting.remember(patch)
                    planted(setting, key, made, parity_recorder)
    if (stage, name) in NEVER:
        assert not shown, f"{NEVER[stage, name]}: not so"
    else:
        assert shown == allowed, f"no setting of {stage} shows {sorted(allowed - shown)}"


SAMPLE = 12
"""Mistakes of a layer that are planted: each is one of a stage's, carried on to the output."""


def test_a_layers_mistakes_are_named_from_its_output_alone(
    monkeypatch: pytest.MonkeyPatch, parity_recorder: Recorder
):
    (setting,) = settings()["layer"]
    keys = list(setting.mistakes)
    shown = 0
    setting.remember(monkeypatch)
    for key in keys[:: len(keys) // SAMPLE]:
        made = setting.mistakes[key].outputs()
        if setting.differing(made):
            shown += 1
            planted(setting, key, made, parity_recorder)
    assert shown >= SAMPLE


@pytest.mark.parametrize("stage", list(settings()))
def test_words_of_mistakes_go_on_to_a_stage(stage: str):
    """They begin small, have no full stop, and where they are the same the mistake is the same."""
    for setting in settings()[stage]:
        names: dict[str, str] = {}
        for name, words, _ in setting.mistakes:
            assert re.fullmatch(r"[a-z_0-9]+", name)
            assert words == words.strip()
            assert not re.search(r"[.;:]$|,,| ,|  ", words), words
            assert names.setdefault(words, name) == name, words


# --- in one place only ---------------------------------------------------------------------------


PLACES = {
    "for expert 2": lambda s, t: s.inputs.expert[:, None] == 2,
    "for k 1": lambda s, t: torch.arange(len(t))[:, None] % s.case.k == 1,
    "for tokens 22 and 23": lambda s, t: torch.arange(len(t))[:, None] >= 22 * (len(t) // s.case.m),
    "in columns 64 to 127 of every 128": lambda s, t: torch.arange(t.shape[1])[None] % 128 >= 64,
    "in rows 61 to 63 of each expert": lambda s, t: torch.arange(len(t))[:, None] >= 61,
}
"""The words for a place -> the mask of the outputs there."""
PARTLY = [
    ("fc1", "k_tail", "for expert 2"),
    ("fc1", "scale_of_neighbour", "for k 1"),
    ("fc1", "narrow_accumulator", "in columns 64 to 127 of every 128"),
    ("fc1", "wrong_expert", "for tokens 22 and 23"),
    ("fc2", "scale_of_another_expert", "for expert 2"),
    ("fc2", "k_order", "for k 1"),
    ("swiglu", "clamp_up_above", "in columns 64 to 127 of every 128"),
    ("swiglu", "up_lost", "in rows 61 to 63 of each expert"),
    ("combine", "weights_squared", "for tokens 22 and 23"),
    ("combine", "truncated", "in columns 64 to 127 of every 128"),
    ("act_quant", "through_bf16", "in columns 64 to 127 of every 128"),
    ("act_quant", "another_maximum", "for tokens 22 and 23"),
]


@pytest.mark.parametrize(("stage", "name", "place"), PARTLY)
def test_a_mistake_in_one_place_is_named_with_it(stage: str, name: str, place: str):
    # three experts a token, so that no expert is another name for a k
    case = dataclasses.replace(CASES[stage], e=5, k=3) if " k " in place else CASES[stage]
    setting = Setting(case=case, stage=STAGES[stage], recipe=OURS)
    mistake = next(m for key, m in setting.mistakes.items() if key[0] == name)
    wrong = mistake.outputs()
    made = {
        key: torch.where(PLACES[place](setting, right), wrong[key], right)
        for key, right in setting.right.items()
    }
    assert 0 < setting.differing(made) < setting.differing(wrong)
    verdict = setting.verdict(made)
    assert name in {cause.partition(" ")[0] for cause in verdict.causes}, verdict.message
    assert f" {place}" in verdict.message.partition(": at ")[0], verdict.message


# --- time ----------------------------------------------------------------------------------------

SECONDS = 2.0
"""What a diagnosis of a default shape may take on a CPU."""


def test_a_diagnosis_takes_at_most_two_seconds(monkeypatch: pytest.MonkeyPatch):
    """Of the slowest stage, the whole layer, at what is tried last of all: nothing known."""
    setting = Setting(case=CASES["layer"], stage=STAGES["layer"], recipe=OURS)
    made = {"out": setting.right["out"] * 3.0}
    taken = []

    def timed(*what):
        start = time.process_time()
        found = diagnose(*what)
        taken.append(time.process_time() - start)
        return found

    monkeypatch.setattr(exact, "diagnose", timed)
    assert [setting.verdict(setting.right | made).cause_kind for _ in range(2)] == ["pattern"] * 2
    assert min(taken) < SECONDS
