"""Learned switches: what one step does, its pace and its schedule, against slow versions."""

import math

import pytest
import torch

from freemoe.domain_experts import learned
from freemoe.domain_experts.curvature import Curvature, measure_curvature
from freemoe.domain_experts.gradients import noise_weights
from freemoe.domain_experts.learned import RANK, Pace, Switches, candidates_of, schedule
from freemoe.domain_experts.switching import switched_off
from freemoe.families.weights import Weight, find_weights
from tests.domain_experts.slow_learning import masked_gradients
from tests.domain_experts.test_saliency import batches
from tests.tiny import tiny_model

LAYOUTS = ["llama", "gpt2", "mixtral", "gpt_oss"]


def flat_curvature(weights, h=1.0):
    """The same h for every weight."""
    return Curvature(
        {w.name: torch.ones(w.experts, w.columns) for w in weights},
        {w.name: torch.full((w.experts, w.rows), h) for w in weights},
    )


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_is_gathered_equals_autograd_through_an_explicit_mask(case, exact):
    model = tiny_model(case)
    weights = find_weights(model)
    rows = batches(0)
    mask = noise_weights(model, weights, batches(1), 200, spread=1e9)[0]
    expected = masked_gradients(model, weights, mask, rows)
    thirds = [(torch.arange(w.size) % 3 == 0) for w in weights]
    for inside in (thirds, [None] * len(weights)):
        switches = {w.name: Switches.fresh(w, i) for w, i in zip(weights, inside, strict=True)}
        for weight, switch in zip(weights, switches.values(), strict=True):
            switch.switch(mask.get(weight.name, torch.empty(0, dtype=torch.long)))
        with switched_off(weights, mask):
            learned._gather(model, switches, rows, False, None)
        some, slope = 0, 0.0
        for (weight, switch), slow, which in zip(
            zip(weights, switches.values(), strict=True), expected, inside, strict=True
        ):
            wanted = slow if which is None else slow[which]
            torch.testing.assert_close(switch.mean, 0.1 * wanted, rtol=1e-3, atol=1e-6, msg=weight.name)
            gone = mask.get(weight.name, torch.empty(0, dtype=torch.long))
            some += int((slow[gone] != 0).sum())
            own = weight.view().reshape(-1)
            slope += float((slow[gone] * -own[gone]).sum())
        # Weights that are off have gradients of their own: that is how they come back.
        assert some > 10
        assert sum(s.slope for s in switches.values()) == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_evidence_is_the_sum_of_paced_running_means():
    (weight, *_) = find_weights(tiny_model("llama"))
    switch = Switches.fresh(weight, None)
    generator = torch.Generator().manual_seed(0)
    mean, evidence = torch.zeros(weight.size), torch.zeros(weight.size)
    for rate in (1.0, 0.5, 2.0):
        gradient = torch.randn(weight.shape, generator=generator)
        switch.forget()
        # A pass may come in several parts.
        switch.take(gradient * 0.25)
        switch.take(gradient * 0.75)
        switch.advance(rate)
        mean = 0.9 * mean + 0.1 * gradient.flatten()
        evidence += rate * mean
    torch.testing.assert_close(switch.evidence, evidence, rtol=0.02, atol=5e-3)
    own = weight.view().reshape(-1)
    scores = switch.scores(flat_curvature([weight], 0.3))
    torch.testing.assert_close(scores, own * switch.evidence - own**2 * 0.3)


def test_going_back_is_to_the_best_evidence():
    (weight, *_) = find_weights(tiny_model("llama"))
    switch = Switches.fresh(weight, None)
    generator = torch.Generator().manual_seed(0)
    switch.evidence.copy_(torch.randn(weight.size, generator=generator).bfloat16())
    best = switch.evidence.clone()
    switch.keep()
    switch.take(torch.randn(weight.shape, generator=generator))
    switch.advance(1.0)
    assert not torch.equal(switch.evidence, best)
    switch.go_back()
    assert torch.equal(switch.evidence, best)
    assert not switch.mean.any()


