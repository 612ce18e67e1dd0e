"""A tiny base with a text, and one conversion of it for all tests that only read."""

import pytest

from freemoe.recipes import recipe_from
from freemoe.tomoe.pipeline import convert
from freemoe.tomoe.recipe import ConvertRecipe
from tests.tiny import save_base_and_text


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A folder with a tiny model and its tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("base")
    save_base_and_text(folder)
    return folder


def recipe(base, output, **values):
    """A conversion of four steps; ``values`` are fields of the recipe."""
    data = {
        "command": "convert",
        "model": str(base / "model"),
        "text": [str(base / "text.jsonl")],
        "output": str(output),
        "experts": 3,
        "dtype": "float32",
        "timing": {"rounds": 1, "new_tokens": 2},
    }
    train = {"steps": 4, "batch_tokens": 64, "block": 32, "save_every": 2, **values.pop("train", {})}
    found = recipe_from({**data, "train": train, **values})
    assert isinstance(found, ConvertRecipe)
    return found


@pytest.fixture(scope="session")
def done(base, tmp_path_factory):
    """The conversion's folder."""
    return convert(recipe(base, tmp_path_factory.mktemp("done") / "out"))
