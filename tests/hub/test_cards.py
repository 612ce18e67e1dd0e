"""Model cards whose front matter the hub takes, and which name nothing of the machine they were made on."""

import json

import pytest
from huggingface_hub import ModelCard, metadata_load

from freemoe.domain_experts.prove.card import model_card as card_of_experts
from freemoe.hookmoe.card import model_card as card_of_trim
from freemoe.hub.cards import HERE, CardMetric, card_header, card_notes, loading_example
from freemoe.tomoe.card import model_card as card_of_conversion
from tests.report.family import make_conversion, make_trim
from tests.report.synthetic import typed

HUB, LOCAL = "maker/base", "/home/somebody/models/base"

CONVERTED = make_conversion()
CONVERTED["recipe"]["text"] = "hf:maker/corpus:train"
CONVERTED["scores"]["converted"] |= {"perplexity@128": 12.5, "next_token_accuracy@128": 0.25}


@pytest.fixture(params=["experts", "trimmed", "converted"])
def made(request, experts):
    """A card's maker and a result."""
    if request.param == "experts":
        return card_of_experts, json.loads((experts / "result.json").read_text())
    return (card_of_trim, make_trim()) if request.param == "trimmed" else (card_of_conversion, CONVERTED)


def named(result, base):
    return typed({**result, "base": {**result["base"], "name": base}})


def header(text, tmp_path):
    """Front matter as the hub's client reads it."""
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    return metadata_load(tmp_path / "README.md")


def test_the_front_matter_is_the_hubs(made, tmp_path):
    write, result = made
    text = write(named(result, HUB))
    found = header(text, tmp_path)
    assert found["base_model"] == HUB
    assert found["base_model_relation"] == ("finetune" if result["kind"] == "converted" else "adapter")
    assert (found["library_name"], found["pipeline_tag"]) == ("freemoe", "text-generation")
    assert found["tags"][0] == "freemoe"
    assert "license" not in found
    data = ModelCard(text).data
    assert data.eval_results
    assert found["metrics"] == sorted({figure.metric_type for figure in data.eval_results})
    # Loaded in three lines, and pushing puts the repository's name there.
    assert f'freemoe.load("{HERE}")' in text
    assert "was a folder or file" not in text


def test_a_path_of_this_machine_is_not_told(made, tmp_path):
    write, result = made
    text = write(named(result, LOCAL))
    found = header(text, tmp_path)
    assert "base_model" not in found
    assert "base_model_relation" not in found
    assert "somebody" not in text
    assert "`base`, was a folder or file of the machine" in text
    if result["kind"] != "converted":
        assert f'freemoe.load("{HERE}", base="path/to/the/base")' in text


def test_the_figures_are_the_results(experts, tmp_path):
    result = json.loads((experts / "result.json").read_text())
    data = ModelCard(card_of_experts(named(result, HUB))).data
    found = {(r.dataset_name, r.metric_name): r.metric_value for r in data.eval_results}
    for domain in result["domains"]:
        assert found[domain["name"], f"{domain['metric']}, expert"] == round(domain["rows"]["expert"]["score"], 4)
    conversion = header(card_of_conversion(named(CONVERTED, HUB)), tmp_path)
    assert conversion["datasets"] == ["maker/corpus"]
    values = [m["value"] for r in conversion["model-index"][0]["results"] for m in r["metrics"]]
    assert values == [12.5, 25.0]


def test_names_that_are_hard_for_yaml(tmp_path):
    figures = [CardMetric("yes: no", "accuracy", 1 / 3, 'a "name", %')]
    text = "\n".join(
        card_header(
            "maker/base@v1",
            "Title: with [all] & more",
            "adapter",
            ["x"],
            "About.",
            figures,
            ["hf:a/b", "law.jsonl", "hf:a/b:c:train::hf:d/e:test"],
        )
    )
    found = header(text + "\n", tmp_path)
    assert found["base_model"] == "maker/base"
    assert found["datasets"] == ["a/b", "d/e"]
    assert found["model-index"][0]["name"] == "Title: with [all] & more"
    assert found["model-index"][0]["results"][0]["dataset"]["name"] == "yes: no"
    assert found["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.3333


def test_bundled_bases_are_found_by_others():
    assert card_notes("freemoe-demo") == []
    assert card_notes("freemoe-demo", typed({**make_trim(), "notes": ["a quick answer"]})) == ["a quick answer", ""]
    assert any(line == f'moe = freemoe.load("{HERE}")' for line in loading_example("freemoe-demo", "moe", "x"))
