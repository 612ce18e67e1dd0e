"""What a build would do, what an artefact holds, and its card: plain data, nothing written."""

import pytest

from freemoe.core.errors import ArtifactError, DataError, NumericError
from freemoe.core.run.progress import CollectingProgress
from freemoe.domain_experts.artefact import inspect_artefact, inspect_model
from freemoe.domain_experts.context import prepare_context
from freemoe.domain_experts.cost.dry_run import plan_build
from freemoe.domain_experts.pipeline import build
from freemoe.domain_experts.prove.card import headlines, model_card
from freemoe.domain_experts.prove.power import check_division
from freemoe.domain_experts.purify.methods import METHODS
from freemoe.domain_experts.recipe import PURIFICATIONS
from freemoe.domain_experts.report import domain_sentence
from freemoe.domain_experts.result import BuildResult
from freemoe.domain_experts.route.subdomains import divide_domain, prompt_features
from freemoe.evals.guessing import guessing_text
from freemoe.evals.statistics import detectable_effect, detectable_gain
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.checkpoints.loading import load_base
from freemoe.report.reading import gain_text, gain_words
from freemoe.results import read_result as result_of
from tests.domain_experts.conftest import read_result, task_recipe, text_recipe
from tests.report.synthetic import typed_row

UNDIVIDED = {"subdomains": {"by": "none"}}
GUARDED = {"search": {"metrics": ["saliency", "random"], "select": "guarded"}}


def test_a_plan_counts_and_writes_nothing(world, artefact, tmp_path):
    recipe = task_recipe(world, tmp_path / "out")
    found = plan_build(recipe)
    assert list(tmp_path.iterdir()) == []
    assert found["subdomains"] == 3 == sum(len(d["subdomains"]) for d in read_result(artefact)["domains"])
    assert found["bands_per_subdomain"] == 8
    assert found["documents"]["law"] == {"reference": 32, "reported": 32}
    assert (found["candidate_bands"], found["purifications"]) == (24, 3)
    assert any("carved" in note for note in found["splits"])
    assert found["time_of_one_worker_seconds"] > found["time_of_one_document_seconds"] > 0
    assert found["output"] == str(tmp_path / "out")
    assert all(str(value) for value in found.values())


@pytest.mark.parametrize("kind", ["embedding", "hidden"])
def test_weights_too_large_for_their_sums(world, tmp_path, kind):
    model, tokenizer = load_base(world.base, device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(3e38)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    recipe = task_recipe(world, tmp_path / "out", model=str(tmp_path / "base"), subdomains={"feature": kind})
    with pytest.raises(NumericError, match="The features of prompts have NaN or infinity"):
        plan_build(recipe)
    assert not (tmp_path / "out").exists()


def lines_of(world, recipe):
    """What a build says, without running it to its end."""
    said = CollectingProgress()
    context, divided = prepare_context(recipe, said), {}
    for name, data in context.domains.items():
        prompts = [context.scorer.prompt_ids(d) for d in data.reference.documents]
        feature = prompt_features(context.model, prompts)
        divided[name] = divide_domain(name, data.reference, feature, recipe.subdomains, 0)
    check_division(context, divided)
    return said.lines


def test_a_plan_says_what_the_build_would_say(world, tmp_path):
    recipe = task_recipe(world, tmp_path / "out", **GUARDED, subdomains={"count": 3, "min_size": 4})
    warnings = plan_build(recipe)["warnings"]
    assert warnings == lines_of(world, recipe)
    # Fourteen of twenty documents are in the one subdomain whose size allows a proof; five tests in each of two domains become four.
    now, twice, whole = (100 * detectable_gain(n, 0.05 / tests / 4) for n, tests in ((14, 10), (28, 10), (20, 4)))
    (line,) = [line for line in warnings if line.startswith("power: sums, random")]
    assert f"a true gain of {now:.0f} points" in line
    assert line.endswith(f"with twice the documents {twice:.0f} points, with no subdomains {whole:.0f} points")
    assert any("no gain on so few can be proven at alpha 0.05" in line for line in warnings)
    assert plan_build(task_recipe(world, tmp_path / "out"))["warnings"] == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"subdomains": {"count": 40, "min_size": 4}}, "fewer than the 40 clusters asked for"),
        ({"data": {"limit": 2}, **UNDIVIDED}, "too few to give gradients, to stop and to guard"),
        ({"data": {"limit": 8}, **GUARDED, **UNDIVIDED}, "No subdomain has enough reference documents for the guard"),
    ],
)
def test_a_plan_refuses_what_the_build_refuses_and_nothing_lies_about(changes, said, world, tmp_path):
    recipe = task_recipe(world, tmp_path / "out", **changes)
    with pytest.raises(DataError, match=said) as planned:
        plan_build(recipe)
    with pytest.raises(DataError, match=said) as built:
        build(recipe)
    assert str(planned.value) == str(built.value)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_text_says_its_power_in_standard_deviations(world, tmp_path):
    recipe = text_recipe(world, tmp_path / "out", search={"metrics": ["magnitude"], "select": "guarded", "alpha": 0.5})
    (line,) = plan_build(recipe)["warnings"]
    now, twice = (f"{detectable_effect(n, 0.5):.2f} standard deviations between documents" for n in (6, 12))
    said = f"power: wiki, magnitude: a true gain of {now} is accepted with a chance of 80 % (6 documents"
    assert line.startswith(said)
    assert line.endswith(f"with twice the documents {twice}")


