"""Presets: what is not given is set by one table per system, what is given wins, and the recipe holds what was set."""

import pytest

from freemoe.domain_experts.recipe import BuildRecipe, EvidenceSection
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.recipes import dump, recipe_from
from freemoe.recipes.keywords import recipe_of
from freemoe.tomoe.recipe import ConvertRecipe
from tests.test_recipe_bounds import SMALLEST

BEGUN = {name: {"command": name, **least} for name, least in SMALLEST.items()}
SYSTEMS = {"build": BuildRecipe, "convert": ConvertRecipe, "trim": TrimRecipe}


def changes(recipe):
    """Fields of a recipe that are not as the smallest one of its command has them, by path."""
    least, own = (r.model_dump() for r in (recipe_from(BEGUN[recipe.command]), recipe))
    found = {}
    for name, value in own.items():
        parts = value if isinstance(value, dict) and isinstance(least[name], dict) else {"": value}
        before = least[name] if "" not in parts else {"": least[name]}
        found |= {f"{name}.{k}".strip("."): v for k, v in parts.items() if v != before.get(k)}
    return found


@pytest.mark.parametrize("command", SYSTEMS)
@pytest.mark.parametrize("preset", ["quick", "standard", "thorough"])
def test_a_preset_sets_what_its_table_says_and_a_dumped_recipe_holds_it(command, preset):
    recipe = recipe_from({**BEGUN[command], "preset": preset})
    table = SYSTEMS[command].SETTINGS["preset"].get(preset, {})
    wanted = {f"{s}.{f}": v for s, values in table.items() if isinstance(values, dict) for f, v in values.items()}
    wanted |= {name: value for name, value in table.items() if not isinstance(value, dict)}
    assert {**changes(recipe), "preset": preset} == {**wanted, "preset": preset}
    import yaml

    again = yaml.safe_load(dump(recipe))
    assert recipe_from(again) == recipe
    # The name alone sets nothing any more: every field is there.
    assert changes(recipe_from({**again, "preset": "thorough"})) == {**changes(recipe), "preset": "thorough"}


@pytest.mark.parametrize(
    ("command", "given", "path", "value"),
    [
        ("build", {"data": {"limit": 600}}, "data.limit", 600),
        ("build", {"data": {"limit": None}}, "data.limit", None),
        ("build", {"evidence": EvidenceSection(oracle=True)}, "evidence.oracle", True),
        ("build", {"search": {"metrics": "wanda"}}, "search.metrics", ("wanda",)),
        ("build", {"units": {"unit": "neuron"}}, "search.metrics", ()),  # units compete alone, as ever
        ("convert", {"rivals": True}, "rivals", True),
        ("convert", {"train": {"steps": 7}}, "train.steps", 7),
        ("convert", {"profile": "paper"}, "train.steps", 40),  # how long it is, before how it is trained
        ("convert", {"profile": "paper"}, "train.rate", 1e-3),
        ("trim", {"training": {"control": True}}, "training.control", True),
    ],
)
def test_what_is_given_wins_over_the_preset(command, given, path, value):
    recipe = recipe_from({**BEGUN[command], **given, "preset": "quick"})
    for part in path.split("."):
        recipe = getattr(recipe, part)
    assert recipe == value


def test_python_says_it_by_keyword():
    recipe = recipe_of(BuildRecipe, {"model": "m", "domains": {"d": "t.jsonl"}, "preset": "quick", "controls": 2})
    assert (recipe.data.limit, recipe.evidence.controls, recipe.evidence.oracle) == (80, 2, False)


def test_a_result_says_what_its_preset_changed_and_no_more():
    assert recipe_from(BEGUN["build"]).notes() == []
    (note,) = recipe_from({**BEGUN["build"], "preset": "quick", "evidence": {"oracle": True}}).notes()
    assert note.startswith("a quick answer (--preset quick): data.limit 80 (standard: not set), subdomains.count 1")
    assert "search.metrics saliency (standard: saliency+wanda)" in note
    assert "evidence.controls 1 (standard: 3)" in note
    assert "oracle" not in note
    assert "units" not in note
