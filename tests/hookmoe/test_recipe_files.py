"""The recipes of HookMoE's tables: each is whole and says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.recipes import load_recipe
from reproduce.running import RECIPES

FOLDER = RECIPES / "hookmoe"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=[f.name for f in FILES])
def test_a_recipe_is_a_trim_that_says_what_it_is(file: Path) -> None:
    recipe = load_recipe(file)
    assert isinstance(recipe, TrimRecipe)
    assert recipe.output == f"hookmoe-{file.stem}"
    assert recipe.plan.given
    kind = "Table" if file.stem.startswith("table") else "Figure"
    assert f"HookMoE {kind} {int(file.stem.removeprefix(kind.lower())[:2])}" in file.read_text(encoding="utf-8")
    if file.stem.startswith("table03"):
        assert (recipe.training.loss, recipe.hooks.layers, recipe.hooks.position) == ("lm", "one", "pre")
        assert recipe.hooks.units in (14336, 16384, 2816)
        assert recipe.plan.rescale == "none"
        assert recipe.training.limit * recipe.training.block == 2**20


def test_every_model_of_table_3_is_there() -> None:
    assert len(list(FOLDER.glob("table03-*.yaml"))) == 4
