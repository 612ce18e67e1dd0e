"""A command line, a recipe and a YAML file are three spellings of one thing."""

import json
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import typer.main
from pydantic.fields import FieldInfo

from freemoe.cli import app
from freemoe.cli import build as build_cli
from freemoe.cli import convert as convert_cli
from freemoe.cli import evaluate as eval_cli
from freemoe.cli import trim as trim_cli
from freemoe.domain_experts.demo import demo_recipe
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.recipes import EvalRecipe, dump, load_recipe, recipe_from
from tests.test_recipes import FULL


def plain(flags):
    """Flags that are written as their field reads them, with its path."""
    return {n: f.path for n, f in flags.items() if not f.read}


BUILD_PATHS, EVAL_PATHS = plain(build_cli.COMMAND.flags), plain(eval_cli.COMMAND.flags)

BASE = ["build", "some/model", "--domain", "math=gsm8k"]
EVAL = ["eval", "experts", "--domain", "math=gsm8k"]
CONVERT = ["convert", "some/model", "--text", "t.txt"]
DEFAULTS = {
    "build": {"command": "build", "model": "some/model", "domains": {"math": ["gsm8k"]}},
    "eval": {"command": "eval", "artefact": "experts", "domains": {"math": ["gsm8k"]}},
    "convert": {"command": "convert", "model": "some/model", "text": ["t.txt"]},
}


def read_as(kind, values):
    """Flags that are written as ``name=value``, and hold that as a kind of value."""
    pairs = [value.split("=") for value in values.split()]
    return {name: (text, kind(text)) for name, text in pairs}


# Flag -> what is written after it (None: nothing), and what then stands in the recipe.
VALUES = {
    **read_as(
        str,
        "preset=thorough profile=paper output=there data_root=files task_folder=tasks chat=off group_by=book "
        "overflow=error by=field p=inf scope=layer sublayers=mlp search=exhaustive objective=loglikelihood "
        "select=argmax purify=learned unit=kv_group level2=centroid dtype=bfloat16 device=cpu revision=main "
        "base=other/base mix=paper method=activation-split mode=pseudo",
    ),
    **read_as(
        int,
        "limit=12 fewshot=3 samples=20 pass_at=10 min_size=5 patch=4 patience=3 controls=1 seed=9 threads=2 "
        "workers=3 batch_tokens=512 experts=16 steps=7 block=64 new_tokens=5 rounds=0",
    ),
    **read_as(
        float,
        "temperature=0.6 top_p=0.9 ratio=0.05 alpha=0.2 step=1e-4 budget=0.02 unit_seconds=90.5 active=0.6 rate=0.01",
    ),
    "allow_code_execution": (None, True),
    "metric": ("wanda,random", ("wanda", "random")),
    "off": ("0.1,0.3", (0.1, 0.3)),
    "oracle": ("--no-oracle", False),
    "place": ("--on=ray://10.0.0.1:10001", "ray://10.0.0.1:10001"),
    "rivals": ("--no-rivals", False),
    "checkpointing": (None, True),
}


def at(recipe, path):
    for part in path.split("."):
        recipe = getattr(recipe, part)
    return recipe


def without(recipe, path):
    """The recipe's other fields."""
    data = recipe.model_dump(mode="json")
    *parents, last = path.split(".")
    inner = data
    for part in parents:
        inner = inner[part]
    del inner[last]
    return data


def written(flag):
    text, _ = VALUES[flag]
    option = f"--{flag.replace('_', '-')}"
    return [option] if text is None else [text] if text.startswith("--") else [option, text]


def parsed(text, folder):
    (folder / "printed.yaml").write_text(text, encoding="utf-8")
    return load_recipe(folder / "printed.yaml")


