"""Figures, verdicts, fair timing, and what is written down."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import BENCHES, Figure, Outcome, Settings, in_turns, missed, ratio, run_bench, save_result
from freemoe.core.errors import UnknownNameError


def test_a_figure_is_met_at_its_target_and_missed_beyond() -> None:
    assert Figure("speed", 6.0, 6.0).verdict(False) == "met"
    assert Figure("speed", 5.99, 6.0).verdict(False) == "missed"
    assert Figure("size", 0.1, 0.1, "lower").verdict(False) == "met"
    assert Figure("size", 0.11, 0.1, "lower").verdict(False) == "missed"
    assert Figure("size", math.nan, 0.1, "lower").verdict(False) == "missed"


def test_nothing_is_judged_without_a_target_or_in_a_quick_run() -> None:
    assert Figure("beside", 3.0).verdict(False) == "not judged"
    assert Figure("speed", 1.0, 6.0).verdict(True) == "not judged"


def test_the_line_says_name_value_target_and_verdict() -> None:
    assert Figure("speed", 7.25, 6.0).line() == "speed: 7.25x (target >= 6x) met"
    figure = Figure("size", 0.2, 0.1, "lower", " %", 3, "of a 7B base")
    assert figure.line() == "size: 0.200 % (target <= 0.1 %) missed; of a 7B base"
    assert Figure("beside", 2.0, unit=" s").line() == "beside: 2.00 s"
    assert Figure("gone", math.nan, 1.0).line() == "gone: not measured (target >= 1x) missed"


def test_sides_take_turns_and_each_comes_first_as_often() -> None:
    calls: list[str] = []
    seconds = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 4)
    assert calls == ["b", "a"] + ["a", "b", "b", "a"] * 2
    assert {name: len(s) for name, s in seconds.items()} == {"a": 4, "b": 4}


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine got three times slower in the second round: the ratio does not care.
    assert ratio({"slow": [2.0, 6.0, 2.2], "fast": [1.0, 3.0, 1.0]}, "slow", "fast") == 2.0


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("benchmarks.pretend")
    module.run = lambda settings: Outcome(  # type: ignore[attr-defined]
        (Figure("speed", 2.0, 6.0), Figure("hole", math.nan)), {"seed": settings.seed}
    )
    monkeypatch.setitem(sys.modules, "benchmarks.pretend", module)
    monkeypatch.setitem(BENCHES._entries, "pretend", "benchmarks.pretend")
    monkeypatch.setitem(BENCHES._about, "pretend", "for this test")
    return "pretend"


def test_a_result_holds_figures_verdicts_and_machine_and_is_written_as_json(bench: str, tmp_path: Path) -> None:
    found = run_bench(bench, Settings(seed=3))
    assert found["details"] == {"seed": 3}
    assert [f["verdict"] for f in found["figures"]] == ["missed", "not judged"]
    assert missed([found]) == 1
    assert missed([run_bench(bench, Settings(quick=True))]) == 0
    path = save_result(found, tmp_path / "new" / "folder")
    assert path.name == "pretend.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept == found
    assert kept["figures"][1]["value"] is None
    assert kept["environment"]["packages"]["torch"]


def test_an_unknown_benchmark_is_refused_with_near_misses() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'scorer'"):
        run_bench("scorers", Settings())


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FREEMOE_CACHE", str(tmp_path / "own"))
    assert harness.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("FREEMOE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Settings().cache == tmp_path / "freemoe"
