"""Purifications that are killed in their middle: they go on at their last state, and find what an unbroken one finds."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from freemoe.core.run import unit_state
from freemoe.core.run.folder import RunFolder
from freemoe.domain_experts import pipeline as build
from freemoe.domain_experts.purify import curvature, greedy, learned, methods
from freemoe.domain_experts.purify.greedy import PurifyTask
from freemoe.domain_experts.recipe import SaliencySection, UnitSection
from freemoe.domain_experts.structured import training
from freemoe.domain_experts.structured.fitting import fit_units
from freemoe.domain_experts.structured.units import find_units
from freemoe.recipes import recipe_from
from tests.domain_experts.purify.test_greedy import batches, bits, purify, unchanged
from tests.tiny import model_and_weights, tiny_model

LEARNED = {"budget": 0.01, "steps": 14, "every": 3, "step_tokens": 8, "patience": 3}
BOTH = {"step": 0.001, "budget": 0.006, "patience": 3, "steps": 12, "every": 3, "step_tokens": 8}
UNIT = UnitSection(unit="neuron", off=(0.1, 0.2), steps=6, every=2, step_tokens=8)


class KilledError(BaseException):
    pass


@pytest.fixture
def passes(monkeypatch):
    """Counts gradient passes, the work that must not be done again, and dies after so many states were written."""
    told = SimpleNamespace(count=0, left=10**9)

    def counted(work):
        def counting(*args, **options):
            told.count += 1
            return work(*args, **options)

        return counting

    def dying(*args, write=unit_state.write_atomic):
        write(*args)
        told.left -= 1
        if told.left == 0:
            raise KilledError

    for name in ("SECONDS", "SHARE"):
        monkeypatch.setattr(unit_state, name, 0.0)
    for module, name in itertools.product((curvature, greedy, learned, training), ("backward", "noise_weights")):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, counted(getattr(module, name)))
    monkeypatch.setattr(unit_state, "write_atomic", dying)
    return told


def lives(work, folder, passes, after):
    """The run again and again, killed each time after so many new states; its end last."""
    while True:
        passes.left = after
        run = RunFolder(folder, {})
        try:
            yield work(run.unit_state("purify|law"))
            return
        except KilledError:
            yield None


SEARCHES = {
    "greedy": ("greedy", "llama", {}, {"step": 0.001, "budget": 0.008, "patience": 3, "part_tokens": 4}),
    "learned": ("learned", "llama", {}, LEARNED),
    "learned, low rank": ("learned", "llama", {"hidden_size": 160, "intermediate_size": 192}, {**LEARNED, "steps": 6}),
    "learned, experts": ("learned", "mixtral", {}, LEARNED),
    "both": ("both", "llama", {}, BOTH),
}


@pytest.mark.parametrize(("method", "case", "size", "options"), SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("after", [1, 4])
def test_killed_in_its_middle_it_ends_alike(method, case, size, options, after, tmp_path, passes):
    def work(checkpoint):
        model = tiny_model(case, **size)
        before, way = bits(model), methods.METHODS.get(method).run
        found = purify(way, model, batches(0), batches(1), **options, checkpoint=checkpoint)
        assert unchanged(model, before)
        return found

    whole = work(unit_state.NO_CHECKPOINT)
    needed, passes.count = passes.count, 0
    *killed, found = lives(work, tmp_path / "out", passes, after)
    assert (found.losses, found.best, found.forecast) == (whole.losses, whole.best, whole.forecast)
    assert found.mask.is_equal(whole.mask)
    assert len(killed) > 8 / after
    # No pass was made twice, but the forecast's, which stands between the last state and the end.
    assert needed <= passes.count <= needed + len(killed)
    assert passes.count < 2 * needed


def test_units_killed_in_their_middle_end_alike(tmp_path, passes):
    def work(checkpoint):
        model, weights = model_and_weights("llama")
        task = PurifyTask(model, weights, batches(0), batches(1), checkpoint=checkpoint)
        section = SaliencySection(method="both", **BOTH)
        return fit_units(task, find_units(model, "neuron"), UNIT, section, singles=True).to_tensors()

    whole = work(unit_state.NO_CHECKPOINT)
    *killed, found = lives(work, tmp_path / "out", passes, 2)
    assert len(killed) > 10
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_the_number_format_is_measured_once_for_a_run(tmp_path, monkeypatch):
    """A process that goes on may find the other format faster: it goes on in the first one's."""
    recipe = recipe_from({"command": "build", "model": "m", "domains": {"law": ["demo:code"]}, "output": "out"})
    large = tiny_model("llama", hidden_size=512, intermediate_size=512)
    for faster in (torch.bfloat16, None):
        monkeypatch.setattr(build, "compute_dtype", lambda wish, model, faster=faster: faster)
        assert build._with_format(recipe, large, RunFolder(tmp_path / "out", {})).saliency.compute == "bfloat16"
    # Where nothing is measured, nothing is noted.
    run = RunFolder(tmp_path / "other", {})
    assert build._with_format(recipe, tiny_model("llama"), run) is recipe
    assert run.journal.unit_names() == []
