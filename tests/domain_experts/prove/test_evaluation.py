"""Scoring a finished artefact says the same as the report that was written with it."""

import json
import math

import pytest

from freemoe.artefacts import evaluate, score_elsewhere
from freemoe.core.errors import ArtifactError, DataError, FreeMoEError, UnknownNameError
from freemoe.distributed import executors
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import FrozenChoice
from freemoe.evals.tasks.domains import load_domains
from freemoe.recipes import recipe_from
from tests.core.run.away import SerialAway
from tests.domain_experts.conftest import read_result


def recipe_of(world, artefact, **changes):
    data = {
        "command": "eval",
        "artefact": str(artefact),
        "base": str(world.base),
        "domains": {"law": [str(world.law)], "sums": [str(world.sums)]},
        "device": "cpu",
        "batch_tokens": 4096,
    }
    return recipe_from({**data, **changes})


def test_it_equals_the_result_of_the_build(world, artefact):
    built = read_result(artefact)
    names = [s["name"] for d in built["domains"] for s in d["subdomains"]]
    found = evaluate(recipe_of(world, artefact, experts=["base", "auto", *names]))
    for mine, theirs in zip(found["domains"], built["domains"], strict=True):
        assert mine["name"] == theirs["name"]
        assert mine["unit"] == "points"
        assert mine["rows"]["base"] == theirs["rows"]["base"]
        # All rows of an evaluation are tested together; those of a build were tested before they were reported.
        assert {k: v for k, v in mine["rows"]["auto"].items() if k not in ("p", "holm")} == theirs["rows"]["routed"]
        assert list(mine["rows"]) == ["base", "auto", *names]
        for a, b in zip(mine["documents"], theirs["documents"], strict=True):
            assert (a["id"], a["key"], a["routed_to"]) == (b["id"], b["key"], b["routed_to"])
            assert (a["base"], a["auto"]) == (b["base"], b["routed"])
            assert a[b["subdomain"]] == b["expert"]


def test_text_equals_the_result_of_the_build(world, text_artefact):
    (theirs,) = read_result(text_artefact)["domains"]
    recipe = recipe_of(world, text_artefact, domains={"wiki": [f"text:{world.text}"]}, experts=["auto", "wiki/all"])
    (mine,) = evaluate(recipe)["domains"]
    assert mine["unit"] == "perplexity"
    for a, b in (("base", "base"), ("wiki/all", "expert"), ("auto", "routed")):
        assert mine["rows"][a]["score"] == pytest.approx(theirs["rows"][b]["score"], rel=1e-4)
        assert mine["rows"][a]["ratio"]["mean"] == pytest.approx(theirs["rows"][b]["ratio"]["mean"], rel=1e-4)
    total = sum(d["base"] for d in mine["documents"]) / len(mine["documents"])
    assert math.exp(-total) == pytest.approx(mine["rows"]["base"]["score"], rel=1e-4)


def test_a_plain_model_has_its_base_row(world, artefact):
    plain = evaluate(recipe_of(world, world.base, base=None))
    for mine, theirs in zip(plain["domains"], read_result(artefact)["domains"], strict=True):
        assert list(mine["rows"]) == ["base"]
        assert mine["rows"]["base"] == theirs["rows"]["base"]


def test_the_output_is_written_once(world, artefact, tmp_path):
    output = tmp_path / "eval.json"
    recipe = recipe_of(world, artefact, experts=["base"], output=str(output))
    found = evaluate(recipe)
    assert json.loads(output.read_text()) == json.loads(json.dumps(found))
    assert found["kind"] == "evaluation"
    before = output.read_bytes()
    with pytest.raises(ArtifactError, match="exists already"):
        evaluate(recipe)
    assert output.read_bytes() == before
    evaluate(recipe, overwrite=True)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"experts": ["law/00"]}, UnknownNameError, "law/0"),
        ({"experts": ["law/0+sums/al"]}, UnknownNameError, "Unknown expert 'sums/al'"),
        ({"dtype": "bfloat16"}, FreeMoEError, "fingerprint"),
        ({"artefact": "."}, ArtifactError, "neither an artefact"),
    ],
)
def test_bad_input(world, artefact, tmp_path, monkeypatch, changes, error, said):
    monkeypatch.chdir(tmp_path)  # with nothing in it
    with pytest.raises(error, match=said):
        evaluate(recipe_of(world, **{"artefact": artefact, **changes}))


def test_combinations_are_scored_beside_their_parts(world, artefact, moe):
    names = ["law/0", "sums/all", "law/0+sums/all", "law/0&sums/all"]
    found = evaluate(recipe_of(world, artefact, experts=names))
    for domain in found["domains"]:
        assert list(domain["rows"]) == ["base", *names]
        assert all({"low", "high"} <= domain["rows"][n]["gain"].keys() for n in names)
    # The same scores as of the combination written as a plain model.
    data = load_domains(recipe_of(world, artefact, seed=0), world.tokenizer)["law"]
    model = moe.merge_and_unload("law/0+sums/all")
    documents = data.reported.open(FrozenChoice("x"))
    scores = Evaluator(Scorer(model, world.tokenizer, batch_tokens=4096), data.graders).score(documents)
    told = {d["id"]: d["law/0+sums/all"] for d in found["domains"][0]["documents"]}
    assert [told[f"{d.task}/{d.id}"] for d in documents] == [s.value for s in scores]


def test_workers_score_what_one_process_scores(world, artefact, monkeypatch):
    monkeypatch.setattr(executors, "ProcessPool", SerialAway)
    recipe = recipe_of(world, artefact, experts=["base", "auto"], threads=1)
    alone, two = evaluate(recipe), evaluate(recipe.model_copy(update={"place": "local:2"}))
    assert two["domains"] == alone["domains"]


def test_a_worker_with_other_documents_says_so(world, artefact):
    recipe = recipe_of(world, artefact, experts=["base"])
    with pytest.raises(DataError, match="found other documents for"):
        score_elsewhere(recipe.model_dump(mode="json"), domain="sums", way="base", documents="other")
