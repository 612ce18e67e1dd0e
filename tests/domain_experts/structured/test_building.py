"""Structured purification through a build: what is written, what is loaded again, what is reported."""

import pytest
import torch

from freemoe.artefacts import evaluate
from freemoe.core.errors import ArtifactError, RecipeError
from freemoe.domain_experts.expert import DomainExpert, unit_expert
from freemoe.domain_experts.hosting.merging import merge
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.pipeline import build
from freemoe.domain_experts.structured.units import find_units
from freemoe.recipes import EvalRecipe
from tests.domain_experts.conftest import read_result, text_recipe
from tests.masks import mask_of
from tests.tiny import model_and_weights, tiny_model


def unit_recipe(world, output, unit, off, **changes):
    units = {"unit": unit, "off": off, "steps": 2, "every": 1, "step_tokens": 512}
    return text_recipe(world, output, **{"units": units, "search": {"metrics": [], "select": "argmax"}, **changes})


@pytest.fixture(scope="module")
def small_artefact(world, tmp_path_factory):
    single = {"method": "greedy", "text_step": 0.001, "budget": 0.004}
    search = {"metrics": ["saliency"], "select": "argmax"}
    out = tmp_path_factory.mktemp("units") / "out"
    return build(unit_recipe(world, out, "neuron", [0.16, 0.3], saliency=single, search=search))


def test_the_expert_has_exactly_the_neurons_that_were_asked_for(small_artefact):
    units = read_result(small_artefact)["domains"][0]["subdomains"][0]["units"]
    assert [p["share"] for p in units["points"]] == [16 / 96, 32 / 96]
    assert all(list(p["per_layer"].values()) == [p["units"] // 2] * 2 for p in units["points"])
    chosen = next(p for p in units["points"] if p["candidate"])
    moe = FreeMoE.from_pretrained(None, small_artefact)
    (name,) = moe.experts
    found = find_units(moe.model, "neuron")
    expert = moe._experts[name]
    assert expert.kind == "unit"
    off = found.of_lines(expert.lines)
    assert found.number_off(off) == chosen["units"]
    assert units["singles"] == moe.expert_mask(name).count - found.mask(off).count > 0


def test_the_report_has_the_curve_the_rivals_and_the_size(small_artefact):
    (domain,) = read_result(small_artefact)["domains"]
    units = domain["subdomains"][0]["units"]
    assert {"base", "expert", "control"} <= set(domain["rows"])
    assert all(set(p["rivals"]) == {"wanda", "taylor", "activation", "random"} for p in units["points"])
    parameters, operations = units["cut"]["parameters"], units["cut"]["operations"]
    gone = next(p for p in units["points"] if p["candidate"])["units"] * 3 * 32
    assert parameters[0] - parameters[1] == gone
    assert operations[0] - operations[1] == 2 * gone
    assert "neurons off" in (small_artefact / "README.md").read_text()


@pytest.mark.parametrize("kind", ["kv_group", "layer"])
def test_other_units_build_too(world, kind, tmp_path):
    result = read_result(build(unit_recipe(world, tmp_path / "out", kind, [0.5])))
    (point,) = result["domains"][0]["subdomains"][0]["units"]["points"]
    assert point["share"] == 0.5


def test_experts_of_a_mixture_are_reported_as_the_cut_model_computes(world, tmp_path):
    base = tmp_path / "mixture"
    tiny_model("mixtral").save_pretrained(base)
    world.tokenizer.save_pretrained(base)
    recipe = unit_recipe(world, tmp_path / "out", "expert", [0.25], model=str(base))
    out = build(recipe)
    (domain,) = read_result(out)["domains"]
    (point,) = domain["subdomains"][0]["units"]["points"]
    assert point["share"] == 0.25
    assert set(point["rivals"]) == {"taylor", "random"}
    small = merge(out, "wiki/all", tmp_path / "small", shrink=True)["folder"]
    same = {name: getattr(recipe, name) for name in ("domains", "data", "device", "seed")}
    cut = evaluate(EvalRecipe(artefact=small, **same))["domains"][0]["rows"]["base"]["score"]
    assert cut == pytest.approx(domain["rows"]["expert"]["score"], rel=1e-4)
    assert cut != pytest.approx(domain["rows"]["base"]["score"], rel=1e-4)


def test_shares_that_leave_nothing_are_refused_before_the_work(world, tmp_path):
    with pytest.raises(RecipeError, match="leaves no multiple of 8"):
        build(unit_recipe(world, tmp_path / "out", "neuron", [0.9]))


def test_an_expert_of_units_is_written_as_rows_and_columns():
    model, weights = model_and_weights("llama")
    units = find_units(model, "neuron")
    off = {0: torch.tensor([1, 5, 47]), 1: torch.tensor([0])}
    single = {weights[0].name: torch.tensor([3, 900]), weights[-1].name: torch.tensor([0, 2, 48])}
    expert = unit_expert("law/0", "neuron", units.line_indices(off), mask_of(single, weights))
    again = DomainExpert.from_parts(expert.manifest_entry(), expert.to_tensors())
    assert again.mask(weights).is_equal(units.mask(off).union(mask_of(single, weights)))
    assert {k: v.tolist() for k, v in units.of_lines(again.lines).items()} == {0: [1, 5, 47], 1: [0]}
    assert sum(t.numel() * t.element_size() for t in expert.to_tensors().values()) < 200
    _, other = model_and_weights("llama", intermediate_size=40)
    with pytest.raises(ArtifactError, match="another base"):
        again.mask(other)
