"""Super weights of a model, as the command line shows them."""

import pytest

from freemoe.domain_experts.artefact import PASSAGE
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.weights import find_weights
from tests.cli.conftest import document, numbers_are_numbers


def test_super_weights_are_those_of_the_model(freemoe, tmp_path):
    found = document(freemoe("inspect", "freemoe-demo", "--super-weights", "--json"), "inspect")
    assert numbers_are_numbers(found)
    shown = found["super_weights"]
    weights = {w.name: w for w in find_weights(load_base("freemoe-demo")[0])}
    for row in shown:
        assert row["value"] == float(weights[row["weight"]].canonical_view()[row["expert"], row["row"], row["column"]])
    assert len(shown) == 10
    disturbances = [row["disturbance"] for row in shown]
    assert disturbances == sorted(disturbances, reverse=True)
    assert disturbances[-1] > 0
    # The cost is the root of twice the disturbance, in units of one median.
    assert shown[0]["times"] / shown[9]["times"] == pytest.approx((disturbances[0] / disturbances[9]) ** 0.5)
    assert shown[9]["times"] > 1
    # The same text from a file gives the same, another text does not.
    (tmp_path / "same.txt").write_text(PASSAGE, encoding="utf-8")
    (tmp_path / "other.txt").write_text("seven plus two is nine. " * 20, encoding="utf-8")
    same, other = (
        freemoe("inspect", "freemoe-demo", "--super-weights", "--text", str(tmp_path / n), "--json").json
        for n in ("same.txt", "other.txt")
    )
    assert (same["super_weights"], same["tokens"]) == (shown, found["tokens"])
    assert other["super_weights"] != shown


def test_what_has_no_super_weights_is_refused(freemoe, folder):
    (folder / "experts").mkdir()
    freemoe("inspect", "experts", "--super-weights").refused("'experts' is none")
    freemoe("inspect", "freemoe-demo", "--text", "law.jsonl").refused("needs --super-weights")
    load_base("freemoe-demo")[0].save_pretrained("mute")
    freemoe("inspect", "mute", "--super-weights").refused("no tokenizer")
