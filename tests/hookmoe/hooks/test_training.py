"""Training: what is cached changes nothing, frozen is frozen, a killed run goes on, and losses fall."""

from dataclasses import replace

import pytest
import torch

from freemoe.core.errors import NumericError
from freemoe.core.run.folder import RunFolder
from freemoe.evals.engine.output_head import forward_blocks
from freemoe.hookmoe.hooks.closed_form import fit_scale_bias
from freemoe.hookmoe.hooks.hook import HookSet, new_hooks
from freemoe.hookmoe.hooks.teacher import compute_teacher_logits, kl_from_teacher, top_of
from freemoe.hookmoe.hooks.training import LOSSES, TrainingData, TrainingSchedule, train_compensation
from freemoe.hookmoe.hooks.upper_half import inputs_of, start_at_layer
from freemoe.hookmoe.measure import measure_quality, record_routes, recovered_share
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.dynamic import router_weights
from freemoe.hookmoe.plans.layers import decoder_layers, moe_layers, plan_of
from freemoe.hookmoe.plans.plan import LayerPlan, uniform_plan
from freemoe.models.hooks import forward_hook, forward_pre_hook
from tests.hookmoe.conftest import blocks_of, logits

QUICK = TrainingSchedule(steps=6, rows=2, rate=1e-2, every=2)


def material(model, top=400):
    train_blocks, held_out = blocks_of(6), blocks_of(4, seed=9)
    return TrainingData(
        train_blocks,
        compute_teacher_logits(model, train_blocks, top),
        held_out,
        compute_teacher_logits(model, held_out, top),
    )


def test_the_upper_half_is_the_model(mixture):
    blocks = blocks_of(3)
    with torch.no_grad():
        whole = forward_blocks(mixture, blocks)
        for layer in range(1, len(decoder_layers(mixture))):
            inputs = inputs_of(mixture, blocks, layer)
            with start_at_layer(mixture, layer):
                assert torch.equal(forward_blocks(mixture, blocks, inputs_embeds=inputs), whole)
        assert torch.equal(forward_blocks(mixture, blocks), whole)


def test_the_teachers_divergence_is_the_kl(mixtral):
    blocks = blocks_of(2)
    with torch.no_grad():
        full = mixtral(blocks.ids, position_ids=blocks.positions, use_cache=False).logits[:, :-1]
        other = full + torch.randn(full.shape, generator=torch.Generator().manual_seed(0))
    p, q = full.log_softmax(-1), other.log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(
        kl_from_teacher(compute_teacher_logits(mixtral, blocks, 400), other), exact, rtol=1e-4, atol=1e-6
    )
    cut = kl_from_teacher(compute_teacher_logits(mixtral, blocks, 8), other)
    assert bool((cut <= exact + 1e-6).all())
    assert float(cut.mean()) > 0
    assert float(kl_from_teacher(compute_teacher_logits(mixtral, blocks, 8), full).abs().max()) < 1e-6


def test_the_rest_of_the_distribution_is_what_is_left():
    _, kept, rest = top_of(torch.randn(3, 50, generator=torch.Generator().manual_seed(1)), 10)
    torch.testing.assert_close(kept.exp().sum(-1) + rest.exp(), torch.ones(3))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("position", ["pre", "parallel"])
def test_training_lowers_the_loss_and_touches_nothing_else(mixtral, loss, position):
    before, given = logits(mixtral), material(mixtral)
    asked = [p.requires_grad for p in mixtral.parameters()]
    hooks = new_hooks(mixtral, {0: 8, 1: 8, 2: 8}, "block", position)
    losses = train_compensation(mixtral, LayerPlan((1, 1, 1)), hooks, given, TrainingSchedule(loss, 30, 3, 1e-2, 10))
    assert len(losses) == 4
    assert min(losses[1:]) < losses[0]
    assert torch.equal(logits(mixtral), before)
    assert [p.requires_grad for p in mixtral.parameters()] == asked
    assert all(p.grad is None for p in mixtral.parameters())
    # What is kept is the best of the looks.
    with apply_plan(mixtral, LayerPlan((1, 1, 1))), hooks.attached(mixtral):
        found = measure_quality(mixtral, given.held_out, given.held_out_teacher)
    best = found.mean_ce if loss == "lm" else found.mean_kl
    assert best == pytest.approx(min(losses), rel=1e-5)


