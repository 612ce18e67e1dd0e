"""What a conversion trained on is never reported as held out."""

import json
import random

import pytest

from freemoe.artefacts import evaluate
from freemoe.core.errors import DataError
from freemoe.evals.seen import SeenHashes
from freemoe.evals.tasks.documents import FrozenChoice
from freemoe.evals.tasks.domains import load_domain
from freemoe.recipes import EvalRecipe
from freemoe.text.words import split_words
from freemoe.tomoe.material import read_text
from freemoe.tomoe.pipeline import convert
from tests.tiny import tiny_tokenizer
from tests.tomoe.conftest import recipe

SEED = 3


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    """A conversion with seed 3, and its recipe."""
    folder = tmp_path_factory.mktemp("convert")
    draw = random.Random(5)
    lines = [" ".join(draw.choices(["elm", "oak", "ash", "yew", "fir", "bay"], k=40)) + f" {n}." for n in range(90)]
    (folder / "trees.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    quick = {"experts": 2, "rivals": False, "method": "static-activation", "train": {"steps": 2, "block": 128}}
    asked = recipe(base, folder / "out", text=[str(folder / "trees.jsonl")], seed=SEED, **quick)
    return convert(asked), asked


def score(artefact, **changes):
    return evaluate(EvalRecipe(artefact=str(artefact), device="cpu", **changes))


def runs(text):
    found = split_words(text)
    return {tuple(found[i : i + 13]) for i in range(len(found) - 12)}


def test_text_that_was_trained_on_is_set_aside_under_every_seed(made, tmp_path):
    artefact, asked = made
    parts = read_text(asked, None)
    known = set().union(*(runs(piece) for piece in [*parts.train, *parts.held_out]))
    # The test part, then as much that was trained on, in blocks of their own.
    (tmp_path / "mixed.txt").write_text("\n".join([*parts.test, *parts.train[: len(parts.test)]]))
    (tmp_path / "other.txt").write_text("nothing of that kind stands here\n" * 60)
    spec = f"text:{tmp_path / 'other.txt'}::{tmp_path / 'mixed.txt'}"
    kept_ids = []
    for seed in (None, 0, 1):
        result = score(artefact, domains={"trees": spec}, seed=seed)
        (domain,) = result["domains"]
        assert result["recipe"]["seed"] == (SEED if seed is None else seed)
        aside = domain["set_aside"]
        assert aside["by"] == {"text": aside["documents"]}
        assert aside["of"] / 3 < aside["documents"] < aside["of"]
        assert domain["rows"]["base"]["documents"] == aside["of"] - aside["documents"]
        kept_ids.append({d["id"] for d in domain["documents"]})
    reported = load_domain("trees", [spec], tokenizer=tiny_tokenizer()).reported.open(FrozenChoice("test"))
    seen_ids = {f"{d.task}/{d.id}" for d in reported if known & runs(d.reference)}
    assert seen_ids
    assert all(not kept & seen_ids for kept in kept_ids)
    (tmp_path / "known.txt").write_text("\n".join(parts.train[:20]))
    with pytest.raises(DataError, match="nothing is left to report on"):
        score(artefact, domains={"trees": f"text:{tmp_path / 'other.txt'}::{tmp_path / 'known.txt'}"})


def test_questions_that_were_converted_on_are_recognised_in_other_shapes(made, tmp_path):
    rows = [{"question": f"Is elm {n} older?", "choices": ["no", "yes"], "answer": n % 2} for n in range(60)]
    twice = [{**row, "question": row["question"].upper() + "!", "key": f"own {n}"} for n, row in enumerate(rows)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *twice]))
    parts = read_text(made[1].model_copy(update={"text": (str(tmp_path / "q.jsonl"),)}), None)
    sides = [
        {n for n in range(60) if any(f" {n} " in t for t in part)} for part in (parts.train, parts.held_out, parts.test)
    ]
    assert sum(map(len, sides)) == 60
    seen = SeenHashes.from_questions(parts.seen_questions())
    talk = [
        {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": "I think so."}]}
        for row in rows
    ]
    for shape in (rows, talk):
        (tmp_path / "later.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shape))
        data = load_domain("q", [str(tmp_path / "later.jsonl")], tokenizer=tiny_tokenizer())
        documents = [*data.reference.documents, *data.reported.open(FrozenChoice("x"))]
        known = {int(d.about[0].split()[2]) for d in documents if seen.seen_reason(d)}
        assert known == sides[0] | sides[1]