def test_changes_tell_what_was_added_to_each_weight():
    (weight, *_) = find_weights(tiny_model("llama"))
    own = weight.view().reshape(-1)
    switch = Switches.fresh(weight, None)
    switch.switch(torch.tensor([1, 4, 6]))
    switch.switch(torch.tensor([4, 7]))
    assert switch.moved.tolist() == [1, 6, 7]
    assert torch.equal(switch.change, torch.stack([own[1], own[6], -own[7]]))
    assert switch.off.nonzero().flatten().tolist() == [4, 7]
    switch.forget()
    switch.take(torch.ones(weight.shape))
    assert switch.slope == pytest.approx(float(own[1] + own[6] - own[7]), rel=1e-5)


@pytest.mark.parametrize("inside", [False, True])
def test_off_are_the_highest_scores_above_zero(inside):
    a, b = weights = find_weights(tiny_model("llama"))[1:3]
    which = torch.zeros(a.size, dtype=torch.bool)
    which[[3, 5, 8]] = True
    evidence = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([-2.0, 2.0, 0.5])
    for weight in weights:
        # Products of 1 with the evidence, and no curvature.
        weight.parameter.data.fill_(1.0)
    got = []
    for most in (0, 1, 2, 3, 9):
        switches = {}
        for weight, values in zip(weights, evidence, strict=True):
            switch = switches[weight.name] = Switches.fresh(weight, which.clone() if inside else None)
            if inside:
                switch.evidence[:] = values
            else:
                switch.evidence[[3, 5, 8]] = values
        mask = learned._switch(switches, flat_curvature(weights, 0.0), most)
        got.append({n: p.tolist() for n, p in mask.items()})
        assert {n: s.off.nonzero().flatten().tolist() for n, s in switches.items() if s.off.any()} == got[-1]
    assert got == [
        {}, {a.name: [8]}, {a.name: [8], b.name: [5]}, {a.name: [3, 8], b.name: [5]}, {a.name: [3, 8], b.name: [5, 8]}
    ]  # fmt: skip


def test_a_weight_goes_off_when_its_gain_is_more_than_it_disturbs():
    (weight, *_) = find_weights(tiny_model("llama"))
    weight.parameter.data.fill_(1.0)
    weight.parameter.data.view(-1)[:3] = torch.tensor([0.5, 1.0, 2.0])
    switch = Switches.fresh(weight, None)
    # w e > w^2 h where e > w h: the same evidence removes small weights and leaves large ones.
    switch.evidence[:3] = 1.0
    for h, expected in ((0.4, [0, 1, 2]), (0.6, [0, 1]), (1.5, [0]), (2.5, [])):
        mask = learned._switch({weight.name: switch}, flat_curvature([weight], h), 9)
        assert mask.get(weight.name, torch.empty(0)).tolist() == expected


