"""`freemoe convert` from the outside: flags are the recipe, nothing is done when asked not to, the whole way works."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import document, numbers_are_numbers
from tests.tiny import save_base_and_text

SMALL = ["--steps", "2", "--block", "32", "--batch-tokens", "64", "--experts", "3", "--dtype", "float32"]
SMALL += ["--rounds", "0"]


@pytest.fixture
def model(folder):
    """A tiny model and a text, in the folder to work in."""
    save_base_and_text(folder)
    return folder / "model"


def test_a_dry_run_writes_nothing(model, freemoe):
    done = freemoe("convert", str(model), "--text", "text.jsonl", *SMALL, "-o", "out", "--dry-run").ok()
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


def test_a_dry_run_refuses_what_the_run_would_in_the_same_words(model, freemoe):
    (model.parent / "short.jsonl").write_text("\n".join(json.dumps(f"{n} little") for n in range(40)))
    before = sorted(model.parent.iterdir())
    for flags, words in (
        (["--text", "short.jsonl", "--block", "256"], "less than one block"),
        (["--text", "text.jsonl", "--block", "999"], "context holds"),
        (["--text", "text.jsonl", "--active", "1.5"], "active"),
        (["--text", "text.jsonl", "--experts", "1"], "experts"),
        (["--text", "absent.txt"], "No file at"),
        (["--mix", "paper", "--data-root", "."], "'alpaca' is not under"),
    ):
        line = ["convert", str(model), *SMALL, *flags, "-o", "out"]
        assert freemoe(*line, "--dry-run").refused(words) == freemoe(*line, "-q")
    assert sorted(model.parent.iterdir()) == before


def test_the_whole_way(model, freemoe):
    done = freemoe("convert", str(model), "--text", "text.jsonl", *SMALL, "-o", "out", "-q").ok()
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
    scored = document(freemoe("eval", "out", "-d", "law=law.jsonl", "--json", "-q"), "eval")
    assert 0 <= scored["domains"][0]["rows"]["base"]["score"] <= 100
    scored = freemoe("eval", str(model), "-d", "law=law.jsonl", "-q")
    assert "on law, chance is 50.0 % (" in scored.out
    freemoe("report", "out").ok()
    assert document(freemoe("report", "out", "--json"), "report")["result"]["kind"] == "converted"
    made = document(freemoe("run", "out/recipe.yaml", "-q", "-o", "again", "--json"), "convert")
    assert made["result"]["parameters"] == json.loads(Path("again/result.json").read_text())["parameters"]
    assert made["result"]["scores"] == result["scores"]
    freemoe("convert", str(model), "--text", "text.jsonl", *SMALL, "-o", "out", "-q").refused("exists already")
