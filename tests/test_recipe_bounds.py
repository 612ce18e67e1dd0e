"""Every field of every recipe has a largest value, and whatever stands in a recipe is read or refused in words, and soon."""

import contextlib
import random
import time
import types
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
import yaml
from pydantic.fields import FieldInfo

from freemoe.core.environment import require_cores, use_threads
from freemoe.core.errors import RecipeError
from freemoe.domain_experts.recipe import BandSection, BuildRecipe
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.recipes import EvalRecipe, dump, load_recipe, recipe_from, set_path
from freemoe.recipes.sections import RecipeSection
from freemoe.tomoe.recipe import ConvertRecipe

KINDS = (BuildRecipe, EvalRecipe, ConvertRecipe, TrimRecipe)
SMALLEST = {
    "build": {"model": "m", "domains": {"a": ["a.jsonl"]}},
    "eval": {"artefact": "m", "domains": {"a": ["a.jsonl"]}},
    "convert": {"model": "m", "text": ["a.txt"]},
    "trim": {"model": "m", "text": "a.txt"},
}


def fields(section, path=""):
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, RecipeSection):
            yield from fields(field.annotation, f"{path}{name}.")
        elif name != "command":
            yield path + name, field


FIELDS = [(kind.model_fields["command"].default, path, field) for kind in KINDS for path, field in fields(kind)]


def unbounded(annotation, metadata):
    """The types in a field that have no largest value."""
    limits = {type(m).__name__ for m in metadata} | {
        type(inner).__name__ for m in metadata if isinstance(m, FieldInfo) for inner in m.metadata
    }
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return unbounded(parts[0], [*metadata, *parts[1:]])
    if origin in (Union, types.UnionType):
        return [kind for part in parts for kind in unbounded(part, metadata)]
    if origin is Literal or annotation in (bool, str, type(None)):  # texts have one bound for all: `test_texts`
        return []
    if annotation in (int, float):
        return [] if limits & {"Le", "Lt"} else [annotation]
    if origin is tuple and Ellipsis not in parts:
        return [kind for part in parts for kind in unbounded(part, [])]
    assert origin in (tuple, dict), annotation
    inner = [kind for part in parts if part is not Ellipsis for kind in unbounded(part, [])]
    return inner if "MaxLen" in limits else [*inner, annotation]


# Bounded by a check of their own, with a test below.
OWN = {"subdomains.count", "device"}


@pytest.mark.parametrize(("command", "path", "field"), FIELDS, ids=[f"{c}:{p}" for c, p, _ in FIELDS])
def test_every_field_has_a_largest_value(command, path, field):
    assert path in OWN or unbounded(field.annotation, field.metadata) == []


def recipe_with(command, path, value):
    data = {"command": command, **SMALLEST[command]}
    data = {name: dict(held) if isinstance(held, dict) else held for name, held in data.items()}
    set_path(data, path, value)
    return data


HOSTILE = {
    "huge": 10**400,
    "large": 2**63,
    "small": -(2**63),
    "infinite": float("inf"),
    "none": float("nan"),
    "tiny": 5e-324,
    "NUL": "a\0b",
    "escape": "\x1b[31mred",
    "half a pair": "\ud800",
    "long": "x" * 10**6,
    "empty": "",
    "yes": True,
    "list": ["\0"] * 3,
    "long list": [1] * 20_000,
    "mapping": {"\0": {"a": ["\ud800"]}},
    "wide mapping": {str(i): i for i in range(10**4)},
    "bytes": b"\xff",
    "nested": [[[[[[1]]]]]],
}


