"""Builds that are stopped: what is finished is kept, and the end is the same, byte by byte; test_ahead.py kills one."""

import shutil

import pytest

from freemoe.core.errors import DataError
from freemoe.core.run.journal import RunJournal
from freemoe.domain_experts.pipeline import build
from freemoe.domain_experts.purify import methods as purification
from tests.domain_experts.conftest import choice_rows, read_result, task_recipe, write_jsonl
from tests.domain_experts.test_candidates import put_method
from tests.tiny import save_base, tiny_model

FILES = ("experts.safetensors", "router.safetensors")


def small(world, folder, **changes):
    """Two subdomains, some forty units of work."""
    options = {
        "domains": {"law": [str(world.law)]},
        "subdomains": {"count": 2, "min_size": 4},
        "bands": {"step": 0.5, "ratio": 0.5},
        "search": {"metrics": ["saliency", "wanda"], "method": "exhaustive", "select": "argmax"},
        **changes,
    }
    return task_recipe(world, folder / "out", **options)


@pytest.fixture(scope="module")
def unbroken(world, tmp_path_factory):
    """The artefact that every stopped and resumed build must end in."""
    return build(small(world, tmp_path_factory.mktemp("unbroken")))


class Counter:
    """Counts the work that is really done."""

    def __init__(self, monkeypatch, output, stop_after=None):
        self.units, self.purified, self.stop_after = [], [], stop_after
        unit, purify = RunJournal.run_unit, purification.METHODS.get("greedy").search

        def counted_unit(journal, name, work):
            assert not output.exists(), "the finished name appeared before the end"

            def counted():
                if self.stop_after is not None and len(self.units) >= self.stop_after:
                    raise KeyboardInterrupt
                self.units.append(name)
                return work()

            return unit(journal, name, counted)

        def counted_purify(*args, **kwargs):
            self.purified.append(1)
            return purify(*args, **kwargs)

        monkeypatch.setattr(RunJournal, "run_unit", counted_unit)
        put_method(monkeypatch, "greedy", counted_purify)


def same(a, b):
    for file in FILES:
        assert (a / file).read_bytes() == (b / file).read_bytes(), file
    first, second = read_result(a), read_result(b)
    assert first["domains"] == second["domains"]
    assert [p.name for p in sorted(a.iterdir())] == [p.name for p in sorted(b.iterdir())]
    return first, second


@pytest.mark.parametrize("after", [0, 1, 4, -1])
def test_a_stopped_build_goes_on_where_it_stopped(world, unbroken, tmp_path, monkeypatch, after):
    total = read_result(unbroken)["cost"]["units_done"]
    after %= total
    counter = Counter(monkeypatch, tmp_path / "out", after)
    with pytest.raises(KeyboardInterrupt):
        build(small(world, tmp_path))
    assert not (tmp_path / "out").exists()
    # Before any unit of work is finished there is nothing to keep: the first one only notes what is read.
    kept = 0 if after == 1 else after
    assert (tmp_path / "out.partial").is_dir() == (kept > 0)
    assert len(counter.units) == after
    counter.stop_after = None
    first, _ = same(build(small(world, tmp_path)), unbroken)
    assert not (tmp_path / "out.partial").exists()
    assert len(set(counter.units)) == total
    assert len(counter.units) == total + after - kept
    assert first["cost"]["units_done"] == total - kept
    assert first["cost"]["units_reused"] >= kept - 1
    # Tensors are on disk before their line is in the journal: the one in between may be made twice.
    assert len(counter.purified) <= 2 + (1 if 3 <= after <= 4 else 0)


def test_stopped_many_times(world, unbroken, tmp_path, monkeypatch):
    counter = Counter(monkeypatch, tmp_path / "out")
    for stop in range(5, 10**6, 5):
        counter.stop_after = stop
        try:
            folder = build(small(world, tmp_path))
        except KeyboardInterrupt:
            continue
        break
    assert stop > 20
    same(folder, unbroken)
    assert len(counter.units) == len(set(counter.units))


def stop(world, folder, monkeypatch, after=6, **changes):
    with monkeypatch.context() as patch:
        Counter(patch, folder / "out", after)
        with pytest.raises(KeyboardInterrupt):
            build(small(world, folder, **changes))


def test_resumed_with_another_base(world, tmp_path, monkeypatch):
    base = shutil.copytree(world.base, tmp_path / "base")
    stop(world, tmp_path, monkeypatch, model=str(base))
    shutil.rmtree(base)
    save_base(tiny_model("llama", seed=5), base)
    before = (tmp_path / "out.partial" / "journal.jsonl").read_bytes()
    with pytest.raises(DataError, match="another base model"):
        build(small(world, tmp_path, model=str(base)))
    # Nothing is lost: with the base back in its place the run goes on.
    assert (tmp_path / "out.partial" / "journal.jsonl").read_bytes() == before
    shutil.rmtree(base)
    shutil.copytree(world.base, base)
    folder = build(small(world, tmp_path, model=str(base)))
    assert read_result(folder)["cost"]["units_reused"] > 4


@pytest.mark.parametrize("side", ["ref", "test"])
def test_resumed_with_other_documents(world, tmp_path, monkeypatch, side):
    rows = [{**r, "key": f"k{i}"} for i, r in enumerate(choice_rows(60))]
    write_jsonl(tmp_path / "ref.jsonl", rows[:30])
    write_jsonl(tmp_path / "test.jsonl", rows[30:])
    changes = {"domains": {"law": [f"{tmp_path / 'ref.jsonl'}::{tmp_path / 'test.jsonl'}"]}}
    stop(world, tmp_path, monkeypatch, **changes)
    file = tmp_path / f"{side}.jsonl"
    whole = file.read_text()
    for old, new in (('"yes"', '"yet"'), ('"question": "', '"question": "Now ')):
        # One document, which keeps its key.
        file.write_text(whole.replace(old, new, 1))
        with pytest.raises(DataError, match="documents"):
            build(small(world, tmp_path, **changes))


def test_an_unfinished_run_can_be_discarded(world, unbroken, tmp_path, monkeypatch):
    stop(world, tmp_path, monkeypatch)
    first, _ = same(build(small(world, tmp_path), resume=False), unbroken)
    assert first["cost"]["units_reused"] == 0
