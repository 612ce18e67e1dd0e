"""Calibration in parts: cut anywhere it ends in the same bits, and a killed run goes on at its last part."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from freemoe.core.run.folder import RunFolder
from freemoe.core.run.journal import RunJournal
from freemoe.domain_experts import pipeline as build_module
from freemoe.domain_experts.context import prepare_context
from freemoe.domain_experts.rank.calibrate import calibrate, parts_of
from tests.domain_experts.conftest import task_recipe
from tests.domain_experts.rank.test_calibrate import same
from tests.tiny import model_and_weights


def batches(count=6):
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        ids = torch.randint(3, 250, (3, 7 + number), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 4:] = 0
        yield ids, mask, torch.tensor([number % 2, 1, 2])


@pytest.mark.parametrize("case", ["llama", "mixtral"])
@pytest.mark.parametrize("cuts", [(1,), (3,), (2, 3, 5)])
def test_a_pass_that_is_cut_ends_in_the_same_bits(case, cuts):
    model, weights = model_and_weights(case)
    norms = None
    for first, end in itertools.pairwise((0, *cuts, 6)):
        before, kept = norms, norms and norms.copy()
        norms = calibrate(model, weights, list(batches())[first:end], 3, before=before)
        # What came before is added to, not changed.
        assert before is None or same(before, kept)
    assert same(norms, calibrate(model, weights, batches(), 3))


def test_parts_hold_every_document_once_and_not_too_much():
    lengths = [5, 90, 7, 30, 30, 1, 200, 8]
    parts = parts_of(lengths, 100)
    assert sorted(n for part in parts for n in part) == list(range(8))
    assert [lengths[n] for part in parts for n in part] == sorted(lengths, reverse=True)
    assert all(sum(lengths[n] for n in part) <= 100 or len(part) == 1 for part in parts)
    assert parts == [[6], [1], [3, 4, 7, 2, 0, 5]]
    assert parts_of([], 10) == []


@pytest.fixture(scope="module")
def context(world):
    """A workbench with 32 documents, of which each part of the calibration takes few."""
    changes = {"domains": {"law": [str(world.law)]}, "search": {"metrics": ["wanda"]}, "batch_tokens": 128}
    return prepare_context(task_recipe(world, "unused", **changes))


DIVIDED = {"law": SimpleNamespace(names=["law/0", "law/1"], labels=[i % 2 for i in range(32)])}


@pytest.fixture
def measured(monkeypatch):
    """How many documents were run, and the part at which the next run is killed."""
    monkeypatch.setattr(build_module, "CALIBRATION_PART", 1)
    told = SimpleNamespace(documents=0, units=[], stop=None)
    unit, measure = RunJournal.run_unit, calibrate

    def counted_unit(journal, name, work):
        if name not in journal:
            if len(told.units) == told.stop:
                raise KeyboardInterrupt
            told.units.append(name)
        return unit(journal, name, work)

    def counted(model, weights, batches, groups, on_batch=None, before=None):
        def through():
            for batch in batches:
                told.documents += len(batch[0])
                yield batch

        return measure(model, weights, through(), groups, on_batch, before)

    monkeypatch.setattr(RunJournal, "run_unit", counted_unit)
    monkeypatch.setattr(build_module, "calibrate", counted)
    return told


def run_of(folder):
    return RunFolder(folder / "out", {"recipe": 1})


def run(context, folder, measured, stop=None):
    """Calibrate, from where an earlier run of the folder came to, and count anew what is measured meanwhile."""
    measured.units, measured.documents, measured.stop = [], 0, stop
    return build_module._calibrate_norms(context, run_of(folder), DIVIDED)


def test_a_killed_run_goes_on_at_its_last_part(context, tmp_path, measured):
    whole = run(context, tmp_path / "whole", measured)
    assert measured.documents == 32
    count = len(measured.units)
    assert count > 5
    assert measured.units == [f"calibration|{n}/{count}" for n in range(1, count + 1)]
    tokens = sum(len(ids) for ids, _ in context.answer_rows(context.domains["law"].reference.documents))
    assert int(sum(n.sum() for n in whole.counts.values())) == tokens * len(whole.counts)

    units, documents = [], 0
    for stop in (0, 1, 3, None):
        if stop is None:
            assert same(run(context, tmp_path, measured), whole)
        else:
            with pytest.raises(KeyboardInterrupt):
                run(context, tmp_path, measured, stop)
        units, documents = units + measured.units, documents + measured.documents
    assert len(set(units)) == len(units) == count
    # What a killed run measured last was not written down, and is measured twice.
    assert 32 < documents < 32 + 3 * 8
    assert same(run(context, tmp_path, measured), whole)
    assert measured.documents == 0
    # Only the newest sums stay on the disk.
    assert len(list((run_of(tmp_path).partial / "units").iterdir())) == 1


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-1] + b"x")])
def test_lost_or_damaged_sums_are_measured_anew(context, tmp_path, measured, damage):
    whole = run(context, tmp_path / "whole", measured)
    with pytest.raises(KeyboardInterrupt):
        run(context, tmp_path, measured, stop=4)
    for path in (run_of(tmp_path).partial / "units").iterdir():
        damage(path)
    assert same(run(context, tmp_path, measured), whole)
    assert measured.documents == 32
