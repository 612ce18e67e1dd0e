"""A base whose layers stay on disk gives the same build as one in memory, and its experts can be used and merged there."""

import pytest
import torch
from safetensors.torch import load_file

from freemoe.core.errors import FamilyError, RecipeError
from freemoe.domain_experts.cost.dry_run import plan_build
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.pipeline import build
from freemoe.recipes import recipe_from
from tests.domain_experts.conftest import read_result, task_recipe

BANDS = {"metrics": ["wanda", "random"], "method": "exhaustive", "select": "argmax"}


@pytest.fixture(scope="module")
def built(world, tmp_path_factory):
    root = tmp_path_factory.mktemp("builds")
    for device in ("cpu", "disk"):
        build(task_recipe(world, root / device, device=device, search=BANDS))
    return root


def test_a_build_on_disk_is_the_one_in_memory(built):
    for name in ("experts.safetensors", "router.safetensors", "seen.safetensors"):
        assert (built / "disk" / name).read_bytes() == (built / "cpu" / name).read_bytes()
    near, far = (read_result(built / name) for name in ("cpu", "disk"))
    assert far["domains"] == near["domains"]
    moe = FreeMoE.from_pretrained(None, built / "disk", device="cpu")
    assert any(moe.expert_mask(name).count for name in moe.experts)


def test_experts_are_used_and_merged_on_disk(world, built, tmp_path):
    near = FreeMoE.from_pretrained(None, built / "cpu", device="cpu")
    far = FreeMoE.from_pretrained(None, built / "cpu", device="disk")
    ids = torch.tensor([world.tokenizer.encode("a law says", add_special_tokens=False)])
    for name in ("base", *near.experts, "base"):
        with near.expert(name), far.expert(name), torch.no_grad():
            assert torch.equal(far(ids).logits, near(ids).logits)
    chosen = next(name for name in near.experts if near.expert_mask(name).count)
    near.merge_and_save(chosen, tmp_path / "near")
    far.merge_and_save(chosen, tmp_path / "far")
    expected, seen = (load_file(tmp_path / n / "model.safetensors") for n in ("near", "far"))
    assert expected.keys() == seen.keys()
    assert all(torch.equal(seen[name], expected[name]) for name in expected)


def test_what_needs_gradients_is_refused_before_the_search(world, tmp_path):
    with pytest.raises(FamilyError, match="--metric saliency needs all weights in memory"):
        plan_build(task_recipe(world, tmp_path / "out", device="disk"))
    with pytest.raises(FamilyError, match="--unit neuron needs all weights in memory"):
        plan_build(
            task_recipe(world, tmp_path / "out", device="disk", search=BANDS, units={"unit": "neuron", "off": 0.2})
        )
    with pytest.raises(RecipeError, match="needs all of it on one device"):
        recipe_from({"command": "convert", "model": str(world.base), "text": "t", "output": "o", "device": "disk"})


def test_the_dry_run_counts_what_is_in_memory(world, tmp_path):
    found, whole = (plan_build(task_recipe(world, tmp_path / "out", device=d, search=BANDS)) for d in ("disk", "cpu"))
    assert found["document_scores_to_search"] == whole["document_scores_to_search"]