def test_the_pace_grows_while_steps_end_downhill_and_halves_when_the_loss_rises():
    pace = Pace()
    for _ in range(3):
        pace.heard(-1.0)
    assert pace.value == pytest.approx(0.2 * 1.2**3)
    # One step that ended uphill a little does not outweigh the trend; a large one does, for good.
    pace.heard(0.5)
    assert pace.value == pytest.approx(0.2 * 1.2**4)
    pace.heard(5.0)
    pace.heard(-100.0)
    assert pace.value == pytest.approx(0.2 * 1.2**4)
    pace.rose()
    assert pace.value == pytest.approx(0.1 * 1.2**4)
    seen = Pace()
    seen.settle()
    seen.heard(-1.0)
    assert seen.value == pytest.approx(0.2)
    again = Pace()
    again.rose()
    again.heard(-1.0)
    assert again.value == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("tokens", "step_tokens", "steps", "expected"),
    [
        (800_000, 2048, None, (600, 2048)),
        (100_000, 2048, None, (244, 2048)),
        (8_000, 2048, None, (40, 1000)),
        (100_000, 50_000, None, (40, 12_500)),
        (100, 2048, None, (42, 12)),
        (10, 1, None, (50, 1)),
        (3, 2048, None, (24, 1)),
        (100_000, 2048, 7, (7, 2048)),
        (100, 2048, 7, (7, 12)),
    ],
)
def test_a_schedule_follows_from_the_documents(tokens, step_tokens, steps, expected):
    assert schedule(tokens, step_tokens, steps) == expected


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_candidates_are_the_cheapest_of_each_matrix(case):
    model = tiny_model(case)
    weights = find_weights(model)
    curvature = measure_curvature(model, weights, batches(0))
    assert candidates_of(weights, curvature, 1.0) == [None] * len(weights)
    for weight, inside in zip(weights, candidates_of(weights, curvature, 0.2), strict=True):
        cost = curvature.cost(weight).flatten()
        assert inside.sum() >= math.ceil(0.2 * weight.size)
        assert cost[inside].max() < cost[~inside].min()


def wide_weight(experts=1, rows=140, columns=150):
    """A weight that is large enough for smoothing; fused where it has experts."""
    shape = (experts, rows, columns) if experts > 1 else (rows, columns)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    layout = "experts" if experts > 1 else "rows"
    return Weight("wide", 0, "mlp", "tap", torch.nn.Parameter(values, requires_grad=False), layout)


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("inside", [False, True])
def test_smooth_evidence_is_the_best_approximation_by_few_directions(experts, inside):
    weight = wide_weight(experts)
    which = torch.arange(weight.size) % 5 != 0 if inside else None
    switch = Switches.fresh(weight, which)
    common = [
        (torch.randn(140, 9, generator=torch.Generator().manual_seed(i)) * torch.arange(1, 10))
        @ torch.randn(9, 150, generator=torch.Generator().manual_seed(10 + i))
        for i in range(experts)
    ]
    noise = torch.randn(experts, 140, 150, generator=torch.Generator().manual_seed(99)) / 10
    whole = (torch.stack(common) + noise).reshape(-1)
    switch.evidence[:] = whole if which is None else whole[which]
    seen = whole if which is None else torch.where(which, whole, 0.0)
    left, values, right = torch.linalg.svd(seen.view(weight.shape))
    best = left[..., :RANK] * values[:, None, :RANK] @ right[:, :RANK]
    # A training's steps: every one turns the directions a little further.
    for _ in range(12):
        smooth = switch.smooth()
    best = best.reshape(-1) if which is None else best.reshape(-1)[which]
    assert float((smooth - best).norm() / best.norm()) < 0.02
    # What is common stays, most of the noise goes.
    signal = torch.stack(common).reshape(-1)
    signal = signal if which is None else signal[which]
    if not inside:
        assert float((smooth - signal).norm()) < 0.6 * float((switch.evidence - signal).norm())


def test_evidence_of_few_directions_stays_as_it_is():
    weight = wide_weight()
    switch = Switches.fresh(weight, None)
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(140, 5, generator=generator) @ torch.randn(5, 150, generator=generator)
    switch.evidence[:] = plain.reshape(-1)
    torch.testing.assert_close(switch.smooth(), switch.evidence, rtol=1e-4, atol=1e-4)


def test_no_evidence_is_smooth_and_small_matrices_are_left_alone():
    switch = Switches.fresh(wide_weight(), None)
    assert not switch.smooth().any()
    small = Switches.fresh(wide_weight(rows=128), None)
    small.evidence.normal_(generator=torch.Generator().manual_seed(0))
    assert small.smooth() is small.evidence


def test_smoothing_is_the_same_every_time():
    found = []
    for _ in range(2):
        switch = Switches.fresh(wide_weight(), None, seed=4)
        switch.evidence.normal_(generator=torch.Generator().manual_seed(0))
        found.append(switch.smooth())
    assert torch.equal(*found)
