"""The loop: a resumed run is an unbroken one, the best state is given back, what is no number stops, nothing is lost."""

import pytest
import torch
from torch import nn

from freemoe.core.errors import ArtifactError, NumericError
from freemoe.core.run.folder import RunFolder
from freemoe.training.descent import optimizer_step
from freemoe.training.loop import TrainingCheckpoints, eval_steps, run_training_loop
from freemoe.training.states import (
    BestCheckpoint,
    copy_into_parameters,
    load_optimizer,
    optimizer_state,
    pack_state,
    unpack_state,
)

STEPS, EVERY = 7, 2


class Fit:
    """A line through noisy points, trained by Adam; the points of a step follow from its number."""

    def __init__(self, output=None, patience=99, rate=0.3):
        self.line = nn.Linear(3, 1)
        with torch.no_grad():
            self.line.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
            self.line.bias.zero_()
        self.parameters = dict(self.line.named_parameters())
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=rate)
        self.best, self.patience = BestCheckpoint(self.parameters), patience
        self.run = RunFolder(output, {"a": 1}) if output else None
        self.done = []
        self.told = []

    def loss(self, seed):
        points = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
        return (self.line(points) - points.sum(1, keepdim=True)).square().mean()

    def step(self, number):
        optimizer_step(self.optimizer, map(self.loss, [number]), number)
        self.done.append(number)

    def look(self, done):
        self.told.append(done)
        return self.best.record_loss(float(self.loss(1000).detach())) >= self.patience

    def state(self):
        return {**pack_state("now", self.parameters), **optimizer_state(self.optimizer), **self.best.to_state()}

    def load(self, state):
        copy_into_parameters(self.parameters, unpack_state("now", state))
        load_optimizer(self.optimizer, state)
        self.best.load_state(state)

    def train(self, **changed):
        saved = TrainingCheckpoints(self.run, "fit", self.state, self.load) if self.run else None
        use = {"step": self.step, "look": self.look, "steps": STEPS, "every": EVERY, "checkpoints": saved, **changed}
        run_training_loop(**use)
        return self


def same(a, b):
    return sorted(a) == sorted(b) and all(torch.equal(a[name], b[name]) for name in a)


class Killed(Exception):
    pass


def dies_at(work, last):
    def doing(number):
        if number == last:
            raise Killed
        return work(number)

    return doing


@pytest.mark.parametrize(("steps", "every"), [(7, 2), (6, 2), (3, 10), (1, 1), (0, 5)])
def test_looks_are_before_the_first_step_and_after_every_so_many_and_the_last(steps, every):
    slow = [n for n in range(steps + 1) if n in (0, steps) or n % every == 0]
    fit = Fit().train(steps=steps, every=every)
    assert eval_steps(steps, every) == fit.told == slow
    assert fit.done == list(range(steps))


@pytest.mark.parametrize(("what", "last"), [*(("step", n) for n in range(STEPS)), *(("look", n) for n in (0, 2, 6, 7))])
def test_a_resumed_run_is_an_unbroken_one(tmp_path, what, last):
    whole = Fit(tmp_path / "whole").train()
    first = Fit(tmp_path / "out")
    with pytest.raises(Killed):
        first.train(**{what: dies_at(getattr(first, what), last)})
    first.run._release_claim()
    second = Fit(tmp_path / "out").train()
    assert same(whole.state(), second.state())
    assert same(Fit().train().state(), whole.state())
    # Steps that were done before the last look are not done again; nor is any left out.
    begun = second.told[0]
    assert begun == max(n for n in eval_steps(STEPS, EVERY) if n <= last)
    assert second.done == list(range(begun, STEPS))


def test_only_the_last_state_is_kept(tmp_path):
    fit = Fit(tmp_path / "out").train()
    assert [n for n in eval_steps(STEPS, EVERY) if fit.run.has_tensors(f"fit|{n}")] == [STEPS]


def test_a_damaged_state_is_said_and_not_gone_on_with(tmp_path):
    fit = Fit(tmp_path / "out").train()
    (path,) = (fit.run.partial / "units").iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    fit.run._release_claim()
    with pytest.raises(ArtifactError, match=r"damaged.*--no-resume"):
        Fit(tmp_path / "out").train()


def test_progress_counts_every_step_once(tmp_path):
    first, told = Fit(tmp_path / "out"), []
    with pytest.raises(Killed):
        first.train(step=dies_at(first.step, 5))
    first.run._release_claim()
    Fit(tmp_path / "out").train(advance=told.append)
    assert told[0] == 4
    assert sum(told) == STEPS


def test_the_best_look_is_given_back():
    # So large a step overshoots: some look in between is the best.
    fit = Fit(rate=0.9)
    seen = []

    def look(done):
        seen.append(pack_state("", fit.parameters))
        return fit.look(done)

    fit.train(look=look, steps=10)
    losses = fit.best.losses
    at = losses.index(min(losses))
    assert 0 < at < len(losses) - 1
    assert not same(seen[at], pack_state("", fit.parameters))
    fit.best.restore_best()
    assert same(seen[at], pack_state("", fit.parameters))
    assert float(fit.loss(1000).detach()) == min(losses)


def test_of_equal_looks_the_first_is_the_best():
    p = nn.Parameter(torch.zeros(1))
    best = BestCheckpoint({"p": p})
    waited = []
    for value, loss in enumerate([3.0, 2.0, 2.0, 4.0, 1.0]):
        p.data.fill_(value)
        waited.append(best.record_loss(loss))
    assert waited == [0, 0, 1, 2, 0]
    assert best.values["p"].tolist() == [4.0]


def test_patience_ends_it():
    fit = Fit(patience=3, rate=0.9).train(steps=200, every=1)
    losses = fit.best.losses
    assert len(losses) < 201
    assert len(losses) - 1 - losses.index(min(losses)) == 3
    # No look before had waited as long.
    for end in range(1, len(losses)):
        assert end - 1 - losses[:end].index(min(losses[:end])) < 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_and_loses_nothing(tmp_path, bad):
    fit = Fit(tmp_path / "out")

    def step(number):
        if number != 5:
            fit.step(number)
            return
        before = fit.state()
        with pytest.raises(NumericError) as error:
            # The first half is fine, and must not be half a step.
            optimizer_step(fit.optimizer, (fit.loss(n) * scale for n, scale in ((5, 1.0), (6, bad))), number)
        assert same(before, fit.state())
        raise error.value

    with pytest.raises(NumericError, match=rf"loss of step 5 is {bad}.*[Ll]ower the learning rate"):
        fit.train(step=step)
    fit.run._release_claim()
    assert same(Fit(tmp_path / "out").train().state(), Fit().train().state())


def test_a_look_that_is_no_number_stops():
    with pytest.raises(NumericError, match="loss of look 0 is nan"):
        BestCheckpoint({}).record_loss(float("nan"))
