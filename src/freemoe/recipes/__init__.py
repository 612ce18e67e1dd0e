"""Frozen recipes, one per command. A recipe, a YAML file and a command line are three spellings of the same thing.

Here stands what all have in common, and the recipe of ``freemoe eval``; each system has its own (``recipe.py`` in its folder).
Unknown keys are errors that name the path. `dump` and `load_recipe` are inverse to each other.
"""

from __future__ import annotations

from freemoe.recipes.data import DataSection, DomainRecipe
from freemoe.recipes.evaluate import EvalRecipe
from freemoe.recipes.reading import dump, load_recipe, recipe_from, set_path
from freemoe.recipes.sections import Recipe, TimingSection

__all__ = [
    "DataSection",
    "DomainRecipe",
    "EvalRecipe",
    "Recipe",
    "TimingSection",
    "dump",
    "load_recipe",
    "recipe_from",
    "set_path",
]
