"""The recipes of the papers' tables: each is whole, says what it varies, and turns the papers' axis round."""

from __future__ import annotations

from pathlib import Path

import pytest

from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.evals.tasks.benchmarks import BENCHMARKS
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.recipes import load_recipe
from freemoe.tomoe.recipe import ConvertRecipe
from reproduce.running import RECIPES as FOLDER

FILES = sorted(f for f in FOLDER.rglob("*.yaml") if f.parent.name in ("mode", "free-moe"))
CONVERSIONS = sorted((FOLDER / "tomoe").glob("*.yaml"))
TRIMS = sorted((FOLDER / "hookmoe").glob("*.yaml"))
NAMES = [str(f.relative_to(FOLDER)) for f in FILES]

# Part of a file's name -> (field, values that the papers' table has, in the order of its files).
VARIED = {
    "mode/table02-p-*-math": ("bands.p", ["1", "2", "4", "inf"]),
    "mode/table02-p-*-general": ("bands.p", ["1", "2", "4", "inf"]),
    "mode/table03-ratio-*": ("bands.ratio", [0.01, 0.03, 0.05, 0.1, 0.2]),
    "mode/table04-*": ("bands.sublayers", ["attention", "both", "mlp"]),
    "mode/table05-patch-*": ("bands.patch", [1, 2, 4, 16]),
    "mode/table06-k-*": ("subdomains.count", [{"mmlu": k} for k in (6, 8, 10, 12, 14, 16)]),
}


def load(file: Path) -> BuildRecipe:
    recipe = load_recipe(file)
    assert isinstance(recipe, BuildRecipe)
    return recipe


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_recipe_is_the_papers_protocol(file: Path) -> None:
    recipe = load(file)
    assert (recipe.search.metrics, recipe.search.method, recipe.search.select) == (("wanda",), "exhaustive", "argmax")
    assert (recipe.bands.start, recipe.bands.end, recipe.bands.step) == (0.0, 0.5, 0.05)
    assert len(recipe.bands.band_edges()) == 11  # through the end
    assert recipe.evidence.oracle, "the papers' figure is the row oracle"
    assert {t for tasks in recipe.domains.values() for t in tasks} <= set(BENCHMARKS)
    # Whoever runs a file decides about running programs, not the file.
    assert not recipe.data.allow_code_execution
    assert recipe.data.root is None


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_recipe_says_what_it_is(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    number = int(file.stem[len("table") :].split("-")[0])
    assert f"MoE Table {number}" in text or f"MoDE Table {number}" in text
    assert "# Orientation: " in text
    assert "their 95-100 % are our 0-5 %" in " ".join(text.split())
    code = {"mbpp", "humaneval"} & set(load(file).domains)
    assert bool(code) == ("Programs that the model writes" in text)


@pytest.mark.parametrize("pattern", VARIED)
def test_the_files_of_a_table_vary_one_thing(pattern: str) -> None:
    path, values = VARIED[pattern]
    section, field = path.split(".")
    recipes = [load(f) for f in sorted(FOLDER.glob(f"{pattern}.yaml"))]
    found = [getattr(getattr(r, section), field) for r in recipes]
    assert sorted(found, key=str) == sorted(values, key=str)
    rest = set()
    for recipe in recipes:
        data = recipe.model_dump(mode="json")
        del data[section][field], data["output"]
        rest.add(str(data))
    assert len(rest) == 1


def test_no_two_files_are_the_same_build_under_one_name() -> None:
    outputs = [load(f).output for f in FILES]
    assert len(set(outputs)) == len(outputs)
    assert outputs == [str(f.relative_to(FOLDER).with_suffix("")).replace("/", "-") for f in FILES]


def test_every_table_is_there() -> None:
    tables = {name.split("-")[0] for name in NAMES if name.startswith("mode/")}
    assert tables == {f"mode/table{n:02d}" for n in range(1, 12)}
    models = {load(f).model for f in FOLDER.glob("mode/table01-*.yaml")}
    assert len(models) == 5
    assert {load(f).bands.scope for f in FOLDER.glob("free-moe/*.yaml")} == {"layer"}
    assert len([f for f in TRIMS if f.stem.startswith("table03-")]) == 4


@pytest.mark.parametrize("file", CONVERSIONS, ids=[f.name for f in CONVERSIONS])
def test_a_conversion_is_the_papers(file: Path) -> None:
    recipe = load_recipe(file)
    assert isinstance(recipe, ConvertRecipe)
    assert (recipe.profile, recipe.mix, recipe.train.steps) == ("paper", "paper", 10000)
    assert (recipe.gates.budget, recipe.losses.union, recipe.losses.size) == ("loss", 2.0, 16.0)
    assert recipe.output == f"tomoe-{file.stem}"


@pytest.mark.parametrize("file", TRIMS, ids=[f.name for f in TRIMS])
def test_a_trim_says_what_it_is(file: Path) -> None:
    recipe = load_recipe(file)
    assert isinstance(recipe, TrimRecipe)
    assert recipe.output == f"hookmoe-{file.stem}"
    assert recipe.plan.given or recipe.profile == "paper"
    kind = "Table" if file.stem.startswith("table") else "Figure"
    assert f"HookMoE {kind} {int(file.stem.removeprefix(kind.lower())[:2])}" in file.read_text(encoding="utf-8")
    if file.stem.startswith("table03"):
        assert (recipe.training.loss, recipe.hooks.layers, recipe.hooks.position) == ("lm", "one", "pre")
        assert recipe.hooks.units in (14336, 16384, 2816)
        assert recipe.plan.rescale == "none"
        assert recipe.training.limit * recipe.training.block == 2**20