def test_cached_inputs_give_the_gradients_of_the_whole_model(mixtral):
    plan, given = LayerPlan((1, 1, 1)), material(mixtral)
    found = []
    for cached in (True, False):
        hooks = new_hooks(mixtral, {2: 8}, "block", "pre")
        if not cached:
            hooks = _Uncached({2: hooks.items()[0][1]}, "block", "pre")
        train_compensation(mixtral, plan, hooks, given, QUICK)
        found.append([p.detach().clone() for p in hooks.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class _Uncached(HookSet):
    lowest = 0  # type: ignore[assignment]


class _Killed(Exception):
    pass


@pytest.mark.parametrize("alive", [0, 3])
def test_a_killed_training_goes_on_to_the_same_hooks(mixtral, tmp_path, monkeypatch, alive):
    given = material(mixtral)

    def trained(run=None):
        hooks = new_hooks(mixtral, {1: 6}, "block", "pre")
        losses = train_compensation(mixtral, LayerPlan((1, 1, 1)), hooks, given, QUICK, run=run)
        return losses, list(hooks.parameters())

    run = RunFolder(tmp_path / "out", {})
    keep, left = run.run_tensor_unit, iter(range(alive))

    def dying(name, work):
        if next(left, None) is None:
            raise _Killed
        return keep(name, work)

    monkeypatch.setattr(run, "run_tensor_unit", dying)
    with pytest.raises(_Killed):
        trained(run)
    run._release_claim()
    (losses, whole), (again, resumed) = trained(), trained(RunFolder(tmp_path / "out", {}))
    assert again == losses
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_rate_that_breaks_the_loss_is_an_error(mixtral):
    hooks = new_hooks(mixtral, {1: 6}, "block", "pre")
    with torch.no_grad():
        hooks.items()[0][1].down.weight.fill_(float("inf"))
    with pytest.raises(NumericError):
        train_compensation(mixtral, LayerPlan((1, 1, 1)), hooks, material(mixtral), QUICK)


def test_every_row_is_seen_once_per_pass():
    order = TrainingSchedule(steps=5, rows=4).row_order(10)
    assert order.shape == (5, 4)
    assert sorted(order.flatten()[:10].tolist()) == list(range(10))
    assert torch.equal(order, TrainingSchedule(steps=5, rows=4).row_order(10))
    assert not torch.equal(order, TrainingSchedule(steps=5, rows=4, seed=1).row_order(10))


def test_shares_won_back():
    full, reduced = torch.zeros(50), torch.linspace(1, 2, 50)
    assert recovered_share(full, reduced, reduced).mean == 0.0
    assert recovered_share(full, reduced, full).mean == 1.0
    half = recovered_share(full, reduced, reduced / 2)
    assert (half.mean, half.low, half.high) == (pytest.approx(0.5),) * 3
    assert list(recovered_share(reduced, reduced, full).as_json().values()) == [None, None, None]  # nothing was lost
    # Where some draws lose nothing at all, the upper end has no bound; it is never NaN.
    rare = torch.tensor([1.0, -1.0, 0.5])
    found = recovered_share(torch.zeros(3), rare, torch.zeros(3))
    assert found.low == 1.0
    assert found.high == float("inf")
    assert list(found.as_json().values()) == [1.0, 1.0, None]


def seen_sizes(model, work):
    """The most tokens of a forward pass, and the most places of which logits are made at once, while something runs."""
    tokens, places = [0], [0]

    def take_in(module, args, kwargs):
        ids = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"][..., 0]
        tokens.append(ids.numel())

    def give_out(module, args, output):
        places.append(output.shape[:-1].numel())

    with (
        forward_pre_hook(model.base_model, take_in, kwargs=True),
        forward_hook(model.get_output_embeddings(), give_out),
    ):
        work()
    return max(tokens), max(places)


@pytest.mark.parametrize("loss", ["kd", "lm"])
def test_forward_passes_are_bounded_by_tokens_and_logits_by_their_number(mixtral, monkeypatch, loss):
    def run():
        given = material(mixtral, 300)
        hooks = new_hooks(mixtral, {1: 8}, "block", "pre")
        train_compensation(mixtral, LayerPlan((1, 1, 1)), hooks, given, TrainingSchedule(loss, 4, 3, 1e-2, 2))
        with apply_plan(mixtral, LayerPlan((1, 1, 1))), hooks.attached(mixtral):
            found = measure_quality(mixtral, given.held_out, given.held_out_teacher)
        return given.train_teacher, found, [p.detach().clone() for p in hooks.parameters()]

    whole = run()
    monkeypatch.setattr("freemoe.text.blocks.TOKENS_AT_ONCE", 50)
    monkeypatch.setattr("freemoe.evals.engine.output_head.CHUNK", 288 * 7)
    parts = []
    # 24 tokens a row: two rows at a time; the vocabulary has 288 entries: seven places at a time.
    assert seen_sizes(mixtral, lambda: parts.append(run())) == (48, 7)
    for a, b in zip((*vars(whole[0]).values(), *vars(whole[1]).values(), *whole[2]),
                    (*vars(parts[0][0]).values(), *vars(parts[0][1]).values(), *parts[0][2]), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    few = [lambda: record_routes(mixtral, blocks_of(6)), lambda: router_weights(mixtral, blocks_of(6))]
    few += [
        lambda: inputs_of(mixtral, blocks_of(6), 1),
        lambda: fit_scale_bias(mixtral, LayerPlan((1, 1, 1)), blocks_of(6)),
    ]
    assert [seen_sizes(mixtral, work)[0] for work in few] == [48] * 4


def test_activations_made_again_give_the_same_hooks(mixture):
    last, plan, given = moe_layers(mixture)[-1].number, uniform_plan(plan_of(mixture), 1), material(mixture)
    before_, found, kept = logits(mixture), [], []
    for again in (False, True):
        hooks = new_hooks(mixture, {last - 1: 4, last: 8}, "block", "parallel")
        with torch.no_grad():
            for _, hook in hooks.items():
                hook.down.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        counts = [0]

        def count(module, args, counts=counts):
            counts[0] += 1

        with forward_pre_hook(moe_layers(mixture)[-1].block, count):
            train_compensation(mixture, plan, hooks, given, replace(QUICK, checkpointing=again))
        found.append([p.detach().clone() for p in hooks.parameters()])
        kept.append(counts[0])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert kept[1] == kept[0] + QUICK.steps
    assert torch.equal(logits(mixture), before_)
