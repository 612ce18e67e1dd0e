"""Each system on an accelerator: from a recipe to its artefact, killed on the way and gone on with, and what is done with it there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from freemoe.core.run.journal import Journal
from freemoe.domain_experts.build import build
from freemoe.hookmoe.trim import trim
from freemoe.recipes import recipe_from
from freemoe.tomoe.convert import convert
from tests.domain_experts.conftest import choice_rows, paragraphs, write_jsonl
from tests.tiny import save_base_and_text, tiny_model, tiny_tokenizer

TRAIN = {"steps": 4, "batch_tokens": 64, "block": 32, "save_every": 2}
HOOKS = {"steps": 4, "rows": 2, "every": 2, "block": 32, "limit": 8, "held_out": 3, "test": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense base, a mixture, a text and a task."""
    folder = tmp_path_factory.mktemp("files")
    save_base_and_text(folder)
    tiny_model("mixtral").save_pretrained(folder / "mixture")
    tiny_tokenizer().save_pretrained(folder / "mixture")
    write_jsonl(folder / "law.jsonl", choice_rows(32))
    (folder / "plain.txt").write_text("\n\n".join(paragraphs()))
    return folder


def convert_recipe(files: Path, **changes: Any) -> dict[str, Any]:
    return {
        "command": "convert",
        "model": str(files / "model"),
        "text": [str(files / "text.jsonl")],
        "experts": 3,
        "dtype": "float32",
        "timing": {"rounds": 1, "new_tokens": 2},
        "train": TRAIN,
        **changes,
    }


def trim_recipe(files: Path, **changes: Any) -> dict[str, Any]:
    return {
        "command": "trim",
        "model": str(files / "mixture"),
        "text": str(files / "text.jsonl"),
        "training": HOOKS,
        "plan": {"given": "uniform:1"},
        **changes,
    }


def build_recipe(files: Path, **changes: Any) -> dict[str, Any]:
    return {
        "command": "build",
        "model": str(files / "model"),
        "domains": {"law": [str(files / "law.jsonl")]},
        "subdomains": {"count": 2, "min_size": 4},
        "bands": {"step": 0.5, "ratio": 0.5},
        "saliency": {"step": 0.002, "budget": 0.006, "patience": 2},
        "search": {"metrics": ["saliency", "wanda"], "method": "exhaustive", "select": "argmax"},
        "evidence": {"controls": 1},
        **changes,
    }


class Killed(Exception):
    """Stands for a kill."""


def killed_every(units: int, run: Callable[[], Path]) -> tuple[Path, int]:
    """Run, killed whenever so many units of work were written, until it ends; and how often it was killed."""
    unit, kills = Journal.unit, 0
    while True:
        left = units

        def dying(journal: Journal, name: str, work: Callable[[], Any]) -> Any:
            nonlocal left
            new = name not in journal
            found = unit(journal, name, work)
            left -= new
            if left == 0:
                raise Killed
            return found

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Journal, "unit", dying)
            try:
                return run(), kills
            except Killed:
                kills += 1


def same_tensors(one: Path, other: Path) -> None:
    files = sorted(p.name for p in one.glob("*.safetensors"))
    assert files == sorted(p.name for p in other.glob("*.safetensors")) != []
    for name in files:
        a, b = load_file(one / name), load_file(other / name)
        assert sorted(a) == sorted(b)
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("run", "recipe", "units"),
    [
        pytest.param(convert, convert_recipe, 6, id="convert"),
        pytest.param(trim, trim_recipe, 3, id="trim"),
        pytest.param(build, build_recipe, 9, id="build"),
    ],
)
def test_a_killed_run_comes_to_the_same(
    run: Callable[..., Path],
    recipe: Callable[..., dict[str, Any]],
    units: int,
    files: Path,
    tmp_path: Path,
    accelerator: str,
) -> None:
    whole, killed = (
        recipe_from(recipe(files, output=str(tmp_path / name), device=accelerator)) for name in ("whole", "killed")
    )
    folder, kills = killed_every(units, partial(run, killed))
    assert kills > 1
    same_tensors(folder, run(whole))
