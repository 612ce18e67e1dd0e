"""What the bundled base shows with the defaults: the README's demo, one domain of it."""

import json

import pytest

from freemoe.domain_experts.demo import demo_recipe
from freemoe.domain_experts.pipeline import build


@pytest.mark.slow
def test_the_demo_finds_what_its_base_was_made_to_hold(tmp_path):
    recipe = demo_recipe(str(tmp_path / "out"), limit=340)
    changed = {
        "domains": {"code": recipe.domains["code"]},
        "search": recipe.search.model_copy(update={"metrics": ("saliency",)}),
        "evidence": recipe.evidence.model_copy(update={"controls": 0, "oracle": False}),
    }
    folder = build(recipe.model_copy(update=changed))
    (code,) = json.loads((folder / "result.json").read_text())["domains"]
    accepted = {s["name"] for s in code["subdomains"] if s["chosen"] != "base"}
    # Sources that contradict each other were planted in these two; one of them takes greedy rounds to find.
    assert {"code/arith", "code/lists"} <= accepted
    assert code["rows"]["expert"]["gain"]["low"] > 5
