"""What a trim trained on and searched with is never reported as held out."""

import json

import pytest

from freemoe.artefacts import evaluate
from freemoe.core.errors import DataError
from freemoe.hookmoe.evaluation import evaluate_text
from freemoe.hookmoe.material import load_text
from freemoe.hookmoe.pipeline import trim
from freemoe.recipes import EvalRecipe, load_recipe
from tests.hookmoe.conftest import recipe, sentences
from tests.tiny import tiny_tokenizer

SEED = 3


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A copy of the text, to be changed."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": s}) + "\n" for s in sentences(150, 1)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trimmed(saved, text, tmp_path_factory):
    """A trim with seed 3 that read all of its text."""
    training = {"steps": 2, "every": 2, "block": 96, "limit": 500, "held_out": 500, "test": 500}
    output = tmp_path_factory.mktemp("trimmed") / "out"
    return trim(recipe(saved, output, training, text=str(text), seed=SEED, hooks={"layers": "none"}))


def score(artefact, **changes):
    return evaluate(EvalRecipe(artefact=str(artefact), device="cpu", **changes))


def test_questions_and_text_that_were_trained_on_are_set_aside(trimmed, tmp_path):
    parts = load_text(load_recipe(trimmed / "recipe.yaml"), tiny_tokenizer())
    train, held_out, test = (
        "".join(tiny_tokenizer().batch_decode(part.ids)).replace("<s>", "")
        for part in (parts.train, parts.held_out, parts.test)
    )
    passages = sentences(150, 1)
    known = [s for s in passages if s in train or s in held_out]
    unknown = [s for s in passages if s in test]
    assert len(known) > 60
    assert len(unknown) > 5
    rows = [{"prompt": s.strip(), "target": " yes"} for s in [*known[:8], *unknown[:5]]]
    (tmp_path / "ask.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = [{"prompt": f"other {n}", "target": " no"} for n in range(4)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    counts = []
    for seed in (None, 0, 1):
        spec = f"{tmp_path / 'other.jsonl'}::{tmp_path / 'ask.jsonl'}"
        result = score(trimmed, domains={"ask": spec}, seed=seed)
        (domain,) = result["domains"]
        assert result["recipe"]["seed"] == (SEED if seed is None else seed)
        assert domain["set_aside"] == {"documents": 8, "of": 13, "by": {"text": 8}}
        assert domain["rows"]["full"]["documents"] == len(domain["documents"]) == 5
        assert "8 of 13 reported documents set aside" in domain["notes"][-1]
        counts.append(result["seen"]["documents"])
    assert min(counts) > 0
    (tmp_path / "known.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    with pytest.raises(DataError, match="nothing is left to report on"):
        score(trimmed, domains={"ask": f"{tmp_path / 'other.jsonl'}::{tmp_path / 'known.jsonl'}"})


def test_its_own_test_text_is_unseen_until_the_file_changes(trimmed, text):
    again = evaluate_text(str(trimmed))
    result = json.loads((trimmed / "result.json").read_text())
    assert again["set_aside"] == {"documents": 0, "of": result["text"]["blocks"][2], "by": {}}
    assert again["tokens"] == result["test"]["tokens"]
    before = text.read_text(encoding="utf-8")
    # A space after each number divides the same sentences otherwise.
    text.write_text(before.replace('.\\n"', '!\\n"'), encoding="utf-8")
    try:
        changed = evaluate_text(str(trimmed))["set_aside"]
    finally:
        text.write_text(before, encoding="utf-8")
    assert changed["by"]["text"] == changed["documents"] > changed["of"] / 2
