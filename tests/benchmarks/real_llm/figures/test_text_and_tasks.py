"""The figures with targets, with cells missing and with all of them there."""

import math
from dataclasses import replace

import pytest

from benchmarks.real_llm.cells import ALL, Cell
from benchmarks.real_llm.data import TASKS
from benchmarks.real_llm.figures.text_and_tasks import figures_of
from tests.benchmarks.real_llm.records import BASE, LEARNED, LORA, NLL, finished, null_record, task_record, text_record


def less(by):
    return [v - by for v in NLL]


def test_without_cells_every_figure_is_not_measured_and_missed():
    found = figures_of({})
    numbers = {"T13": 4, "T14": 6, "T15": 6, "T15b": 2, "T16": 3, "T9": 4, "split": 1, "T17": 1}
    assert [f.name.split()[0] for f in found] == [name for name, count in numbers.items() for _ in range(count)]
    assert all(math.isnan(f.value) for f in found)
    assert {f.verdict(False) for f in found if f.target is not None} == {"missed"}
    assert "not measured" in found[0].line()


def test_t13_takes_the_setting_that_stopped_best_and_says_the_share():
    records = [
        text_record(BASE, NLL),
        text_record(LORA, less(10.0), [4.0, 3.0]),
        text_record(LEARNED, less(2.0), [4.0, 3.5]),
        # Better on the reported documents, worse on the stopping ones: not chosen.
        text_record(replace(LEARNED, method="greedy"), less(9.9), [4.0, 3.9]),
        text_record(replace(LEARNED, budget=0.05), less(9.5), [4.0, 3.1]),
    ]
    share, low, *_ = figures_of(finished(*records))
    assert share.value == pytest.approx(95.0)
    assert share.verdict(False) == "met"
    assert "learned-5%" in share.note
    assert low.value == pytest.approx(0.2, rel=0.02)
    assert "learned-1%" in low.note
    share, low, *_ = figures_of(finished(*records[:1], *records[2:]))
    assert math.isnan(share.value)
    assert low.value == pytest.approx(0.2, rel=0.02)


def test_a_rival_without_gain_has_no_share_and_no_gain_is_no_gain():
    records = finished(text_record(BASE, NLL), text_record(LORA, NLL), text_record(LEARNED, NLL))
    share, low, *_ = figures_of(records)
    assert math.isnan(share.value)
    assert "LoRA r=1 gains nothing" in share.note
    assert low.verdict(False) == "missed"


def tasks(gained, rival):
    """Eight tasks of 40 questions, half of them right; so many more with switches, and with LoRA."""
    records = []
    for cell in (Cell("task", task.name) for task in TASKS):
        base, learned, lora = ([1.0] * (20 + more) + [0.0] * (20 - more) for more in (0, gained, rival))
        records += [
            task_record(cell, base),
            task_record(replace(cell, method="learned", budget=0.01), learned, [2.5, 2.0]),
            task_record(replace(cell, method="lora", rank=1, rate=1e-3), lora, [2.5, 2.0]),
        ]
    return finished(*records)


def t14(records):
    return [f for f in figures_of(records) if f.name.startswith("T14")]


def test_t14_counts_the_base_where_the_guard_says_no():
    low, share, *others = t14(tasks(12, 16))
    assert low.value > 0
    assert "guarded +30.00" in low.note
    assert share.value == pytest.approx(75.0)
    assert [f.verdict(False) for f in (share, *others[:2])] == ["missed", "not judged", "not judged"]
    # Four of four: p = 1/16 on every task proves nothing.
    low, *shares = t14(tasks(4, 16))[:4]
    assert all(said in low.note for said in ("guarded +0.00", "unguarded +10.00", "accepted: none"))
    assert low.verdict(False) == "missed"
    # What proves nothing for LoRA either is compared with nothing, and without a guard both count.
    assert [f.value for f in shares] == pytest.approx([0.0, 0.0, 25.0])
    behind, plain = t14(tasks(4, 5))[2:4]
    assert math.isnan(behind.value)
    assert "+0.00" in behind.note
    assert plain.value == pytest.approx(80.0)


def test_t14_says_which_tasks_are_missing():
    def without(name):
        return t14({k: v for k, v in tasks(12, 16).items() if name not in k})[:2]

    low, _ = without("rte")
    assert math.isnan(low.value)
    assert "rte" in low.note
    # A task that is measured and has no expert yet is the base's.
    low, share = without("rte/learned")
    assert f"guarded +{30 * 7 / 8:.2f}" in low.note
    assert "no expert yet, so the base: rte" in low.note
    assert math.isnan(share.value)
    low, share = without("rte/lora")
    assert low.value > 0
    assert math.isnan(share.value)
    assert "missing on rte; on the others 75.0 %" in share.note
    assert "missing" in without("lora")[1].note


def routes(picked, right, abstains=False):
    """The record of a router on the eight tasks of `tasks`, 40 questions each."""
    ids = [f"test:{i}" for i in range(40)]
    cell = Cell("route", ALL, "learned", 0.01)
    found = {t: {"ids": ids, "picked": picked[t], "abstains": [abstains] * 40, "right": right[t]} for t in picked}
    return {cell.name: {"cell": vars(cell), "name": cell.name, "tasks": found, "experts": list(picked)}}


def test_t14_routed_counts_what_the_expert_that_was_picked_answers():
    first, *rest = names = [t.name for t in TASKS]
    own, all_to_first = {n: [n] * 40 for n in names}, {n: [first] * 40 for n in names}
    unknown = {n: [None] * 40 for n in names}
    records = tasks(12, 16)
    assert math.isnan(t14(records)[-2].value)
    *_, routed, ever = t14(records | routes(own, unknown))
    assert "learned-1% +30.00" in routed.note
    assert routed.value == ever.value == pytest.approx(t14(records)[0].value)
    *_, routed, ever = t14(records | routes(own, unknown, abstains=True))
    assert "+0.00" in routed.note
    assert "100.0% to the base" in routed.note
    assert routed.verdict(False) == "missed"
    assert "learned-1% +30.00" in ever.note
    assert ever.verdict(False) == "not judged"
    # All go to the expert of the first task, which gets every second one of the others' right.
    half = unknown | {n: [1.0, 0.0] * 20 for n in rest}
    routed = t14(records | routes(all_to_first, half))[-2]
    assert f"learned-1% +{30 / 8:.2f}" in routed.note
    assert "87.5% went to another task's expert" in routed.note
    # A task without an expert is the base's, whoever is sent to it.
    record = routes(all_to_first, unknown)
    next(iter(record.values()))["experts"] = rest
    routed = t14(records | record)[-2]
    assert "learned-1% +0.00" in routed.note
    assert f"no expert yet, so the base: {first}" in routed.note
    # An expert that the guard refused is the base, whoever is sent to it.
    routed = t14(tasks(4, 16) | routes(all_to_first, half))[-2]
    assert "learned-1% +0.00" in routed.note
    assert "accepted: none" in routed.note


def test_t17_is_the_share_of_null_builds_that_accepted():
    figure = figures_of(finished(null_record(0, *(n < 3 for n in range(50)))))[-1]
    assert figure.value == pytest.approx(6.0)
    assert figure.verdict(False) == "missed"
    # Clopper and Pearson for 3 of 50, from a table.
    assert "[1.3, 16.5]" in figure.note
