"""NAEE and REAP against sums written out, expert by expert and token by token."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from benchmarks.rivals.fits import expert_drop
from benchmarks.rivals.fits.expert_drop import fewest_changes, naee_scores, reap_scores
from freemoe.domain_experts.structured.units import find_units
from freemoe.hookmoe.plans.layers import moe_layers
from freemoe.models.hooks import forward_pre_hook
from tests.benchmarks.rivals.tiny_terms import given


def inputs_of(model, layer, batches):
    seen = []
    with forward_pre_hook(layer.block, lambda module, args: seen.append(args[0].reshape(-1, layer.hidden))):
        for batch in batches:
            model.base_model(input_ids=batch.ids, use_cache=False)
    return torch.cat(seen)


def expert(layer, number, x):
    gate, up = F.linear(x, layer.experts.gate_up_proj[number]).chunk(2, -1)
    return F.linear(F.silu(gate) * up, layer.experts.down_proj[number])


def block(layer, x, kept):
    """Mixtral's block with some of its experts, a token at a time."""
    outputs = []
    for row in x:
        logits = F.linear(row, layer.gate.weight)[kept]
        best = logits.softmax(-1).topk(2)
        shares = best.values / best.values.sum()
        outputs.append(sum(s * expert(layer, kept[int(i)], row) for s, i in zip(shares, best.indices, strict=True)))
    return torch.stack(outputs)


@torch.no_grad()
def test_naee_takes_the_set_whose_absence_changes_the_output_least():
    model, materials = given("mixtral")
    batches = materials.batches(materials.gradient)
    units = find_units(model, "expert")
    found = naee_scores(model, units, batches, [1, 2])
    for layer, scores, count in zip(moe_layers(model), found, (1, 2), strict=True):
        x = inputs_of(model, layer, batches)
        everyone = list(range(layer.count))
        whole = block(layer, x, everyone)
        torch.testing.assert_close(whole, layer.block(x[None])[0], atol=1e-5, rtol=1e-4)
        changes = {
            gone: float((block(layer, x, [e for e in everyone if e not in gone]) - whole).square().sum())
            for gone in itertools.combinations(everyone, count)
        }
        best = min(changes, key=lambda gone: changes[gone])
        assert (scores == 0).nonzero().flatten().tolist() == list(best)


@torch.no_grad()
def test_where_sets_are_too_many_experts_go_one_by_one(monkeypatch):
    model, materials = given("mixtral")
    layer = moe_layers(model)[0]
    x = inputs_of(model, layer, materials.batches(materials.gradient))
    (first,) = fewest_changes(layer, x, 1)
    monkeypatch.setattr(expert_drop, "MOST_SUBSETS", 1)
    both = fewest_changes(layer, x, 2)
    assert first in both
    assert len(set(both)) == 2
    assert fewest_changes(layer, x, 0) == ()


@torch.no_grad()
def test_reap_is_the_mean_of_gate_times_norm_over_an_experts_tokens():
    model, materials = given("mixtral")
    batches = materials.batches(materials.gradient)
    found = reap_scores(model, materials.weights, find_units(model, "expert"), batches)
    for layer, scores in zip(moe_layers(model), found, strict=True):
        x = inputs_of(model, layer, batches)
        sums, counts = [0.0] * layer.count, [0] * layer.count
        for row in x:
            best = F.linear(row, layer.gate.weight).softmax(-1).topk(2)
            for share, number in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
                sums[number] += float(share * expert(layer, number, row).norm())
                counts[number] += 1
        expected = [s / c if c else 0.0 for s, c in zip(sums, counts, strict=True)]
        assert scores.tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["qwen2_moe", "olmoe", "deepseek_v2", "gpt_oss"])
def test_other_families_are_ranked_too(family):
    model, materials = given(family)
    units, batches = find_units(model, "expert"), materials.batches(materials.gradient)
    for scores in (
        reap_scores(model, materials.weights, units, batches),
        naee_scores(model, units, batches, [1] * len(units.layers)),
    ):
        assert len(scores) == len(units.layers)
        assert all(torch.isfinite(s).all() and len(s.unique()) > 1 for s in scores)