@pytest.mark.parametrize(("command", "path"), [(c, p) for c, p, _ in FIELDS])
def test_hostile_values_are_read_or_refused(command, path):
    for name, value in HOSTILE.items():
        began = time.monotonic()
        try:
            read = recipe_from(recipe_with(command, path, value), "r.yaml")
        except RecipeError as error:
            said = str(error)
            assert "r.yaml" in said
            assert path.split(".")[0] in said, name
            assert len(said) < 20_000
            said.encode()
            assert "\0" not in said
        else:
            # What is accepted can be written and read again.
            assert recipe_from(yaml.safe_load(dump(read))) == read
            refused = {"huge", "infinite", "none", "NUL", "escape", "half a pair", "long", "large", "small"}
            assert name not in refused or (path, name) == ("bands.p", "infinite"), name
        assert time.monotonic() - began < 5, name


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("threads", 100_000, "threads: Input should be less than or equal to 4096 (value seen: 100000)"),
        ("workers", 100_000, "workers: Input should be less than or equal to 4096"),
        ("limit", True, "there is no such field"),
        ("data.limit", True, "data.limit: yes and no are not allowed here (value seen: True)"),
        ("subdomains.count", 10**9, "at least 1 subdomain, and at most 10,000"),
        ("subdomains.count", {"a": 10**9}, "at least 1 subdomain, and at most 10,000"),
        ("model", "a\x1b[0m", r"model: the text holds a control character (value seen: 'a\x1b[0m')"),
        ("model", "a\0", "the text holds the character NUL"),
        ("model", "x" * 5000, "a text of 5,000 characters; at most 4,096 are allowed"),
        ("domains", {"a" * 65: ["x"]}, "has 65 characters; at most 64 are allowed"),
        ("domains", {f"a{i}": ["x"] for i in range(1001)}, "at most 1000 items"),
        ("bands", {"step": 1e-9}, "greater than or equal to 0.000001"),
        ("bands", {"step": 1e-5}, "makes 100,000 bands; at most 10,000 are searched: take a larger step"),
        ("bands", {"ratio": 1e-9}, "greater than or equal to 0.000001"),
        ("bands", {"step": 1e-300, "end": 1e-300}, "greater than or equal to 0.000001"),
    ],
)
def test_bounds_are_told(path, value, reason):
    with pytest.raises(RecipeError) as caught:
        recipe_from(recipe_with("build", path, value), "r.yaml")
    assert reason in str(caught.value)


def test_the_finest_grid_is_quick_and_without_doubles():
    edges = BandSection(step=1e-4, ratio=1e-4).band_edges()
    assert len(edges) == len(set(edges)) == 10_000
    assert all(a < b for a, b in edges)


def test_threads_are_bounded_by_the_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    require_cores("threads", 32)
    with pytest.raises(RecipeError, match="threads is 33; this machine has 8 cores, and at most 32"):
        use_threads(33)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    require_cores("workers", 16)
    with pytest.raises(RecipeError, match="workers is 17"):
        require_cores("workers", 17)


def test_many_problems_are_told_in_a_page():
    with pytest.raises(RecipeError) as caught:
        recipe_from({**recipe_with("build", "seed", "x" * 3000), **{f"field{i}": "y" * 3000 for i in range(2000)}})
    assert "and 1,95" in str(caught.value)
    assert len(str(caught.value)) < 60_000


def test_a_path_of_many_names():
    with pytest.raises(RecipeError, match="no field lies 50,000 names deep"):
        set_path({}, ".".join(["a"] * 50_000), 1)


def test_yaml_at_random_is_read_or_refused(tmp_path):
    """Good recipes with bytes changed, cut out and put in."""
    good = dump(recipe_from(recipe_with("build", "seed", 3))).encode()
    drawn = random.Random(0)
    file = tmp_path / "r.yaml"
    pieces = [b"", *b"&a |*a|[|{|\x00|\xff|!!int |? |\t|: |- |.inf|<<: ".split(b"|"), b"9" * 30]
    for _ in range(60):
        data = bytearray(good)
        for _ in range(drawn.randint(1, 6)):
            at = drawn.randrange(len(data))
            data[at : at + drawn.randint(0, 8)] = drawn.choice(pieces)
        file.write_bytes(data)
        with contextlib.suppress(RecipeError):
            load_recipe(file)
