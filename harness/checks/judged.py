"""Outputs of one stage that are to be judged, and how they compare with a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from moe_parity.harness.checks.compare import Difference, differences, mask
from moe_parity.references.language import Case, Recipe, Stage
from moe_parity.references.language.stage import Output, Outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """Outputs of one stage that are to be judged."""

    who: str
    stage: Stage[Any]
    case: Case
    inputs: Any
    got: Outputs
    settled: bool = False
    """Whether it is known that the kernel wrote all of them: other memory gave the same bits."""
    guess: str = ""
    """Whose recipe it is held to, where its own version is not known; see Kernel.guess."""

    def against(self, recipe: Recipe) -> dict[str, Tensor]:
        """Return what a recipe gives."""
        made = self.stage.reference(self.case, self.inputs, recipe)
        return {name: made[name] for name in self.got}

    @cached_property
    def outputs(self) -> Mapping[str, Output]:
        """The stage's outputs."""
        return self.stage.outputs(self.case, self.inputs)

    @cached_property
    def live(self) -> Mapping[str, Tensor]:
        """The rows that are owned, of outputs where not all are."""
        return self.stage.live(self.case, self.inputs)

    def differences(self, want: Outputs) -> list[Difference]:
        """Return how the outputs differ from others, in live rows."""
        return differences(self.outputs, self.got, want, self.live)

    def differs(self, name: str, want: Outputs, got: Outputs | None = None) -> Tensor:
        """Return where one output differs, in live rows."""
        found = (self.got if got is None else got)[name]
        return mask(self.outputs[name], found, want[name], self.live.get(name))
