"""The table and the pictures are drawn from the JSON alone, and are the same for the same JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.real_llm.cells import Cell
from benchmarks.real_llm.figures.pictures import _speed_of, draw_all
from benchmarks.real_llm.figures.tables import tables_of
from freemoe.evals.statistics import mean_interval
from tests.benchmarks.real_llm.records import finished, text_record

BASE = Cell("text", "wikitext")
HEAD = {"model": "m", "cells": {"done": 3, "planned": 9}}


def test_the_table_and_pictures_show_every_method(tmp_path: Path) -> None:
    cut = text_record(replace(BASE, method="structured", budget=0.2), [36.0, 26.0, 31.0], [3.0])
    cut["speed"] = {"prefill": 120.0, "decode": 11.0, "dense": {"prefill": 100.0, "decode": 10.0}}
    records = finished(
        cut,
        text_record(BASE, [40.0, 30.0, 35.0]),
        text_record(replace(BASE, method="lora", rank=1, rate=1e-3), [30.0, 20.0, 25.0], [3.0]),
        text_record(replace(BASE, method="learned", budget=0.01), [35.0, 25.0, 30.0], [3.0]),
    )
    details = {**HEAD, **tables_of(records)}
    written = draw_all(details, tmp_path / "a")
    pictures = [f"real-{name}.svg" for name in ("gain-bytes", "figure-speed", "home-or-far")]
    assert [p.name for p in written] == ["real.md", *pictures]
    text = written[0].read_text()
    found = mean_interval([0.5] * 3, ["a", "b", "c"])
    assert "| wikitext | base | 33.12 |" in text
    ends = f"{round(found.low, 4):+.3f}, {round(found.high, 4):+.3f}"
    assert f"| wikitext | learned-1% | 20.09 | +0.500 [{ends}] | 50 % [50, 50] |" in text
    assert "lora-r1, lr 0.001" in text
    for first, second in zip(written, draw_all(details, tmp_path / "b"), strict=True):
        assert first.read_bytes() == second.read_bytes()
    assert "<svg" in written[1].read_text()
    # What has the base's shape has its speed, whatever the clock said; what was cut was timed in turns with it.
    speeds = {entry["method"]: _speed_of(entry) for entry in details["text"]}
    assert speeds == {"base": 1.0, "lora-r1": 1.0, "learned-1%": 1.0, "structured-20%": 1.2}
    without = {**HEAD, **tables_of({k: v for k, v in records.items() if "structured" not in k})}
    assert "real-figure-speed.svg" not in [p.name for p in draw_all(without, tmp_path / "c")]
