"""Frozen recipes, one per command. A recipe, a YAML file and a command line are three spellings of the same thing.

Unknown keys are errors that name the path. `dump` and `load_recipe` are inverse to each other.
"""

from __future__ import annotations

from freemoe.recipes.build import (
    METRICS,
    ROUTERS,
    BandSection,
    BuildRecipe,
    DataSection,
    EvidenceSection,
    RouterSection,
    SaliencySection,
    SearchSection,
    SubdomainSection,
    UnitSection,
)
from freemoe.recipes.convert import ConvertRecipe, GateSection, LossSection, TrainSection
from freemoe.recipes.evaluate import EvalRecipe
from freemoe.recipes.reading import Recipe, dump, load_recipe, recipe_from, set_path
from freemoe.recipes.sections import TimingSection
from freemoe.recipes.trim import HookSection, HookTraining, PlanSection, TrimRecipe

__all__ = [
    "METRICS",
    "ROUTERS",
    "BandSection",
    "BuildRecipe",
    "ConvertRecipe",
    "DataSection",
    "EvalRecipe",
    "EvidenceSection",
    "GateSection",
    "HookSection",
    "HookTraining",
    "LossSection",
    "PlanSection",
    "Recipe",
    "RouterSection",
    "SaliencySection",
    "SearchSection",
    "SubdomainSection",
    "TimingSection",
    "TrainSection",
    "TrimRecipe",
    "UnitSection",
    "dump",
    "load_recipe",
    "recipe_from",
    "set_path",
]
