"""Ranking, training and rivals of units."""

import gc
import weakref

import pytest
import torch

from freemoe.core.errors import DataError
from freemoe.domain_experts.purify import activations
from freemoe.domain_experts.purify.batches import AnswerBatch, mean_loss
from freemoe.domain_experts.purify.greedy import PurifyTask
from freemoe.domain_experts.recipe import SaliencySection, UnitSection
from freemoe.domain_experts.structured.fitting import fit_units
from freemoe.domain_experts.structured.masks import all_on_masks, apply_masks, units_off
from freemoe.domain_experts.structured.ranking import UnitImportance, measure_importance, unit_orders
from freemoe.domain_experts.structured.rivals import random_scores, rival_scores, taylor_scores, wanda_scores
from freemoe.domain_experts.structured.training import UnitScores, train_units
from freemoe.domain_experts.structured.units import lowest_units
from tests.domain_experts.purify.test_greedy import bits, unchanged
from tests.domain_experts.structured.test_units import model_and_units


def batches(seed, rows=8):
    """Rows that count upwards from anywhere."""
    starts = torch.randint(3, 200, (rows, 1), generator=torch.Generator().manual_seed(seed))
    ids = starts + torch.arange(17)
    ones = torch.ones(rows, 16, dtype=torch.long)
    return [AnswerBatch(ids[:, :-1], ones, ids[:, 1:], torch.zeros(rows, dtype=torch.long))]


KINDS = [("llama", kind) for kind in ("neuron", "kv_group", "layer")]


@pytest.mark.parametrize(("case", "kind"), [*KINDS, ("phi3", "neuron"), ("gpt2", "neuron"), ("mixtral", "expert")])
def test_gain_is_the_slope_and_energy_the_mean_square(case, kind):
    model, units = model_and_units(case, kind)
    text = batches(0)
    found = measure_importance(model, units, text)
    unit = int(found[1].gain.abs().argmax())
    masks = all_on_masks(units, "cpu")

    def loss(value):
        masks[1][unit] = value
        with apply_masks(units, masks):
            return mean_loss(model, text)

    slope = (loss(1.05) - loss(0.95)) / 0.1
    assert float(found[1].gain[unit]) == pytest.approx(slope, rel=0.05)
    if case == "llama" and kind != "layer":
        seen = []
        handle = units.layers[1].module.register_forward_pre_hook(lambda m, x: seen.append(x[0]))
        loss(1.0)
        handle.remove()
        torch.testing.assert_close(found[1].energy.flatten(), seen[0].square().flatten(0, 1).mean(0))


