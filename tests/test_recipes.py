"""Recipes: YAML and back, errors that name the path, the value and what is allowed, and the grids of the papers."""

import itertools

import pytest
import yaml

from freemoe.core.errors import FreeMoEError, RecipeError
from freemoe.domain_experts.recipe import BandSection, BuildRecipe
from freemoe.recipes import EvalRecipe, dump, load_recipe, recipe_from
from tests.test_recipe_bounds import SMALLEST, recipe_with

BUILD, EVAL = ({"command": command, **SMALLEST[command]} for command in ("build", "eval"))
FULL = {
    "command": "build",
    "model": "meta-llama/Llama-2-7b-chat-hf",
    "revision": "main",
    "domains": {"math": ["gsm8k@5", "mathqa"], "mine": ["a.jsonl::b.jsonl"], "wörter_1-x": ["text:t.txt"]},
    "output": "somewhere/experts",
    "preset": "quick",
    "seed": 7,
    "dtype": "bfloat16",
    "device": "cuda:1",
    "threads": 2,
    "place": "ray",
    "workers": 3,
    "unit_seconds": 600.0,
    "batch_tokens": 1024,
    "data": {"root": "data", "limit": 10, "fewshot": 0, "overflow": "error", "allow_code_execution": True},
    "subdomains": {
        **{"by": "kmeans", "count": {"math": 8, "mine": 1}, "min_size": 4, "initialisations": 3},
        "feature": "hidden",
    },
    "bands": {
        **{"start": 0.5, "end": 1.0, "step": 0.05, "ratio": 0.05, "p": "inf"},
        **{"scope": "layer", "sublayers": "mlp", "layers": [0, 4], "patch": 16},
    },
    "saliency": {"step": 1e-5, "budget": 0.03, "patience": 2, "gradient_share": 0.5, "stop_share": 0.25},
    "search": {
        **{"metrics": ["wanda", "random"], "method": "exhaustive", "objective": "loglikelihood"},
        **{"select": "argmax", "alpha": 0.1},
    },
    "router": {"level2": "centroid", "precision": 0.8},
    "evidence": {"controls": 0, "oracle": False},
}


def refusal(data):
    with pytest.raises(FreeMoEError) as caught:
        recipe_from(data, "r.yaml")
    return str(caught.value)


@pytest.mark.parametrize("data", [BUILD, EVAL, FULL, recipe_with("eval", "experts", ["base", "math/0"])])
def test_yaml_and_back_is_equal(data, tmp_path):
    recipe = recipe_from(data)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump(recipe), encoding="utf-8")
    again = load_recipe(file)
    assert again == recipe
    assert type(again) is type(recipe)
    assert dump(again) == dump(recipe)


def test_full_recipe_keeps_every_value():
    kept = recipe_from(FULL).model_dump(mode="json")
    for section, values in FULL.items():
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            assert (kept[section][key] if key else kept[section]) == value


def test_no_command_means_build():
    assert isinstance(recipe_from(SMALLEST["build"]), BuildRecipe)
    assert isinstance(recipe_from(EVAL), EvalRecipe)


def test_short_spellings():
    recipe = recipe_from({**BUILD, "domains": {"math": "gsm8k"}, "search": {"metrics": "wanda, random"}})
    assert recipe.domains == {"math": ("gsm8k",)}
    assert recipe.search.metrics == ("wanda", "random")
    for p in ("1", "2", "4", "inf"):
        written = recipe_from(yaml.safe_load(f"{{model: m, domains: {{a: gsm8k}}, bands: {{p: {p}}}}}"))
        assert written.bands.p == p


def test_recipes_are_frozen():
    recipe = recipe_from(BUILD)
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3