def test_a_plan_refuses_text_that_fills_no_block(world, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.\n\nBy far.\n\nIndeed.")
    recipe = text_recipe(world, tmp_path / "out", domains={"wiki": [f"text:{tmp_path / 'short.txt'}"]})
    for run in (plan_build, build):
        with pytest.raises(DataError, match="gives no block of 256 tokens"):
            run(recipe)
    assert [p.name for p in tmp_path.iterdir()] == ["short.txt"]


def test_a_base_that_guesses_is_said_everywhere(artefact, text_artefact):
    for folder in (artefact, text_artefact):
        result = result_of(folder, BuildResult)
        for domain in result.domains:
            base, found = domain.rows["base"].score, domain.guessing
            if domain.is_text:
                assert (found is not None) == (base >= 288)
            elif domain.name == "law":  # three choices, a base of random weights
                assert (found.score, found.guessing) == pytest.approx((base, 100 / 3))
            else:
                assert found is None  # one continuation is not guessed
            said = guessing_text(domain.name, found)
            assert said.startswith("base: ") or domain.name != "law"
            assert (said in headlines(result)) == bool(said)
            assert said in model_card(result)
            assert said[1:] in domain_sentence(result, domain)


def test_a_plan_of_text_and_of_halving(world, tmp_path):
    assert plan_build(text_recipe(world, tmp_path / "out"))["bands_per_subdomain"] == 1
    halving = task_recipe(world, tmp_path / "out", search={"metrics": ["magnitude"], "method": "halving"})
    assert plan_build(halving)["purifications"] == 0


def test_a_plan_counts_the_activations_of_a_training_pass(world, tmp_path):
    def plan(metric, tokens=4096):
        search = {"metrics": [metric]}
        return plan_build(task_recipe(world, tmp_path / "out", batch_tokens=tokens, search=search))

    training, search = (
        plan(metric, 8192)["memory_bytes"] - plan(metric, 512)["memory_bytes"] for metric in ("saliency", "magnitude")
    )
    # What is kept for a backward pass is what makes the difference; a search keeps nothing.
    assert training > max(10 * 2**20, 2 * search)
    found = plan("magnitude")
    assert "band_search" in found["above_the_base_bytes"]
    assert "greedy" not in found["above_the_base_bytes"]
    assert found["memory_bytes"] == found["base_bytes"] + max(found["above_the_base_bytes"].values())
    assert found["fits"] == "1 device of 8 GiB, or this machine"


def test_a_plan_knows_a_way_of_purification_from_elsewhere(world, tmp_path):
    METHODS.add("elsewhere", METHODS.get("greedy"), "another package's")
    try:
        found = plan_build(task_recipe(world, tmp_path / "out", saliency={"method": "elsewhere"}))
    finally:
        METHODS._entries.pop("elsewhere")
        PURIFICATIONS.remove("elsewhere")
    # What it takes is not known: both that are known are counted.
    assert {"greedy", "learned"} <= set(found["above_the_base_bytes"])


def test_inspecting_an_artefact(world, artefact, moe):
    found = inspect_artefact(artefact)
    assert found["fits_base"] is None
    assert [e["name"] for e in found["experts"]] == ["law/0", "law/1", "sums/all"]
    assert found["base_fingerprint"] == fingerprint_model(world.model)
    assert found["router_domains"] == ["law", "sums"]
    checked = inspect_artefact(artefact, str(world.base))
    assert checked["fits_base"] is True
    for row in checked["experts"]:
        assert 0 < row["off_share"] < 1
        assert row["off"] == moe.expert_mask(row["name"]).count
        assert row["bytes"] > 0
    with pytest.raises(ArtifactError, match="not an artefact"):
        inspect_artefact(world.base)


def test_inspecting_a_base(world):
    found = inspect_model(str(world.base))
    assert found["dtype"] == "float32"
    assert (found["kind"], found["family"], found["vocabulary_tokens"]) == ("model", "llama", 259)


def test_the_card_shows_the_numbers_of_the_result(artefact, text_artefact):
    for folder in (artefact, text_artefact):
        result = result_of(folder, BuildResult)
        card = (folder / "README.md").read_text()
        assert card == model_card(result)
        assert card.startswith("---\nlibrary_name: freemoe\n")
        for domain in result.domains:
            (line,) = [x for x in card.splitlines() if x.startswith(f"| {domain.name} |")]
            for name, row in domain.rows.items():
                assert f"{row.score:.2f}" in line
                assert name == "base" or gain_text(row, domain.unit) in line
            for sub in domain.subdomains:
                assert f"- {sub.name}: {sub.verdict}" in card
            assert {f"  {sub.name}: {sub.verdict}" for sub in domain.subdomains} <= {*headlines(result)}
        if folder == artefact:
            gain = sum(d.rows["expert"].gain.mean for d in result.domains) / 2
            assert f"over 2 domains (0 where the base stayed; text left out): {gain:+.2f} [" in headlines(result)[-1]


def test_gain_text():
    assert gain_text(typed_row(gain=(3.14, -1.0, 7.26)), "points") == "+3.1 [-1.0, +7.3]"
    assert gain_text(typed_row(ratio=(0.5, 0.4, 0.66666)), "perplexity") == "x 0.500 [0.400, 0.667]"
    # Below a thousandth a ratio keeps its digits.
    row = typed_row(ratio=(0.00042, 0.0004, 0.00045))
    assert gain_text(row, "perplexity") == "x 0.00042 [0.0004, 0.00045]"
    assert gain_words(row, True) == "× 0.00042 [0.0004, 0.00045]"
