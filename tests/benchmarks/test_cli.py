"""`python -m benchmarks`: what is run, what is printed and kept, and the exit code."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest

from benchmarks.cli import names_of
from benchmarks.harness import BENCHES, Figure, Outcome, Settings
from tests.cli.conftest import Freemoe


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """A benchmark ``pretend`` whose figure is met, and one ``fails`` whose figure is not; their settings."""
    settings: list[Settings] = []
    for name, value in (("pretend", 7.0), ("fails", 5.0)):
        module = types.ModuleType(f"benchmarks.{name}")

        def run(given: Settings, value: float = value) -> Outcome:
            settings.append(given)
            return Outcome((Figure("speed", value, 6.0),))

        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(BENCHES._entries, name, module.__name__)
        monkeypatch.setitem(BENCHES._about, name, "for this test")
    return settings


def test_all_means_every_benchmark_and_names_keep_the_order_of_the_table() -> None:
    assert names_of(["all"], "a model") == [n for n in BENCHES if n != "large"]
    assert names_of(["all"]) == [n for n in BENCHES if n not in ("real", "large")]
    assert names_of(["large"]) == ["large"]
    assert names_of(["real"]) == ["real"]
    assert names_of(["router", "scorer", "router"]) == ["scorer", "router"]


def test_a_met_figure_exits_with_0_and_a_missed_one_with_1(seen: list[Settings], bench: Freemoe, folder: Path) -> None:
    done = bench("pretend", "-q")
    assert (done.code, done.out.strip()) == (0, "speed: 7.00x (target >= 6x) met")
    done = bench("pretend", "fails", "-q", "-o", "kept")
    assert done.code == 1
    assert done.out.splitlines() == ["speed: 7.00x (target >= 6x) met", "speed: 5.00x (target >= 6x) missed"]
    assert {p.name for p in Path("kept").iterdir()} == {"pretend.json", "fails.json"}
    assert bench("fails", "-q", "--quick").code == 0


def test_flags_reach_the_benchmark(seen: list[Settings], bench: Freemoe, folder: Path) -> None:
    (folder / "data").mkdir()
    done = bench("pretend", "--quick", "--repeats", "3", "--seed", "4", "--data-root", "data", "--json")
    assert json.loads(done.out)["results"][0]["figures"][0]["verdict"] == "not judged"
    (settings,) = seen
    assert (settings.quick, settings.repeats, settings.seed, settings.rounds) == (True, 3, 4, 1)
    assert settings.data_root == Path("data")


def test_what_cannot_be_run_is_refused_before_anything_runs(seen: list[Settings], bench: Freemoe) -> None:
    done = bench("pretend", "scorers")
    assert done.code == 2
    assert "Did you mean 'scorer'" in done.err
    done = bench("pretend", "fuzz")
    assert done.code == 2
    assert "python -m pytest tests/hardening/fuzz -m hardening" in done.err
    done = bench("pretend", "--data-root", "nowhere")
    assert done.code == 2
    assert "--data-root" in done.err
    for device, expected in (("banana", "Device 'banana'"), ("cuda:9", "not on this machine"), ("mps", "Device 'mps'")):
        done = bench("switch", "--device", device)
        assert done.code == 2
        assert expected in done.err
    done = bench("pretend", "--device", "cuda")
    assert done.code == 2
    assert "pretend run on a CPU only" in done.err
    done = bench("pretend", "--on", "ray")
    assert done.code == 2
    assert "--on and --workers are for real and rivals" in done.err
    done = bench("rivals", "--on", "slurm")
    assert done.code == 2
    assert "Allowed: local, local:N" in done.err
    assert not seen


def test_a_dry_run_runs_nothing(seen: list[Settings], bench: Freemoe) -> None:
    done = bench("all", "--dry-run", "--json")
    assert list(json.loads(done.out)["benchmarks"]) == names_of(["all"])
    assert not seen


def test_the_cells_of_rivals_are_listed_with_their_time(bench: Freemoe, folder: Path) -> None:
    rows = json.loads(bench("rivals", "--quick", "--list", "--cells", "kept", "--json").out)
    names = [row["name"] for row in rows["cells"]]
    assert "adaptation/freemoe-demo/demo-text/lora-r1-lr0.01/s0" in names
    assert rows["missing_seconds"] == sum(row["seconds"] for row in rows["cells"])
    done = bench("rivals", "--quick", "--list", "--only", "*/lorra*", "--cells", "kept")
    assert done.code == 2
    assert "names no cell" in done.err


def test_help_names_every_benchmark(bench: Freemoe) -> None:
    told = bench("--help").out
    assert all(re.search(rf"\b{name}\b", told) for name in BENCHES)


def test_the_package_says_where_the_tables_are(freemoe: Freemoe) -> None:
    done = freemoe("reproduce", "all")
    assert done.code == 2
    assert "python -m reproduce" in done.err


def test_near_misses_are_named(bench: Freemoe) -> None:
    assert "Did you mean '--repeats'" in bench("--repeat", "3", "scorer").err