@pytest.mark.parametrize(
    ("path", "allowed", "meant"),
    [
        ("bnads", "command, model, revision, domains", "bands"),
        ("bands.thetta", "start, end, step, ratio, p", ""),
        ("search.metric", "metrics, method, objective, select, alpha", "search.metrics"),
        ("data.rot", "root, limit, fewshot, overflow, allow_code_execution", "data.root"),
        ("subdomains.k", "by, count, min_size", ""),
        ("saliency.bugdet", "method, budget, patience", "saliency.budget"),
        ("router.level", "level2, precision", "router.level2"),
        ("evidence.control", "controls, oracle", "evidence.controls"),
        # Right, but in no section, or in another one.
        ("objective", "command, model", "search.objective"),
        ("bands.alpha", "start, end, step", "search.alpha"),
        ("units.zebra", "unit, off", None),
    ],
)
def test_an_unknown_key_names_its_path_the_allowed_keys_and_what_was_meant(path, allowed, meant):
    message = refusal(recipe_with("build", path, 1))
    assert f"  {path}: " in message
    assert f"allowed here: {allowed}" in message
    assert "(value seen: 1)" in message
    assert meant is not None or "did you mean" not in message
    assert not meant or f"(did you mean {meant}?)" in message


# Path, a value that cannot work, and a part of the message that says what can.
BAD = [
    ("preset", "fast", "'quick', 'standard' or 'thorough'"),
    ("model", 5, "valid string"),
    ("domains", {}, "name one as NAME=TASK"),
    ("domains", ["math=gsm8k"], "valid dictionary"),
    ("domains", {"math": []}, "names no task"),
    ("domains", {"math": None}, "valid tuple"),
    ("domains", {"math": 5}, "valid tuple"),
    ("domains", {"a/b": ["gsm8k"]}, "letters, digits, '-' and '_' only"),
    ("domains", {"": ["gsm8k"]}, "letters, digits, '-' and '_' only"),
    ("output", None, "valid string"),
    ("seed", -1, "greater than or equal to 0"),
    ("seed", 2**32, "less than 4294967296"),
    ("seed", 1.5, "valid integer"),
    ("dtype", "int8", "'auto', 'float32', 'bfloat16' or 'float16'"),
    ("device", 0, "valid string"),
    ("threads", 0, "greater than or equal to 1"),
    ("place", "slurm", "Allowed: local, local:N (N processes), ray"),
    ("place", "local:2:3", "Allowed: local"),
    ("place", "ray://host", "ray://HOST:PORT"),
    ("workers", 0, "greater than or equal to 1"),
    ("workers", 10**6, "less than or equal to 4096"),
    ("unit_seconds", 0, "greater than 0"),
    ("batch_tokens", 8, "greater than or equal to 16"),
    ("data", 5, "valid dictionary"),
    ("data.root", 5, "valid string"),
    ("data.limit", 0, "greater than or equal to 1"),
    ("data.fewshot", -1, "greater than or equal to 0"),
    ("data.fewshot_draw", "each", "'task' or 'document'"),
    ("data.chat", "always", "'auto', 'on' or 'off'"),
    ("data.group_by", "", "at least 1 character"),
    ("data.overflow", "cut", "'truncate' or 'error'"),
    ("data.allow_code_execution", "perhaps", "valid boolean"),
    ("data.samples", 0, "greater than or equal to 1"),
    ("data.temperature", -1, "greater than or equal to 0"),
    ("data.top_p", 0, "greater than 0"),
    ("data.pass_at", 5, "1, 10 or 100"),
    ("data.estimator", "last", "'unbiased' or 'first'"),
    ("subdomains.by", "spectral", "'kmeans', 'task', 'field' or 'none'"),
    ("subdomains.count", 0, "at least 1 subdomain"),
    ("subdomains.count", {"math": -2}, "at least 1 subdomain"),
    ("subdomains.count", {"maths": 2}, "no domain here: a"),
    ("subdomains.count", "many", "valid integer"),
    ("subdomains.min_size", 1, "greater than or equal to 2"),
    ("subdomains.initialisations", 0, "greater than or equal to 1"),
    ("subdomains.feature", "logits", "'embedding' or 'hidden'"),
    ("bands.start", 1.0, "less than 1"),
    ("bands.start", -0.1, "greater than or equal to 0"),
    ("bands.start", float("nan"), "finite number"),
    ("bands.start", 0.95, "reaches above 1"),
    ("bands.end", 0.0, "greater than 0"),
    ("bands.end", 1.1, "less than or equal to 1"),
    ("bands", {"start": 0.5, "end": 0.5}, "not above their start 0.5"),
    ("bands.step", 0, "greater than or equal to 0.000001"),
    ("bands.step", float("inf"), "finite number"),
    ("bands.ratio", 0, "greater than or equal to 0.000001"),
    ("bands.p", 3, "'1', '2', '4' or 'inf'"),
    ("bands.scope", "column", "'row' or 'layer'"),
    ("bands.sublayers", "ffn", "'attention', 'mlp' or 'both'"),
    ("bands.layers", [4, 2], "0 <= first < last"),
    ("bands.layers", [-1, 2], "0 <= first < last"),
    ("bands.layers", "all", "valid tuple"),
    ("bands.patch", 3, "1, 2, 4 or 16"),
    ("saliency.step", 0, "greater than 0"),
    ("saliency.budget", 2, "less than or equal to 1"),
    ("saliency.budget", 0, "greater than 0"),
    ("saliency.patience", 0, "greater than or equal to 1"),
    ("saliency.method", "lerned", "Did you mean 'learned'"),
    ("saliency.checkpointing", "some", "valid boolean"),
    ("saliency.compute", "float16", "'auto', 'own' or 'bfloat16'"),
    ("saliency.steps", 0, "greater than or equal to 1"),
    ("saliency.step_tokens", 0, "greater than or equal to 1"),
    ("saliency.every", 0, "greater than or equal to 1"),
    ("data.text_given", -1, "greater than or equal to 0"),
    ("data.task_folder", 5, "valid string"),
    ("saliency.gradient_share", 0.9, "less than 5 %"),
    ("saliency.gradient_share", 0, "greater than 0"),
    ("saliency.stop_share", 1, "less than 1"),
    ("search.metrics", [], "at least 1"),
    ("units.unit", "head", "neuron"),
    ("units.off", "0.3,0.1", "ascend"),
    ("units.off", [1.0], "less than 1"),
    ("units.off", [], "at least 1"),
    ("units.layout", "odd", "even"),
    ("units.margin", 0, "greater than 0"),
    ("units.multiple", 0, "greater than or equal to 1"),
    ("units.steps", 0, "greater than or equal to 1"),
    ("units.step_tokens", 0, "greater than or equal to 1"),
    ("units.every", 0, "greater than or equal to 1"),
    ("units.patience", 0, "greater than or equal to 1"),
    ("search.metrics", 5, "valid tuple"),
    ("search.metrics", "wanda,wanda", "named twice"),
    ("search.method", "grid", "Known: exhaustive, halving"),
    ("search.objective", "f1", "'accuracy' or 'loglikelihood'"),
    ("search.select", "best", "'guarded' or 'argmax'"),
    ("search.alpha", 0, "greater than 0"),
    ("profile", "authors", "'default' or 'paper'"),
    ("bands.inclusive", "t", "neither true nor false"),
    ("router.level2", "tree", "Known: linear, unregularised, centroid"),
    ("router.precision", 0, "greater than 0"),
    ("evidence.controls", -1, "greater than or equal to 0"),
    ("evidence.oracle", "sometimes", "valid boolean"),
]


