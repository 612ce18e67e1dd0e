"""Keywords in place of a recipe: the same recipe as by YAML or flags, and near misses for what is no keyword."""

import pydoc

import pytest

from freemoe.cli import build as build_cli
from freemoe.cli import convert as convert_cli
from freemoe.cli import trim as trim_cli
from freemoe.core.errors import RecipeError
from freemoe.domain_experts.recipe import BuildRecipe, SearchSection
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.recipes import recipe_from
from freemoe.recipes.keywords import nest_keywords, recipe_of
from tests.test_recipe_bounds import KINDS, fields

BUILD = {"model": "m", "domains": {"law": "law.jsonl"}}


def test_keywords_are_the_recipe_that_yaml_says():
    found = recipe_of(
        BuildRecipe, {**BUILD, "metric": ["saliency"], "search": {"alpha": 0.1}, "limit": 3, "subdomains": 2, "p": 1}
    )
    assert found == recipe_from(
        {
            **BUILD,
            "search": {"metrics": ["saliency"], "alpha": 0.1},
            "data": {"limit": 3},
            "subdomains": {"count": 2},
            "bands": {"p": 1},
        }
    )
    whole = recipe_of(BuildRecipe, {**BUILD, "search": SearchSection(alpha=0.1), "metric": "wanda"})
    assert (whole.search.alpha, whole.search.metrics) == (0.1, ("wanda",))
    # A section that was made whole says only what was given to it.
    assert recipe_of(BuildRecipe, {**BUILD, "search": SearchSection(), "unit": "neuron"}).search.metrics == ()
    assert recipe_of(BuildRecipe, {**BUILD, "search": "exhaustive"}).search.method == "exhaustive"
    trimmed = recipe_of(TrimRecipe, {"model": "m", "text": "t", "plan": "uniform:1", "hooks": "one", "steps": 3})
    assert (trimmed.plan.given, trimmed.hooks.layers, trimmed.training.steps) == ("uniform:1", "one", 3)


@pytest.mark.parametrize("command", [build_cli.COMMAND, convert_cli.COMMAND, trim_cli.COMMAND], ids=lambda c: c.name)
def test_flags_of_the_command_line_are_keywords(command):
    kind = command.recipe
    for name, flag in command.flags.items():
        path = flag if isinstance(flag, str) else flag.path
        if not isinstance(flag, str) and " " in path:
            continue  # sets several fields of a section
        if name in ("even",):
            continue  # a switch; the field is layout
        section, _, field = path.rpartition(".")
        assert nest_keywords(kind, {name: "x"}) == ({section: {field: "x"}} if section else {path: "x"}), name


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"metrc": "wanda"}, r"no keyword 'metrc'. Did you mean metric"),
        ({"serach": {"alpha": 0.1}}, r"Did you mean search"),
        ({"search": {"alphas": 5}}, r"search.alphas: there is no such field.*did you mean search.alpha"),
        ({"zzz": 1}, r"Keywords are model, revision, domains"),
        ({"every": 3}, r"every could be saliency.every or units.every; say which by its section: saliency=\{'every'"),
        ({"metric": "wanda", "search": {"metrics": "wanda"}}, r"metric and search both say what search.metrics is"),
        ({"alpha": 2}, r"search.alpha: .*less than 1"),
        ({"metric": "wandaa"}, r"Did you mean 'wanda'"),
    ],
    ids=str,
)
def test_what_is_no_keyword_is_answered_with_what_was_meant(values, says):
    with pytest.raises(RecipeError, match=says):
        recipe_of(BuildRecipe, {**BUILD, **values})


@pytest.mark.parametrize("kind", KINDS)
def test_help_shows_every_field(kind):
    said = pydoc.plain(pydoc.render_doc(kind))
    for path, field in fields(kind):
        assert field.description, f"{path} has no description"
        line = next(line for line in said.splitlines() if line.strip(" |").startswith(f"{path} ("))
        assert line.endswith(f": {field.description}")
        default = "required" if field.is_required() else f"default {field.get_default()!r}"
        assert f", {default}):" in line
    assert ("search.alpha (float, default 0.05): Family-wise" in said) == (kind is BuildRecipe)
