"""`freemoe convert` from the outside: flags are the recipe, nothing is done when asked not to, the whole way works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from freemoe.recipes import recipe_from
from freemoe.tomoe.recipe import ConvertRecipe
from tests.cli.conftest import Freemoe, document, numbers_are_numbers
from tests.tiny import save_base_and_text

SMALL = ["--steps", "2", "--block", "32", "--batch-tokens", "64", "--experts", "3", "--dtype", "float32"]
SMALL += ["--rounds", "0"]


@pytest.fixture
def model(folder: Path) -> Path:
    """A tiny model and a text, in the folder to work in."""
    save_base_and_text(folder)
    return folder / "model"


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        (["--active", "0.6"], "active", 0.6),
        (["--experts", "16"], "experts", 16),
        (["--method", "activation-split"], "method", "activation-split"),
        (["--mode", "pseudo"], "mode", "pseudo"),
        (["--no-rivals"], "rivals", False),
        (["--steps", "7"], "train.steps", 7),
        (["--block", "64"], "train.block", 64),
        (["--batch-tokens", "128"], "train.batch_tokens", 128),
        (["--rate", "0.01"], "train.rate", 0.01),
        (["--checkpointing"], "train.checkpointing", True),
        (["--new-tokens", "5"], "timing.new_tokens", 5),
        (["--rounds", "0"], "timing.rounds", 0),
        (["--set", "gates.noise=true"], "gates.noise", True),
        (["--seed", "5"], "seed", 5),
        (["--threads", "1"], "threads", 1),
        (["-o", "there"], "output", "there"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_flag_reaches_its_field_and_no_other(flags: list[str], path: str, value: object, freemoe: Freemoe) -> None:
    plain = recipe_from({"command": "convert", "model": "m", "text": ["t"]}).model_dump(mode="json")
    found = yaml.safe_load(freemoe("convert", "m", "--text", "t", *flags, "--print-recipe").out)
    assert isinstance(recipe_from(found), ConvertRecipe)
    *parents, last = path.split(".")
    place = plain
    for part in parents:
        place = place[part]
    assert place[last] != value
    place[last] = value
    assert found == plain


def test_profiles_differ_and_a_flag_wins(freemoe: Freemoe) -> None:
    paper = yaml.safe_load(freemoe("convert", "m", "--text", "t", "--profile", "paper", "--print-recipe").out)
    assert (paper["gates"]["budget"], paper["train"]["steps"]) == ("loss", 10000)
    own = yaml.safe_load(
        freemoe("convert", "m", "--text", "t", "--profile", "paper", "--steps", "9", "--print-recipe").out
    )
    assert own["train"]["steps"] == 9


def test_a_dry_run_writes_nothing(model: Path, freemoe: Freemoe) -> None:
    done = freemoe("convert", str(model), "--text", "text.jsonl", *SMALL, "-o", "out", "--dry-run")
    assert done.code == 0
    assert "steps: 2\nstep: 64 tokens\n" in done.out
    done = freemoe("convert", str(model), "--text", "text.jsonl", *SMALL, "-o", "out", "--dry-run", "--json")
    found = document(done, "convert-plan")
    assert (found["steps"], found["step_tokens"]) == (2, 64)
    assert found["training_bytes"] > 16 * found["trained_numbers"]
    step = found["activations_bytes"] + found["logits_bytes"] + found["training_bytes"]
    assert found["memory_bytes"] == found["base_bytes"] + max(step, found["clustering_bytes"])
    assert found["time_on_this_processor_seconds"] > 0
    assert numbers_are_numbers(found)
    assert not list(model.parent.glob("out*"))


def test_a_dry_run_refuses_what_the_run_would_in_the_same_words(model: Path, freemoe: Freemoe) -> None:
    (model.parent / "short.jsonl").write_text("\n".join(json.dumps(f"{n} little") for n in range(40)))
    before = sorted(model.parent.iterdir())
    for text, block, words in (("short.jsonl", "256", "less than one block"), ("text.jsonl", "999", "context holds")):
        line = ["convert", str(model), "--text", text, *SMALL, "--block", block, "-o", "out"]
        planned, run = freemoe(*line, "--dry-run"), freemoe(*line, "-q")
        assert (planned.code, run.code) == (2, 2)
        assert words in planned.err
        assert planned.err == run.err
    assert sorted(model.parent.iterdir()) == before


def test_the_whole_way(model: Path, freemoe: Freemoe) -> None:
    done = freemoe("convert", str(model), "--text", "text.jsonl", *SMALL, "-o", "out", "-q")
    assert done.code == 0, done.err
    assert "static pruning by magnitude" in done.out
    assert "perplexity@32" in done.out
    result = json.loads((model.parent / "out" / "result.json").read_text())
    perplexity = result["scores"]["dense"]["perplexity@32"]
    assert perplexity >= 288  # random weights
    assert result["guessing"] == {"unit": "perplexity", "score": perplexity, "guessing": 288.0}
    said = f"(perplexity {perplexity:.2f}), all tokens alike have 5.66 (a vocabulary of 288)"
    assert said in done.out
    for name in ("report.html", "README.md"):
        assert said in (model.parent / "out" / name).read_text(encoding="utf-8")
    seen = freemoe("inspect", "out", "--base", str(model), "--json")
    assert document(seen, "inspect")["fits_base"] is True
    assert numbers_are_numbers(document(seen, "inspect"))
    scored = freemoe("eval", "out", "-d", "law=law.jsonl", "--json", "-q")
    assert scored.code == 0, scored.err
    assert 0 <= document(scored, "eval")["domains"][0]["rows"]["base"]["score"] <= 100
    scored = freemoe("eval", str(model), "-d", "law=law.jsonl", "-q")
    assert "on law, chance is 50.0 % (" in scored.out
    assert freemoe("report", "out").code == 0
    assert document(freemoe("report", "out", "--json"), "report")["result"]["kind"] == "converted"
    made = document(freemoe("run", "out/recipe.yaml", "-q", "-o", "again", "--json"), "convert")
    assert made["result"]["parameters"] == json.loads(Path("again/result.json").read_text())["parameters"]
    assert made["result"]["scores"] == result["scores"]
    again = freemoe("convert", str(model), "--text", "text.jsonl", *SMALL, "-o", "out", "-q")
    assert again.code == 2
    assert "exists already" in again.err


def test_refused_in_words(model: Path, freemoe: Freemoe) -> None:
    for flags, words in (
        (["--active", "1.5"], "active"),
        (["--experts", "1"], "experts"),
        (["--text", "absent.txt"], "No file at"),
        (["--mix", "paper", "--data-root", "."], "'alpaca' is not under"),
    ):
        done = freemoe("convert", str(model), "--text", "text.jsonl", *SMALL, *flags, "-o", "bad")
        assert done.code == 2
        assert words in done.err
        assert "Traceback" not in done.err
    assert not list(model.parent.glob("bad*"))
