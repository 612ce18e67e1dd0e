"""Structured purification through a build: what is written, what is loaded again, what is reported."""

import json

import pytest
import torch

from freemoe.artefacts import evaluate
from freemoe.core.errors import ArtifactError, RecipeError
from freemoe.domain_experts.expert import DomainExpert, unit_expert
from freemoe.domain_experts.hosting.merging import merge
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.pipeline import build
from freemoe.domain_experts.structured.units import find_units
from freemoe.models.weights import find_weights
from freemoe.recipes import EvalRecipe
from tests.domain_experts.conftest import read_result, text_recipe
from tests.masks import indices_of, mask_of
from tests.tiny import tiny_model


def unit_recipe(world, output, **units):
    return text_recipe(
        world,
        output,
        units={"unit": "neuron", "off": [0.16, 0.3], "steps": 4, "every": 2, "step_tokens": 512, **units},
        saliency={"method": "greedy", "text_step": 0.001, "budget": 0.004},
        search={"metrics": ["saliency"], "select": "argmax"},
    )


@pytest.fixture(scope="module")
def small_artefact(world, tmp_path_factory):
    return build(unit_recipe(world, tmp_path_factory.mktemp("units") / "out"))


def test_the_expert_has_exactly_the_neurons_that_were_asked_for(small_artefact):
    result = read_result(small_artefact)
    units = result["domains"][0]["subdomains"][0]["units"]
    assert [p["share"] for p in units["points"]] == [16 / 96, 32 / 96]
    assert all(list(p["per_layer"].values()) == [p["units"] // 2] * 2 for p in units["points"])
    chosen = next(p for p in units["points"] if p["candidate"])
    moe = FreeMoE.from_pretrained(None, small_artefact)
    (name,) = moe.experts
    found = find_units(moe.model, "neuron")
    expert = moe._experts[name]
    assert expert.kind == "unit"
    assert found.number_off(found.of_lines(expert.lines)) == chosen["units"]
    positions = indices_of(moe.expert_mask(name))
    units_alone = indices_of(found.mask(found.of_lines(expert.lines)))
    assert units["singles"] == sum(map(len, positions.values())) - sum(map(len, units_alone.values())) > 0


def test_the_report_has_the_curve_the_rivals_and_the_size(small_artefact):
    result = read_result(small_artefact)
    (domain,) = result["domains"]
    units = domain["subdomains"][0]["units"]
    assert {"base", "expert", "control"} <= set(domain["rows"])
    for point in units["points"]:
        assert set(point["rivals"]) == {"wanda", "taylor", "activation", "random"}
    parameters, operations = units["cut"]["parameters"], units["cut"]["operations"]
    gone = next(p for p in units["points"] if p["candidate"])["units"] * 3 * 32
    assert parameters[0] - parameters[1] == gone
    assert operations[0] - operations[1] == 2 * gone
    card = (small_artefact / "README.md").read_text()
    assert "neurons off" in card
    assert json.dumps(result)


@pytest.mark.parametrize("kind", ["kv_group", "layer"])
def test_other_units_build_too(world, kind, tmp_path):
    recipe = text_recipe(
        world,
        tmp_path / "out",
        units={"unit": kind, "off": [0.5], "steps": 2, "every": 1, "step_tokens": 512},
        search={"metrics": [], "select": "argmax"},
    )
    result = read_result(build(recipe))
    (point,) = result["domains"][0]["subdomains"][0]["units"]["points"]
    assert point["share"] == 0.5


def test_experts_of_a_mixture_are_reported_as_the_cut_model_computes(world, tmp_path):
    base = tmp_path / "mixture"
    tiny_model("mixtral").save_pretrained(base)
    world.tokenizer.save_pretrained(base)
    recipe = text_recipe(
        world,
        tmp_path / "out",
        model=str(base),
        units={"unit": "expert", "off": [0.25], "steps": 2, "every": 1, "step_tokens": 512},
        search={"metrics": [], "select": "argmax"},
    )
    out = build(recipe)
    (domain,) = read_result(out)["domains"]
    (point,) = domain["subdomains"][0]["units"]["points"]
    assert point["share"] == 0.25
    assert set(point["rivals"]) == {"taylor", "random"}
    small = merge(out, "wiki/all", tmp_path / "small", shrink=True)["folder"]
    seen = evaluate(
        EvalRecipe(artefact=small, domains=recipe.domains, data=recipe.data, device="cpu", seed=recipe.seed)
    )
    cut = seen["domains"][0]["rows"]["base"]
    assert cut["score"] == pytest.approx(domain["rows"]["expert"]["score"], rel=1e-4)
    assert cut["score"] != pytest.approx(domain["rows"]["base"]["score"], rel=1e-4)


def test_shares_that_leave_nothing_are_refused_before_the_work(world, tmp_path):
    with pytest.raises(RecipeError, match="leaves no multiple of 8"):
        build(unit_recipe(world, tmp_path / "out", off=[0.9]))


def test_an_expert_of_units_is_written_as_rows_and_columns():
    model = tiny_model("llama")
    units, weights = find_units(model, "neuron"), find_weights(model)
    off = {0: torch.tensor([1, 5, 47]), 1: torch.tensor([0])}
    single = {weights[0].name: torch.tensor([3, 900]), weights[-1].name: torch.tensor([0, 2, 48])}
    expert = unit_expert("law/0", "neuron", units.line_indices(off), mask_of(single, weights))
    again = DomainExpert.from_parts(expert.manifest_entry(), expert.to_tensors())
    wanted = {k: set(v.tolist()) for k, v in indices_of(units.mask(off)).items()}
    for name, where in single.items():
        wanted.setdefault(name, set()).update(where.tolist())
    assert {k: set(v.tolist()) for k, v in indices_of(again.mask(weights)).items()} == wanted
    assert {k: v.tolist() for k, v in units.of_lines(again.lines).items()} == {0: [1, 5, 47], 1: [0]}
    assert sum(t.numel() * t.element_size() for t in expert.to_tensors().values()) < 200
    other = find_weights(tiny_model("llama", intermediate_size=40))
    with pytest.raises(ArtifactError, match="another base"):
        again.mask(other)
