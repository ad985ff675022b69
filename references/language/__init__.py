"""The words of the project as types: case, decision, recipe, contract, skip, stage."""

from moe_parity.references.arithmetic.formats import ScaleFormat, ScaleLayout
from moe_parity.references.language.case import (
    Arrival,
    Case,
    Gate,
    Hazard,
    InputDtype,
    Routing,
    Values,
    parse_id,
)
from moe_parity.references.language.contract import Check, Contract
from moe_parity.references.language.decision import Decision, Option, decisions, neighbours
from moe_parity.references.language.mistake import Mistake
from moe_parity.references.language.recipe import Part, Recipe
from moe_parity.references.language.stage import Stage
from moe_parity.references.skip import Skip, Why

__all__ = [
    "Arrival",
    "Case",
    "Check",
    "Contract",
    "Decision",
    "Gate",
    "Hazard",
    "InputDtype",
    "Mistake",
    "Option",
    "Part",
    "Recipe",
    "Routing",
    "ScaleFormat",
    "ScaleLayout",
    "Skip",
    "Stage",
    "Values",
    "Why",
    "decisions",
    "neighbours",
    "parse_id",
]
