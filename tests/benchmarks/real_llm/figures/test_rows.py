"""Rows, gains, shares, the guard and the page of them, on made-up records whose answers are known."""

import math
from dataclasses import replace

import pytest

from benchmarks.real_llm.cells import EVERYTHING, Cell
from benchmarks.real_llm.figures import rows as joined
from benchmarks.real_llm.figures.rows import accepted, base_of, gain, pick, rows_of, share
from benchmarks.real_llm.figures.tables import forgetting, markdown, null_table, table, tables_of
from freemoe.evals.statistics import mean_interval
from tests.benchmarks.real_llm.records import BASE, LEARNED, LORA, finished, null_record, task_record, text_record


def test_a_rate_is_chosen_by_the_stopping_loss_alone():
    good = text_record(LORA, [1.0, 1.0], [3.0, 2.9])
    chosen = text_record(replace(LORA, rate=2e-3), [9.0, 9.0], [3.0, 2.5])
    (row,) = rows_of(finished(good, chosen), "text")
    assert row.records == (chosen,)
    assert row.rates == 2
    # A second seed with one of two rates waits; then it counts, and the values are means over seeds.
    second = text_record(replace(LORA, seed=1), [7.0, 5.0], [3.0, 2.0])
    assert len(rows_of(finished(good, chosen, second), "text")[0].records) == 1
    third = text_record(replace(LORA, seed=1, rate=2e-3), [0.0, 0.0], [3.0, 2.1])
    (row,) = rows_of(finished(good, chosen, second, third), "text")
    assert row.values().tolist() == [-8.0, -7.0]


def ends(gains):
    """Both ends of the interval of some documents' nats per token, as tables round them."""
    found = mean_interval(gains, [str(i) for i in range(len(gains))], [10] * len(gains))
    return [round(found.low, 4), round(found.high, 4)]


def test_gains_and_shares_are_paired_with_the_base():
    base = text_record(BASE, [40.0, 30.0, 20.0, 50.0])
    lora = text_record(LORA, [30.0, 20.0, 10.0, 40.0], [4.0, 3.0])
    learned = text_record(LEARNED, [35.0, 25.0, 15.0, 45.0], [4.0, 3.5])
    rows = rows_of(finished(base, lora, learned), "text")
    row, rival = (pick(rows, "wikitext", c.treatment) for c in (LEARNED, LORA))
    below = base_of(row, rows)
    found = gain(row, below)
    # Half a nat per token on every document.
    expected = mean_interval([0.5] * 4, ["a", "b", "c", "d"], [10] * 4)
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, expected.low, expected.high))
    part = share(row, rival, below)
    assert (part.mean, part.low, part.high) == pytest.approx((0.5, 0.5, 0.5))
    entries = {e["method"]: e for e in table(rows)}
    assert entries["base"]["perplexity"] == pytest.approx(math.exp(3.5), abs=1e-3)
    assert entries["learned-1%"]["share_of_lora_r1"] == [0.5, 0.5, 0.5]
    assert entries["lora-r1"]["gain"] == [1.0, *ends([1.0] * 4)]
    other = replace(row, records=({**row.first, "ids": ["reported:7"]},))
    with pytest.raises(ValueError, match="different documents"):
        gain(other, below)


def test_the_guard_needs_proof_on_documents_of_its_own_and_pays_for_every_question():
    cell = Cell("task", "arc-easy")
    wrong, right = [0.0] * 12, [1.0] * 7 + [0.0] * 5
    base = task_record(cell, wrong)
    better = task_record(replace(cell, method="learned", budget=0.01), right)
    none = task_record(replace(cell, method="greedy", budget=0.01), wrong)
    rows = rows_of(finished(base, better, none), "task")
    assert accepted([(rows[1], rows[0]), (rows[2], rows[0])]) == [True, False]
    # Seven of seven: p = 1/128 alone, but not among ten questions.
    assert accepted([(rows[1], rows[0])] * 10) == [False] * 10
    unguarded = replace(rows[1], records=({**rows[1].first, "guard": {"ids": [], "keys": [], "values": []}},))
    assert joined.verdict(unguarded, rows[0]) is None
    assert accepted([(unguarded, rows[0])]) == [False]


def test_what_stopped_at_its_start_is_the_base_whatever_rounding_says():
    base = text_record(BASE, [1.0] * 20)
    same = text_record(LEARNED, [1.0 - 1e-9] * 20, [3.0, 3.5])
    gained = text_record(replace(LEARNED, budget=0.05), [1.0 - 1e-9] * 20, [3.0, 2.5])
    rows = rows_of(finished(base, same, gained), "text")
    assert accepted([(rows[1], rows[0])]) == [False]
    assert accepted([(rows[2], rows[0])]) == [True]


def test_forgetting_pairs_a_column_with_the_base_of_the_same_documents():
    own = text_record(BASE, [40.0, 30.0])
    mine = text_record(LEARNED, [30.0, 20.0], [3.0])
    other = text_record(replace(BASE, material="c4"), [10.0, 20.0, 30.0])

    def cross(cell, nll):
        columns = {"c4": {"kind": "text", "ids": ["reported:2"], "keys": ["k"], "nll": [nll], "tokens": [10]}}
        return {"cell": vars(cell), "name": cell.name, "columns": columns}

    tried = cross(replace(LEARNED, family="cross"), 35.0)
    (row,) = forgetting(finished(own, mine, other, tried))
    assert row["gains"] == {"wikitext": [1.0, *ends([1.0, 1.0])], "c4": [-0.5, None, None]}
    # Without the column's base there is nothing to compare with, unless it was tried on everything.
    (row,) = forgetting(finished(own, mine, tried))
    assert list(row["gains"]) == ["wikitext"]
    (row,) = forgetting(finished(tried, cross(Cell("cross", EVERYTHING), 30.0)))
    assert row["gains"] == {"c4": [-0.5, None, None]}


def test_accepted_null_builds_are_counted_over_all_batches():
    found = null_table(finished(null_record(0, True, False), null_record(1, False, False)))
    assert (found["builds"], found["accepted"]) == (4, 1)
    assert found["by_reference_documents"] == {"120": [1, 4]}
    assert null_table({}) == {}


def test_the_table_shows_every_method():
    records = finished(
        text_record(replace(BASE, method="structured", budget=0.2), [36.0, 26.0, 31.0], [3.0]),
        text_record(BASE, [40.0, 30.0, 35.0]),
        text_record(LORA, [30.0, 20.0, 25.0], [3.0]),
        text_record(LEARNED, [35.0, 25.0, 30.0], [3.0]),
    )
    text = markdown({"model": "m", "cells": {"done": 3, "planned": 9}, **tables_of(records)})
    low, high = ends([0.5] * 3)
    assert "| wikitext | base | 33.12 |" in text
    assert f"| wikitext | learned-1% | 20.09 | +0.500 [{low:+.3f}, {high:+.3f}] | 50 % [50, 50] |" in text
    assert "lora-r1, lr 0.001" in text
