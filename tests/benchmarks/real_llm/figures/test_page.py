"""The page of the benchmark is made from the JSON alone."""

from dataclasses import replace

from benchmarks.real_llm.figures.tables import markdown, tables_of
from freemoe.evals.statistics import mean_interval
from tests.benchmarks.real_llm.records import BASE, LEARNED, LORA, finished, text_record


def test_the_table_shows_every_method():
    records = finished(
        text_record(replace(BASE, method="structured", budget=0.2), [36.0, 26.0, 31.0], [3.0]),
        text_record(BASE, [40.0, 30.0, 35.0]),
        text_record(LORA, [30.0, 20.0, 25.0], [3.0]),
        text_record(LEARNED, [35.0, 25.0, 30.0], [3.0]),
    )
    text = markdown({"model": "m", "cells": {"done": 3, "planned": 9}, **tables_of(records)})
    found = mean_interval([0.5] * 3, ["a", "b", "c"])
    assert "| wikitext | base | 33.12 |" in text
    ends = f"{round(found.low, 4):+.3f}, {round(found.high, 4):+.3f}"
    assert f"| wikitext | learned-1% | 20.09 | +0.500 [{ends}] | 50 % [50, 50] |" in text
    assert "lora-r1, lr 0.001" in text
