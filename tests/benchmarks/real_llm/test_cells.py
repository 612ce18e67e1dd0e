"""Names, identity and the folder of finished cells."""

import json
from dataclasses import replace

import pytest

from benchmarks.real_llm.cells import Cell, Store
from benchmarks.real_llm.plan import cells, estimates, needs
from benchmarks.real_llm.protocol import Protocol, identity
from benchmarks.rivals.rival import Schedule

CELL = Cell("text", "wikitext", "lora", rank=1, rate=2e-3)


def test_a_name_says_what_a_cell_is_and_no_two_cells_share_one():
    assert CELL.name == "text/wikitext/lora-r1-lr0.002/s0"
    assert Cell("text", "c4", "learned", 0.003, seed=2).name == "text/c4/learned-0.3%/s2"
    assert Cell("text", "c4", "structured", 0.1).treatment == "structured-10%"
    assert Cell("union", "a", "learned", 0.01, other="b").name == "union/a+b/learned-1%/s0"
    assert Cell("count", "c4", documents=300).name == "count/c4/base/n300/s0"
    names = [c.name for c in cells()]
    assert len(set(names)) == len(names) == len({c.file for c in cells()})


def test_the_first_hour_answers_t13_on_wikitext():
    first = [c.name for c in cells()[:8]]
    assert first[0] == "text/wikitext/base/s0"
    assert sum("lora-r1-" in n for n in first) == 3
    assert {"text/wikitext/learned-5%/s0", "text/wikitext/learned-1%/s0", "text/wikitext/greedy-1%/s0"} <= set(first)


def test_a_record_counts_only_for_its_own_identity(tmp_path):
    store = Store(tmp_path / "cells")
    known = identity(CELL, Protocol(), "model", "data", {})
    assert store.load(CELL, known) is None
    saved = store.save(CELL, known, {"nll": [1.5]})
    assert store.load(CELL, known) == saved
    assert Cell.read(saved["cell"]) == CELL
    for protocol, *digests in (
        (replace(Protocol(), given=0), "model", "data", {}),
        (replace(Protocol(), schedule=Schedule(steps=61)), "model", "data", {}),
        (Protocol(), "other", "data", {}),
        (Protocol(), "model", "other", {}),
        (Protocol(), "model", "data", {"below": "changed"}),
    ):
        assert store.load(CELL, identity(CELL, protocol, *digests)) is None
    store.path(CELL).write_text(json.dumps(saved)[:-20])
    assert store.load(CELL, known) is None


def test_a_cross_stands_on_the_rate_with_the_best_stopping_loss():
    first, second = tried = [replace(CELL, rate=rate) for rate in (5e-3, 2e-3)]
    cross = Cell("cross", "wikitext", "lora", rank=1)
    best = {second.name: {"losses": [3.0, 2.5, 2.8]}}
    assert needs(cross, {first.name: {"losses": [3.0, 2.9]}} | best, tried) == [second]
    assert needs(cross, best, tried) is None
    assert needs(first, {}, tried) == []


def test_estimates_follow_what_finished_cells_of_the_kind_took():
    plan = [CELL, replace(CELL, rate=5e-3), replace(CELL, material="c4"), Cell("text", "c4")]
    guessed = estimates(plan, Protocol(), {})
    assert all(seconds > 0 for seconds in guessed.values())
    told = estimates(plan, Protocol(), {CELL.name: {"wall_seconds": 10 * guessed[CELL.name]}})
    for cell in plan:
        assert told[cell.name] == pytest.approx(10 * guessed[cell.name])
