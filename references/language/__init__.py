"""The words of the project as types: stage, decision, recipe, case, trace, contract."""

from moe_parity.references.language.case import (
    Case,
    Gate,
    Hazard,
    InputDtype,
    Routing,
    ScaleFormat,
    ScaleLayout,
    Values,
    parse_id,
)
from moe_parity.references.language.contract import Check, Contract
from moe_parity.references.language.decision import Decision, Option, decisions, neighbours
from moe_parity.references.language.recipe import QuantRecipe, Recipe
from moe_parity.references.language.stage import Stage
from moe_parity.references.language.trace import QuantOutput, Trace

__all__ = [
    "Case",
    "Check",
    "Contract",
    "Decision",
    "Gate",
    "Hazard",
    "InputDtype",
    "Option",
    "QuantOutput",
    "QuantRecipe",
    "Recipe",
    "Routing",
    "ScaleFormat",
    "ScaleLayout",
    "Stage",
    "Trace",
    "Values",
    "decisions",
    "neighbours",
    "parse_id",
]
