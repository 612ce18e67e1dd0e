"""T9's figures from records by hand; conversions are done once, and again when something that decided them changes."""

import json
import math
from dataclasses import replace

import pytest

from benchmarks.harness import Settings
from benchmarks.tomoe import conversions, quality
from benchmarks.tomoe.conversions import Job, identity, kept, measured, run_all
from benchmarks.tomoe.quality import improving, judged


def record(seed, steps, loss):
    # Where the state was chosen the loss falls with every step, whatever the test text says.
    return {"seed": seed, "steps": steps, "held_out": 3 - steps / 1000, "nll": {"dense": 1.0, "converted": loss}}


def job(folder, **changes):
    text = folder / "text.txt"
    text.write_text("one two three")
    return replace(Job("demo", str(folder), (str(text),), 0.5, 4, 0, str(folder / "cells"), quick=True), **changes)


def test_a_fall_is_met_only_where_every_end_of_the_interval_falls():
    falls = [record(s, n, loss - 0.01 * s) for s in range(3) for n, loss in ((120, 2.7), (480, 2.6), (1920, 2.61))]
    figures = improving("demo", falls, (120, 480, 1920))
    assert [f.value for f in figures[:3]] == pytest.approx([2.69, 2.59, 2.60])
    assert [f.verdict(False) for f in figures] == ["not judged"] * 3 + ["met", "missed"]
    assert figures[3].value == pytest.approx(0.1)
    assert figures[3].note == "mean 0.1000 over 3 seeds; 0.3600 where the state was chosen"
    # One seed of three rises by more than the others fall.
    mixed = [record(s, n, 2.7 - (n > 120) * (0.02 if s else -0.03)) for s in range(3) for n in (120, 480)]
    assert improving("demo", mixed, (120, 480))[-1].verdict(False) == "missed"
    # What was not run yet is said, and not met.
    _, after, falls = improving("demo", [record(0, 120, 2.7)], (120, 480))
    assert math.isnan(after.value)
    assert (falls.verdict(False), "not measured yet" in falls.note) == ("missed", True)


def test_a_share_is_judged_by_the_best_rival_of_each_run():
    losses = [{"dense": 1.0, "converted": 1.2 + 0.01 * s, "a": 1.5, "b": 1.4} for s in range(3)]
    same = {"accuracy": {"dense": 0.8, "converted": 0.72}, "share_at_run_time": 0.85}
    figures, row = judged("demo", 0.5, [{"nll": nll, **same} for nll in losses])
    assert row["margin"]["mean"] == pytest.approx(0.19)
    assert [f.value for f in figures] == pytest.approx([row["margin"]["low"], 90, 85])


def test_a_conversion_is_done_once_and_again_when_what_decided_it_changes(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(conversions, "converted", lambda own, _: done.append(own.name) or {"held_out": 1.0})
    own = job(tmp_path)
    first = measured(own)
    assert measured(own) == first == kept(own)
    assert done == ["demo/50%/4/s0"]
    for other in (replace(own, steps=8), replace(own, active=0.4), replace(own, seed=1)):
        other.record.write_bytes(own.record.read_bytes())
        assert kept(other) is None
    (tmp_path / "text.txt").write_text("another text")
    assert kept(own) is None
    own.record.write_text("{ cut sh")
    assert kept(own) is None
    assert measured(replace(own, until=0.0)) is None, "too late to begin"
    assert measured(own) == {"held_out": 1.0, "identity": identity(own)}


def test_only_what_is_asked_for_is_run_and_what_is_there_counts(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(conversions, "side_by_side", lambda function, jobs, *_: begun.append([j.name for j in jobs]))
    few, many = job(tmp_path), job(tmp_path, steps=8)
    few.record.parent.mkdir()
    few.record.write_text(json.dumps({"steps": 4, "identity": identity(few)}))
    found = run_all([few, many], Settings(only="demo/*/8/*,other"))
    assert begun == [[many.name]]
    assert [one["steps"] for one in found] == [4]


def test_a_quick_run_converts_with_every_number_of_steps(tmp_path, monkeypatch):
    jobs = []
    monkeypatch.setattr(quality, "run_all", lambda asked, settings: jobs.extend(asked) or [])
    outcome = quality.run(Settings(quick=True, cells=tmp_path / "cells"))
    assert [one.name for one in jobs] == [f"demo/50%/{steps}/s0" for steps in quality.QUICK_STEPS]
    assert all(math.isnan(figure.value) for figure in outcome.figures)
    jobs.clear()
    quality.run(Settings(data_root=tmp_path / "data", cells=tmp_path / "cells"))
    assert len(jobs) == len({one.record for one in jobs}) == 2 * 3 * (4 + 2)
