"""What a row of a table asks to be done: its recipe at a scale, and what identifies it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml

from freemoe.core.environment import DECIDING, package_versions
from freemoe.core.files import json_digest
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.recipes import recipe_from, set_path
from freemoe.tomoe.recipe import ConvertRecipe
from reproduce.table import Row, Scene, Table

RECIPES = Path(__file__).parent / "recipes"
FORMAT = 2
"""Of records: those of another one are measured again."""


@dataclass(frozen=True)
class Run:
    """What a row asks to be done."""

    recipe: BuildRecipe | ConvertRecipe | TrimRecipe  # Checked, cut down to the scale; its output is a placeholder
    work: str  # Path of the function that does it
    arguments: dict[str, Any]  # More of its keyword arguments

    @property
    def key(self) -> str:
        """Its identity: equal runs of different tables are one."""
        fields = self.recipe.model_dump(mode="json", exclude={"output", "threads", "preset"})
        return json_digest([FORMAT, self.work, fields, self.arguments, package_versions(DECIDING)])


@cache
def _recipes(paper: str) -> dict[str, Any]:
    return yaml.safe_load((RECIPES / f"{paper}.yaml").read_text(encoding="utf-8"))["recipes"]


def recipe_names(paper: str) -> list[str]:
    """``PAPER/NAME`` of every recipe of a paper's tables."""
    return [f"{paper}/{key}" for key in _recipes(paper)]


def recipe_data(name: str) -> dict[str, Any]:
    """The recipe ``PAPER/NAME``, as a mapping that may be changed."""
    paper, _, key = name.partition("/")
    return copy.deepcopy(_recipes(paper)[key])


def run_of(row: Row, table: Table, scene: Scene) -> Run:
    """The run of a row at a scale.

    Raises:
        RecipeError: When the row's recipe cannot be used at that scale.
    """
    assert row.way is not None
    data = recipe_data(row.recipe)
    for path, value in row.changes.items():
        set_path(data, path, value)
    data = resolve_name(row.way.scaled)(data, scene, dict(table.tasks))
    arguments = {**data.pop("arguments", {}), **row.arguments}
    data |= {"seed": scene.seed, "threads": scene.threads, "output": row.recipe.replace("/", "-")}
    asked = {"device": scene.device, "dtype": scene.dtype, "profile": scene.profile}
    data |= {name: value for name, value in asked.items() if value is not None}
    recipe = recipe_from(data, f"{row.recipe} at scale {scene.scale}")
    assert isinstance(recipe, BuildRecipe | ConvertRecipe | TrimRecipe)
    return Run(recipe, row.way.work, arguments)
