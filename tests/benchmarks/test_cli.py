"""`python -m benchmarks`: what is run, what is printed and kept, and the exit code."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.cli import names_of
from benchmarks.harness import BENCHES

MET = ["speed: 7.00x (target >= 6x) met", "beside: 7.00x"]
MISSED = ["speed: 5.00x (target >= 6x) missed", "beside: 5.00x"]


def test_all_means_every_benchmark_and_names_keep_the_order_of_the_table():
    assert names_of(["all"], "a model") == [n for n in BENCHES if n != "large"]
    assert names_of(["all"]) == [n for n in BENCHES if n not in ("real", "papers", "large")]
    assert names_of(["large"]) == ["large"]
    assert names_of(["router", "real", "scorer", "router"]) == ["scorer", "router", "real"]
    assert names_of(["real-llm"]) == names_of(["real"]) == ["real"]
    assert names_of(["real-llm"], "a model", papers=True) == names_of(["papers"]) == ["papers"]


def test_a_met_figure_exits_with_0_and_a_missed_one_with_1(seen, bench, folder):
    done = bench("pretend", "-q")
    assert (done.code, done.out.splitlines()) == (0, MET)
    done = bench("pretend", "fails", "-q", "-o", "kept")
    assert (done.code, done.out.splitlines()) == (1, MET + MISSED)
    assert {p.name for p in Path("kept").iterdir()} == {"pretend.json", "fails.json"}
    assert bench("fails", "-q", "--quick").code == 0


def test_flags_reach_the_benchmark(seen, bench, folder):
    (folder / "data").mkdir()
    done = bench("pretend", "--quick", "--repeats", "3", "--seed", "4", "--data-root", "data", "--json")
    assert json.loads(done.out)["results"][0]["figures"][0]["verdict"] == "not judged"
    (settings,) = seen
    assert (settings.quick, settings.repeats, settings.seed, settings.rounds) == (True, 3, 4, 1)
    assert settings.data_root == Path("data")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("pretend scorers", "Did you mean 'scorer'"),
        ("pretend fuzz", "python -m pytest tests/hardening/fuzz -m hardening"),
        ("pretend --data-root nowhere", "--data-root"),
        ("switch --device banana", "Device 'banana'"),
        ("switch --device cuda:9", "not on this machine"),
        ("switch --device mps", "Device 'mps'"),
        ("pretend --device cuda", "pretend run on a CPU only"),
        ("pretend --on ray", "--on and --workers are for real and papers and rivals"),
        ("rivals --on slurm", "Allowed: local, local:N"),
        ("rivals --quick --list --only */lorra* --cells kept", "names no cell"),
        ("--repeat 3 scorer", "Did you mean '--repeats'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(seen, bench, folder, asked, expected):
    done = bench(*asked.split())
    assert done.code == 2
    assert expected in done.err
    assert not seen


def test_a_dry_run_runs_nothing_and_help_names_every_benchmark(seen, bench):
    done = bench("all", "--dry-run", "--json")
    assert list(json.loads(done.out)["benchmarks"]) == names_of(["all"])
    assert not seen
    told = bench("--help").out
    assert all(re.search(rf"\b{name}\b", told) for name in BENCHES if name not in ("pretend", "fails", "hole"))


def test_the_cells_of_rivals_are_listed_with_their_time(bench, folder):
    rows = json.loads(bench("rivals", "--quick", "--list", "--cells", "kept", "--json").out)
    assert "adaptation/freemoe-demo/demo-text/lora-r1-lr0.01/s0" in [row["name"] for row in rows["cells"]]
    assert rows["missing_seconds"] == sum(row["seconds"] for row in rows["cells"])


def test_the_package_says_where_the_tables_are(freemoe):
    done = freemoe("reproduce", "all")
    assert done.code == 2
    assert "python -m reproduce" in done.err