def runs_of_a_layer(model):
    """A list that grows with every run of a layer."""
    runs = []
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.parametrize(("case", "kind"), KINDS)
def test_worth_is_the_same_to_the_bit_where_layers_forget_their_activations(case, kind):
    model, units = model_and_units(case, kind)
    text, runs = [*batches(0), *batches(1)], runs_of_a_layer(model)
    plain, again = (measure_importance(model, units, text, checkpointing=asked) for asked in (False, True))
    assert len(runs) == 3 * len(text)
    for one, other in zip(plain, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


def test_measuring_worth_lets_go_of_every_pass_at_once():
    model, units = model_and_units("llama", "neuron")
    seen = []
    units.layers[1].module.register_forward_hook(lambda m, x, out: seen.append(weakref.ref(x[0])))
    # A cycle would keep all activations of all passes until the collector comes by, which may be never.
    gc.disable()
    try:
        measure_importance(model, units, [*batches(0), *batches(1)])
        assert seen
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()


def test_a_unit_that_disturbs_much_goes_last_in_every_order_but_that_of_gain_alone():
    gain, rise = torch.tensor([0.3, 0.01, -0.02, 0.02]), torch.tensor([90.0, 0.01, 0.01, 0.01])
    orders = {name: order[0] for name, order in unit_orders([UnitImportance(gain, rise, torch.ones(4, 1))]).items()}
    assert int(orders["change"].argmin()) == int(orders["ratio"].argmin()) == 3
    assert int(orders["zone"].argmin()) in (1, 3)
    assert int(orders["change"].argmax()) == int(orders["quiet"].argmax()) == 0
    disturbing = UnitImportance(torch.zeros(200), torch.arange(200.0).flip(0), torch.ones(200, 1))
    scores = UnitScores.from_order([torch.arange(200.0)], [disturbing])
    assert scores.values[0].argmax() == 1
    assert (scores.values[0] > 100).sum() == 2


@pytest.mark.parametrize("layout", ["even", "free"])
def test_training_keeps_every_budget_and_gives_the_model_back(layout):
    model, units = model_and_units("llama", "neuron")
    before, seen = bits(model), []
    task = PurifyTask(model, [], batches(1, 16), batches(2), on_round=lambda *a: seen.append(a))
    curve = train_units(task, units, UnitSection(off=(0.16, 0.5), layout=layout, steps=12, step_tokens=64, every=3))
    assert unchanged(model, before)
    assert all(p.grad is None for p in model.parameters())
    wanted = [16, 48] if layout == "even" else [15, 48]
    assert [units.number_off(p.off) for p in curve.points] == wanted
    if layout == "even":
        assert all(len(v) == w // 2 for p, w in zip(curve.points, wanted, strict=True) for v in p.off.values())

    def loss_without(off):
        with units_off(units, off):
            return mean_loss(model, batches(2))

    assert [(step, loss, share) for step, share, loss in curve.looks] == seen
    for point, number in zip(curve.points, wanted, strict=True):
        assert loss_without(point.off) == pytest.approx(point.loss, abs=1e-6)
        # Never worse than the order that it began with, and here better than random units.
        others = [lowest_units(units, random_scores(units, seed), [number]) for seed in range(3)]
        assert point.loss < sum(map(loss_without, others)) / 3


def test_memory_is_measured_before_it_is_asked_for_inside_a_pass(monkeypatch):
    # As on a model that is worth measuring; with masks alone nothing would be known, and every layer would ask again.
    monkeypatch.setattr(activations, "_SMALL", 0)
    model, units = model_and_units("llama", "neuron")
    train_units(PurifyTask(model, [], batches(1), batches(2)), units, UnitSection(off=(0.16,), steps=1, step_tokens=64))
    assert model in activations._KNOWN


def test_every_pass_of_a_fit_forgets_its_activations_where_that_is_asked_for():
    def runs_of_a_fit(checkpointing):
        model, units = model_and_units("llama", "neuron")
        task, runs = PurifyTask(model, [], batches(1), batches(2)), runs_of_a_layer(model)
        section = UnitSection(unit="neuron", off=(0.16,), steps=1, step_tokens=64)
        fit_units(task, units, section, SaliencySection(checkpointing=checkpointing), singles=False)
        return len(runs)

    # One batch each for the start, the step and the rivals, whose layers are run a second time.
    assert runs_of_a_fit(True) - runs_of_a_fit(False) == 3


def test_rivals_by_hand():
    columns = torch.tensor([[1.0, -2.0, 0.0, 3.0], [1.0, 0.0, 4.0, -3.0]]).unflatten(1, (2, 2))
    energy = torch.tensor([[4.0, 1.0], [0.0, 9.0]])
    assert wanda_scores(columns, energy).tolist() == [2 * 2 + 2 * 1, 0 + 6 * 3]
    assert taylor_scores(torch.tensor([-2.0, 1.0])).tolist() == [2.0, 1.0]
    for kind, rivals in (("neuron", {"wanda", "taylor", "activation"}), ("layer", {"taylor"})):
        model, units = model_and_units("llama", kind)
        assert set(rival_scores(units, measure_importance(model, units, batches(0)))) == rivals


def test_experts_are_trained_too():
    model, units = model_and_units("qwen3_moe", "expert")
    section = UnitSection(off=(0.25,), steps=4, step_tokens=64, every=2)
    curve = train_units(PurifyTask(model, [], batches(1), batches(2)), units, section, multiple=1)
    assert [len(v) for v in curve.points[0].off.values()] == [1] * len(units.layers)


def test_bad_input():
    with pytest.raises(ValueError, match="ascend"):
        UnitSection(off=(0.3, 0.2))
    model, units = model_and_units("llama", "neuron")
    with pytest.raises(DataError, match="gradients"):
        train_units(PurifyTask(model, [], [], batches(1)), units, UnitSection())