@pytest.mark.parametrize(("path", "value", "allowed"), BAD, ids=[f"{p}={v}" for p, v, _ in BAD])
def test_a_bad_value_is_named_with_what_is_allowed(path, value, allowed):
    message = refusal(recipe_with("build", path, value))
    assert message.startswith("r.yaml cannot be used:\n")
    # A few checks look at a whole section, or at one item of a value.
    assert any(f"  {seen}" in message for seen in (path, path.split(".")[0], "(recipe)"))
    assert allowed in message
    assert "(value seen: " in message


def test_every_field_is_checked_somewhere():
    seen = {path for path, _, _ in BAD} | {"command", "revision", "saliency.text_step", "saliency.part_tokens"}
    fields = set()
    for name, field in BuildRecipe.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        fields |= {f"{name}.{key}" for key in inner} if inner else {name}
    assert fields <= seen


@pytest.mark.parametrize(
    ("path", "value"), [("domains", {}), ("seed", -1), ("artefact", 5), ("experts", 5), ("dtype", "int8")]
)
def test_an_eval_recipe_is_checked_too(path, value):
    assert f"  {path}" in refusal(recipe_with("eval", path, value))


def test_missing_fields_are_all_named_at_once():
    message = refusal({"command": "build", "seed": "x"})
    assert "  model: Field required" in message
    assert "  domains: Field required" in message
    assert "  seed: " in message


