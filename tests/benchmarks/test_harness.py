"""Figures, verdicts, fair timing, and what is written down."""

import json
import math

import pytest

from benchmarks import harness
from benchmarks.compat import answers_of
from benchmarks.harness import Figure, Settings, in_turns, missed, ratio, run_bench, save_result
from freemoe.core.errors import UnknownNameError, VersionError


@pytest.mark.parametrize(
    ("figure", "verdict", "line"),
    [
        (Figure("speed", 6.0, 6.0), "met", "speed: 6.00x (target >= 6x) met"),
        (Figure("speed", 5.99, 6.0), "missed", "speed: 5.99x (target >= 6x) missed"),
        (Figure("size", 0.1, 0.1, "lower", ""), "met", "size: 0.10 (target <= 0.1) met"),
        (Figure("size", 0.2, 0.1, "lower", " %", 3, "7B"), "missed", "size: 0.200 % (target <= 0.1 %) missed; 7B"),
        (Figure("gone", math.nan, 0.1, "lower"), "missed", "gone: not measured (target <= 0.1x) missed"),
        (Figure("beside", 2.0, unit=" s"), "not judged", "beside: 2.00 s"),
    ],
)
def test_a_figure_is_met_at_its_target_and_missed_beyond(figure, verdict, line):
    assert figure.verdict(False) == verdict
    assert figure.verdict(True) == "not judged"
    assert figure.line() == line


def test_sides_take_turns_and_each_comes_first_as_often():
    calls = []
    seconds = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 4)
    assert calls == ["b", "a"] + ["a", "b", "b", "a"] * 2
    assert {name: len(s) for name, s in seconds.items()} == {"a": 4, "b": 4}
    # The machine got three times slower in the second round: the ratio does not care.
    assert ratio({"slow": [2.0, 6.0, 2.2], "fast": [1.0, 3.0, 1.0]}, "slow", "fast") == 2.0


def test_a_result_holds_figures_verdicts_and_machine_and_is_written_as_json(seen, tmp_path):
    found = run_bench("hole", Settings(seed=3))
    assert found["details"] == {"seed": 3}
    assert [f["verdict"] for f in found["figures"]] == ["missed", "not judged"]
    assert missed([found]) == 1
    assert missed([run_bench("hole", Settings(quick=True))]) == 0
    path = save_result(found, tmp_path / "new" / "folder")
    assert path.name == "hole.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept == found
    assert kept["figures"][1]["value"] is None
    assert kept["environment"]["packages"]["torch"]


def test_an_unknown_benchmark_and_a_scorer_without_its_private_name_are_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'scorer'"):
        run_bench("scorers", Settings())
    with pytest.raises(VersionError, match=r"has no object\._loglikelihood_tokens"):
        answers_of(object(), [])


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FREEMOE_CACHE", str(tmp_path / "own"))
    assert harness.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("FREEMOE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Settings().cache == tmp_path / "freemoe"
