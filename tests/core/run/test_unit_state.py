"""States of units: bit by bit what was kept, whole or not at all, gone when the unit is finished."""

import contextlib

import pytest
import torch

from freemoe.core.run import unit_state
from freemoe.core.run.folder import RunFolder
from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState


@pytest.fixture(autouse=True)
def every_step(monkeypatch):
    monkeypatch.setattr(unit_state, "SECONDS", 0.0)
    monkeypatch.setattr(unit_state, "SHARE", 0.0)


def awkward():
    """Transposed, shared, empty, a scalar, NaN with a payload, a sign of zero."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    odd = torch.tensor([0x7FC00001, -0x80000000], dtype=torch.int32).view(torch.float32)
    return {
        "plain": x, "turned": x.T, "of three": torch.randn(2, 3, 4).permute(1, 2, 0), "again": x, "empty": torch.empty(0),
        "one": torch.tensor(7), "odd": odd, "half": x.bfloat16(), "every other": x[:, ::2],
    }  # fmt: skip


def test_a_state_comes_back_bit_by_bit_and_as_it_lay(tmp_path):
    given = awkward()
    UnitState(tmp_path / "states", "u").write_state(lambda: given)
    found = UnitState(tmp_path / "states", "u").read_state()
    assert found is not None
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        mine, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(mine, theirs), name
    for name in ("plain", "turned", "of three"):
        assert found[name].stride() == given[name].stride(), name


@pytest.mark.parametrize("harm", [lambda b: b[:-1], lambda b: b[:10], lambda b: b"", lambda b: b[:-1] + b"?"])
def test_a_damaged_state_does_not_count(harm, tmp_path):
    state = UnitState(tmp_path / "states", "u")
    state.write_state(awkward)
    (path,) = (tmp_path / "states").iterdir()
    path.write_bytes(harm(path.read_bytes()))
    assert state.read_state() is None


def test_a_finished_unit_leaves_no_state(tmp_path):
    run = RunFolder(tmp_path / "out", {})
    for name in ("tensors", "value"):
        run.unit_state(name).write_state(awkward)
        run.unit_state(name).part_state("p").write_state(awkward)
    run.unit_state("other").write_state(awkward)
    run.run_tensor_unit("tensors", lambda: {"a": torch.ones(1)})
    run.run_unit("value", lambda: 1)
    assert run.unit_state("tensors").read_state() is run.unit_state("value").part_state("p").read_state() is None
    assert run.unit_state("other").read_state() is not None
    # Killed between the journal and its state, too.
    run.unit_state("late").write_state(awkward)
    run.journal.run_unit("late", lambda: 1)
    again = RunFolder(tmp_path / "out", {})
    assert again.unit_state("late").read_state() is None
    assert again.unit_state("other").read_state() is not None


def test_a_run_with_a_state_alone_has_done_something(tmp_path):
    run = RunFolder(tmp_path / "out", {})
    run.require_same_inputs({"text": "a"})
    run.unit_state("first unit").write_state(awkward)
    run.discard_if_idle(refused=True)
    assert RunFolder(tmp_path / "out", {}).unit_state("first unit").read_state() is not None


def test_by_the_clock(tmp_path, monkeypatch):
    """At most every two seconds, and so seldom that a slow disk takes a twentieth of the time."""
    now = [0.0]
    monkeypatch.setattr(unit_state, "SECONDS", 2.0)
    monkeypatch.setattr(unit_state, "SHARE", 0.05)
    monkeypatch.setattr(unit_state.time, "monotonic", lambda: now[0])
    state = UnitState(tmp_path / "states", "u")

    def slow():
        now[0] += 0.5
        return {}

    seen = []
    for _ in range(300):
        now[0] += 0.1
        if state.write_state(slow):
            seen.append(now[0] - 0.5)
    assert seen[:3] == pytest.approx([2.0, 12.5, 23.0], abs=0.11)


class Summed:
    """A pass over numbers that dies at one of them."""

    def __init__(self, kept, dies_at=99):
        self.kept, self.dies_at = kept, dies_at
        self.total, self.seen, self.skipped = torch.zeros(()), [], []

    def run(self):
        def load(state):
            self.total = state["total"]

        for n in self.kept.resume_iter(range(6), lambda: {"total": self.total}, load, self.skipped.append):
            if n == self.dies_at:
                raise KeyboardInterrupt
            self.seen.append(n)
            self.total = self.total + 0.1 * n
        return float(self.total)


@pytest.mark.parametrize("dies_at", range(6))
def test_a_pass_goes_on_behind_what_it_has_added(dies_at, tmp_path):
    kept = UnitState(tmp_path / "states", "u")
    first = Summed(kept, dies_at)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = Summed(kept)
    assert second.run() == Summed(NO_CHECKPOINT).run()
    assert first.seen + second.seen == list(range(6))
    assert second.skipped == ([dies_at] if dies_at else [])
    third = Summed(kept)
    assert third.run() == second.total
    assert third.seen == []


@pytest.mark.parametrize("dies_at", range(7))
@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_a_list_goes_on_behind_what_it_has(dies_at, seconds, tmp_path, monkeypatch):
    monkeypatch.setattr(unit_state, "SECONDS", seconds)
    done = []

    def work(n):
        done.append(n)
        if n == dies_at and len(done) == dies_at + 1:
            raise KeyboardInterrupt
        return {"a": torch.full((2,), n / 3), "b": torch.tensor(n)}

    def run():
        return UnitState(tmp_path / "states", "u").map_items(range(6), work)

    with pytest.raises(KeyboardInterrupt) if dies_at < 6 else contextlib.nullcontext():
        run()
    found = run()
    assert [int(own["b"]) for own in found] == list(range(6))
    assert all(torch.equal(own["a"], torch.full((2,), n / 3)) for n, own in enumerate(found))
    if not seconds:
        done.clear()
        assert len(run()) == 6
        assert done == []
