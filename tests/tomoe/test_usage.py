"""What the figures are made of: against counts by hand, and routers against the masks on the dense model."""

import json

import pytest
import torch

from freemoe.core.errors import ArtifactError, DataError
from freemoe.kernels.gates import route_tokens
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.sublayers import find_sublayers
from freemoe.text.blocks import pack_blocks
from freemoe.tomoe.material import read_text
from freemoe.tomoe.measure.usage import (
    expert_similarity,
    expert_usage,
    expert_widths,
    experts_of_tokens,
    layer_widths,
    shared_tokens,
    token_experts,
    training_dynamics,
)
from freemoe.tomoe.structures.masked import apply_structure
from freemoe.tomoe.structures.structure import read_structure
from tests.tiny import tiny_model
from tests.tomoe.conftest import recipe


@pytest.fixture(scope="module")
def made(base, done):
    """A conversion: its folder, result, model, tokenizer and held-out text."""
    model, tokenizer = load_base(done)
    held_out = pack_blocks(tokenizer, read_text(recipe(base, done), tokenizer).held_out, 32)
    return done, json.loads((done / "result.json").read_text()), model, tokenizer, held_out


def test_tokens_go_where_the_masks_on_the_dense_model_send_them(made):
    out, result, model, _, held_out = made
    structure, dense = read_structure(out), tiny_model("llama")
    sublayers = find_sublayers(dense)
    seen = []
    hooks = [
        layer.up[0].register_forward_pre_hook(
            lambda module, args, own=own: seen.append(route_tokens(args[0], own.router_weight, own.router_bias))
        )
        for layer, own in zip(sublayers, structure, strict=True)
    ]
    with apply_structure(dense, structure, sublayers), torch.no_grad():
        dense(held_out.ids, position_ids=held_out.positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    found = experts_of_tokens(model, held_out.ids, held_out.positions)
    assert found.shape == (2, len(held_out), 32)
    assert (found != torch.stack(seen).view(found.shape)).float().mean() < 0.01  # near-ties
    usage = expert_usage(model, held_out)
    for layer, shares in zip(found, usage, strict=True):
        assert shares == pytest.approx([float((layer == n).float().mean()) for n in range(3)], abs=1e-6)
    # What the result says is of the same text's first rows.
    few = expert_usage(model, held_out.select_rows(range(min(8, len(held_out)))))
    assert torch.tensor(few).flatten().tolist() == pytest.approx(
        torch.tensor(result["usage"]).flatten().tolist(), abs=0.02
    )


def test_experts_of_a_layer_share_no_token_and_each_all_with_itself(made):
    _, _, model, _, held_out = made
    found = shared_tokens(model, held_out)
    assert torch.equal(found, found.T)
    for layer in range(2):
        own = found[3 * layer : 3 * layer + 3, 3 * layer : 3 * layer + 3]
        used = own.diagonal() > 0
        assert torch.equal(own, torch.diag(used.double()))
    one, other = experts_of_tokens(model, held_out.ids, held_out.positions).flatten(1)
    both, any_ = ((one == 1) & (other == 2)).sum(), ((one == 1) | (other == 2)).sum()
    assert float(found[1, 5]) == pytest.approx(float(both / any_.clamp(min=1)))


def test_a_text_is_its_tokens_with_their_experts(made):
    _, _, model, tokenizer, _ = made
    text = "oak elm ash oak"
    found = token_experts(model, tokenizer, text, layers=(0, -1))
    ids = tokenizer(text)["input_ids"]
    assert [one["token"] for one in found] == [tokenizer.decode(i) for i in ids]
    experts = experts_of_tokens(model, torch.tensor([ids]))
    assert [one["experts"] for one in found] == experts[:, 0].T.tolist()


def test_similarity_by_hand(made):
    structure = read_structure(made[0])
    for layer, found in zip(structure, expert_similarity(structure), strict=True):
        a, b = layer.experts[0], layer.experts[2]
        assert found[0][2] == found[2][0] == pytest.approx(float((a & b).sum() / (a | b).sum()))
        assert found[1][1] == 1.0


def test_widths_and_boxes_are_the_results(made):
    structure, result = read_structure(made[0]), made[1]
    for own, share, box in zip(structure, layer_widths(result), expert_widths(result), strict=True):
        assert share["query_key"] == pytest.approx(2 * int(own.qk.sum()) / 8)
        assert share["value_output"] == pytest.approx(own.value_width / 8)
        assert share["union"] == pytest.approx(own.union_width / own.experts.shape[1])
        assert share["mlp"] == pytest.approx(max(own.neuron_counts) / own.experts.shape[1])
        assert box["most"] == max(own.neuron_counts)
    box = expert_widths({"layers": [{"widths": [10, 20, 40, 30, 50]}]})[0]
    assert box == {"layer": 0, "least": 10, "lower": 20, "median": 30, "upper": 40, "most": 50}


def test_dynamics_are_the_history_and_the_curve(made):
    result = made[1]
    found = training_dynamics(result)
    assert found["step"] == [1, 2, 3, 4]
    assert found["distillation"] == [
        row[result["history"]["columns"].index("distillation")] for row in made[1]["history"]["rows"]
    ]
    assert found["held_out_step"] == [0, 2, 4]
    assert found["held_out_mean_perplexity"][0] == found["held_out_perplexity"][0]
    assert len(found["held_out_mean_perplexity"]) == 3
    untrained = training_dynamics({"history": {"columns": ["loss"], "rows": []}, "held_out_curve": []})
    assert untrained["loss"] == untrained["held_out_step"] == []


def test_what_has_no_experts_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"LlamaForCausalLM has no routers"):
        experts_of_tokens(tiny_model("llama"), torch.arange(3, 9)[None])
    with pytest.raises(
        ArtifactError, match=r"is not an artefact: it has no freemoe_config|is not an artefact: the folder is empty"
    ):
        read_structure(tmp_path)
