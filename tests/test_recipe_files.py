"""The recipes of the papers' tables: each is the paper's protocol, with the values that its table has."""

from fnmatch import fnmatch

import pytest

from freemoe.evals.tasks.benchmarks import BENCHMARKS
from freemoe.recipes import recipe_from
from reproduce.runs import recipe_data, recipe_names

NAMES = recipe_names("mode")

# Names -> (field, values that the papers' table has).
VARIED = {
    "mode/table02-p-*-math": ("bands.p", ["1", "2", "4", "inf"]),
    "mode/table02-p-*-general": ("bands.p", ["1", "2", "4", "inf"]),
    "mode/table03-ratio-*": ("bands.ratio", [0.01, 0.03, 0.05, 0.1, 0.2]),
    "mode/table04-*": ("bands.sublayers", ["attention", "both", "mlp"]),
    "mode/table05-patch-*": ("bands.patch", [1, 2, 4, 16]),
    "mode/table06-k-*": ("subdomains.count", [{"general": k} for k in (6, 8, 10, 12, 14, 16)]),
}


def load(name):
    return recipe_from(recipe_data(name), name)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_the_papers_protocol(name):
    recipe = load(name)
    assert (recipe.search.metrics, recipe.search.method, recipe.search.select) == (("wanda",), "exhaustive", "argmax")
    assert (recipe.bands.start, recipe.bands.end, recipe.bands.step) == (0.0, 0.5, 0.05)
    assert len(recipe.bands.band_edges()) == 11  # through the end
    assert recipe.evidence.oracle, "the papers' figure is the row oracle"
    assert {t for tasks in recipe.domains.values() for t in tasks} <= set(BENCHMARKS)
    # Whoever runs a recipe decides about running programs, not the recipe.
    assert not recipe.data.allow_code_execution
    assert recipe.data.root is None


@pytest.mark.parametrize("pattern", VARIED)
def test_the_recipes_of_a_table_have_its_values(pattern):
    path, values = VARIED[pattern]
    section, field = path.split(".")
    found = [getattr(getattr(load(name), section), field) for name in NAMES if fnmatch(name, pattern)]
    assert sorted(found, key=str) == sorted(values, key=str)


def test_every_table_is_there():
    assert {name.split("-")[0] for name in NAMES} == {f"mode/table{n:02d}" for n in range(1, 12)}
    main = [load(name) for name in NAMES if name.startswith("mode/table01-")]
    assert len({recipe.model for recipe in main}) == 5
    assert {tuple(recipe.domains) for recipe in main} == {("general", "code", "math")}


@pytest.mark.parametrize("name", recipe_names("tomoe"))
def test_a_conversion_is_the_papers(name):
    recipe = load(name)
    assert (recipe.profile, recipe.mix, recipe.train.steps) == ("paper", "paper", 10000)
    assert (recipe.gates.budget, recipe.losses.union, recipe.losses.size) == ("loss", 2.0, 16.0)


@pytest.mark.parametrize("name", recipe_names("hookmoe"))
def test_a_trim_is_the_papers(name):
    recipe = load(name)
    assert recipe.plan.given or recipe.profile == "paper"
    assert recipe.plan.rescale == "none"
    if recipe.hooks.layers != "none":
        assert (recipe.training.loss, recipe.hooks.layers, recipe.hooks.position) == ("lm", "one", "pre")
        assert recipe.hooks.units in (14336, 16384, 2816)
    if recipe.profile == "paper" and not recipe.timing.prompts:
        assert recipe.training.limit * recipe.training.block == 2**20