@pytest.mark.parametrize(
    ("command", "flag", "path"),
    [
        *[(BASE, flag, path) for flag, path in BUILD_PATHS.items()],
        *[(EVAL, flag, path) for flag, path in EVAL_PATHS.items()],
        *[(CONVERT, flag, path) for flag, path in plain(convert_cli.COMMAND.flags).items()],
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_flag_reaches_its_field_and_no_other(command, flag, path, tmp_path, freemoe):
    default = recipe_from(DEFAULTS[command[0]])
    done = freemoe(*command, *written(flag), "--print-recipe").ok()
    recipe = parsed(done.out, tmp_path)
    assert at(recipe, path) == VALUES[flag][1]
    assert at(default, path) != VALUES[flag][1]
    rest, usual = without(recipe, path), without(default, path)
    if flag == "unit":
        # Units compete alone unless metrics are named.
        assert rest["search"].pop("metrics") == []
        usual["search"].pop("metrics")
    if flag in ("preset", "profile"):
        # They set what is not given.
        usual = without(recipe_from({**DEFAULTS[command[0]], flag: VALUES[flag][1]}), path)
    assert rest == usual


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--subdomains", "8"], {"subdomains.count": 8}),
        (["--subdomains", "math=8, code=3", "-d", "code=mbpp"], {"subdomains.count": {"math": 8, "code": 3}}),
        (["--theta", "0.5:1:0.05"], {"bands.start": 0.5, "bands.end": 1.0, "bands.step": 0.05}),
        (["--layers", "1:4"], {"bands.layers": (1, 4)}),
        (["--free"], {"units.layout": "free"}),
        (
            ["--unit", "neuron", "--even", "--metric", "saliency"],
            {"search.metrics": ("saliency",), "units.off": (0.2,)},
        ),
        (["-d", "general=mmlu,arc_easy@5"], {"domains": {"math": ("gsm8k",), "general": ("mmlu", "arc_easy@5")}}),
        (["--seed", "3", "--set", "seed=4"], {"seed": 4}),
        (["--allow-code-execution=unsafe"], {"data.allow_code_execution": "unsafe"}),
        (["--allow-code-execution", "--seed", "3"], {"data.allow_code_execution": True, "seed": 3}),
        (["--set", "bands.layers=[0, 2]", "--set", "search.metrics=magnitude"], {"search.metrics": ("magnitude",)}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_say_more_than_one_thing(arguments, expected, tmp_path, freemoe):
    done = freemoe(*BASE, *arguments, "--print-recipe").ok()
    recipe = parsed(done.out, tmp_path)
    assert {path: at(recipe, path) for path in expected} == expected


def test_every_option_of_build_and_eval_is_accounted_for():
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    acting = {"sets", "overwrite", "dry_run", "print_recipe_", "summary", "as_json", "quiet", "help_all", "domain"}
    build = {p.name for p in commands["build"].params}
    assert build == {*BUILD_PATHS, *acting, "model", "subdomains", "theta", "layers", "even", "resume"}
    assert {p.name for p in commands["eval"].params} == {*EVAL_PATHS, *acting, "artefact", "expert"}


@pytest.mark.parametrize("command", [build_cli.COMMAND, convert_cli.COMMAND, trim_cli.COMMAND, eval_cli.COMMAND])
def test_help_says_what_a_field_is_may_be_and_is_by_default(command):
    shown = {p.name: p for p in typer.main.get_command(app).commands[command.name].params}  # type: ignore[attr-defined]
    for name, path in plain(command.flags).items():
        field = command.recipe
        for part in path.split("."):
            field = (field.annotation if isinstance(field, FieldInfo) else field).model_fields[part]
        told = " ".join(shown[name].help.split())
        assert field.description, name
        assert told.startswith(field.description.removesuffix(".")), name
        default = field.default
        if isinstance(default, int | float | str) and not isinstance(default, bool):
            assert told.endswith(f"[{default:g}]" if isinstance(default, float) else f"[{default}]"), name
        if get_origin(field.annotation) is Literal:
            assert all(str(choice) in told for choice in get_args(field.annotation)), name


LEAVES = [
    (f"{name}.{key}" if key else name, inner)
    for name, value in FULL.items()
    if name not in ("command", "model", "domains")
    for key, inner in (value.items() if isinstance(value, dict) else [("", value)])
]


@pytest.mark.parametrize(("path", "value"), LEAVES, ids=[p for p, _ in LEAVES])
def test_set_reaches_every_field(path, value, tmp_path, freemoe):
    # Some values need a companion to be allowed at all.
    extra = ["-d", "mine=x.jsonl"] if path == "subdomains.count" else []
    done = freemoe(*BASE, *extra, "--set", f"{path}={json.dumps(value)}", "--print-recipe").ok()
    found = at(parsed(done.out, tmp_path), path)
    assert (list(found) if isinstance(found, tuple) else found) == value


def everything():
    flags = [w for flag in BUILD_PATHS for w in written(flag)]
    return [*flags, "--subdomains", "math=2", "--theta", "0:0.5:0.05", "--layers", "0:2", "--set", "search.alpha=0.1"]


@pytest.mark.parametrize("arguments", [[], everything()], ids=["defaults", "every flag"])
def test_flags_yaml_and_run_say_the_same(arguments, tmp_path, freemoe):
    printed = freemoe(*BASE, *arguments, "--print-recipe").ok()
    recipe = parsed(printed.out, tmp_path)
    flags = {flag: VALUES[flag][1] for flag in BUILD_PATHS} if arguments else {}
    more = {"subdomains": "math=2", "theta": "0:0.5:0.05", "layers": "0:2"} if arguments else {}
    sets = ["search.alpha=0.1"] if arguments else []
    assert recipe == build_cli.COMMAND.read_recipe(
        {"model": "some/model", "domain": ["math=gsm8k"], "sets": sets, **flags, **more}
    )
    again = freemoe("run", str(tmp_path / "printed.yaml"), "--print-recipe")
    assert again == printed


def test_eval_prints_what_run_repeats(tmp_path, freemoe):
    printed = freemoe(*EVAL, "--expert", "base", "-e", "math/0", "--print-recipe")
    recipe = parsed(printed.out, tmp_path)
    assert isinstance(recipe, EvalRecipe)
    assert recipe.experts == ("base", "math/0")
    assert freemoe("run", str(tmp_path / "printed.yaml"), "--print-recipe") == printed


def test_run_fills_in_defaults_and_takes_another_output(tmp_path, freemoe):
    file = tmp_path / "short.yaml"
    file.write_text("{model: m, domains: {math: gsm8k}}")
    done = freemoe("run", str(file), "-o", "elsewhere", "--print-recipe")
    expected = recipe_from({"model": "m", "domains": {"math": ["gsm8k"]}, "output": "elsewhere"})
    assert done.out == dump(expected)


def test_the_demo_is_an_ordinary_recipe(tmp_path, freemoe):
    done = freemoe(
        "demo", "-o", "mine", "--seed", "3", "--limit", "9", "--threads", "1", "--workers", "2", "--print-recipe"
    )
    recipe = parsed(done.out, tmp_path)
    assert isinstance(recipe, BuildRecipe)
    assert recipe == demo_recipe("mine", seed=3, limit=9, threads=1, workers=2)
    # Nothing of this machine stands in it, so that it means the same elsewhere.
    assert str(Path.home()) not in done.out
    assert str(Path(__file__).parents[2]) not in done.out