def test_an_unknown_metric_comes_with_near_misses():
    with pytest.raises(RecipeError, match=r"Unknown metric 'wandda'. Did you mean 'wanda'"):
        recipe_from(recipe_with("build", "search.metrics", ["wandda"]))


@pytest.mark.parametrize("data", [None, 5, "text", ["a"]])
def test_a_recipe_is_a_mapping(data):
    assert f"got {type(data).__name__}" in refusal(data)


@pytest.mark.parametrize("command", ["train", 5, ["build"], None])
def test_an_unknown_command(command):
    message = refusal({**BUILD, "command": command})
    assert f"command is {command!r}; allowed: build, convert, trim, eval" in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"a: [1", "is not valid YAML"), (b"\xff\xfe\x00", "byte 2 is NUL"), (b"", "a recipe is a mapping")],
)
def test_a_file_that_is_no_recipe(content, reason, tmp_path):
    file = tmp_path / "broken.yaml"
    file.write_bytes(content)
    with pytest.raises(RecipeError, match=reason) as caught:
        load_recipe(file)
    assert "broken.yaml" in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere.yaml", "."])
def test_no_file(name, tmp_path):
    with pytest.raises(RecipeError, match=r"is not a file. Print one with: freemoe build"):
        load_recipe(tmp_path / name)


@pytest.mark.parametrize(
    ("grid", "first", "step"),
    [
        # Tables 7-11 of MoDE: ten bands that touch and do not overlap; in ours, and by default.
        ({"start": 0.5, "end": 1.0, "step": 0.05, "ratio": 0.05}, 0.5, 0.05),
        ({"start": 0.0, "end": 0.5, "step": 0.05, "ratio": 0.05}, 0.0, 0.05),
        ({}, 0.0, 0.1),
    ],
)
def test_grids_of_ten_bands(grid, first, step):
    edges = [round(first + n * step, 2) for n in range(11)]
    assert BandSection(**grid).band_edges() == list(itertools.pairwise(edges))


def test_the_papers_profile_of_a_build_is_algorithm_1():
    """theta runs to and through its end, the best band is taken whatever it brings, nobody abstains; what is given wins."""
    data = {**BUILD, "profile": "paper"}
    recipe = recipe_from(data)
    assert [edge[0] for edge in recipe.bands.band_edges()] == pytest.approx([0.05 * n for n in range(11)])
    assert (recipe.search.metrics, recipe.search.method, recipe.search.select) == (("wanda",), "exhaustive", "argmax")
    assert (recipe.router.level2, recipe.router.precision) == ("unregularised", None)
    assert recipe.subdomains.min_size == 2
    wider = recipe_from({**data, "bands": {"ratio": 0.1}})
    assert (wider.bands.ratio, wider.bands.inclusive) == (0.1, True)


@pytest.mark.parametrize("step", [0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 1 / 3])
@pytest.mark.parametrize("ratio", [0.01, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0])
def test_any_grid_stays_inside_and_does_not_drift(step, ratio):
    edges = BandSection(start=0.0, end=1.0, step=step, ratio=ratio).band_edges()
    assert edges
    for i, (a, b) in enumerate(edges):
        assert a == round(i * step, 6)
        assert b == pytest.approx(a + ratio, abs=2e-6)
        assert 0 <= a < b <= 1
    # No band that would fit is left out.
    assert round(len(edges) * step, 6) + ratio > 1 or len(edges) * step >= 1 - 1e-9


def test_bands_begin_below_the_end_of_the_grid_and_may_overlap():
    edges = BandSection(start=0.0, end=0.15, step=0.05, ratio=0.2).band_edges()
    assert edges == [(0.0, 0.2), (0.05, 0.25), (0.1, 0.3)]
