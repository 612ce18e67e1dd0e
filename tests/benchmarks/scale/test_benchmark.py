"""`python -m benchmarks scale --quick` without Ray, which `tests/distributed` has: every figure is there, and the bytes are equal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import Settings, run_bench
from benchmarks.scale import benchmark, kill


@pytest.mark.hardening
def test_the_quick_run(monkeypatch):
    monkeypatch.setattr(benchmark, "has_ray", lambda: False)
    result = run_bench("scale", Settings(quick=True))
    values = {f["name"]: f["value"] for f in result["figures"]}
    assert values["files equal to those of one process: two processes"] == 1.0
    assert values["speed-up of two workers: processes"] > 0
    assert 0 < values["overhead per unit: processes"] < 1000
    simulated = result["details"]["simulation"]
    assert all(passes > 0 for passes in simulated["measured"]["passes"].values())
    assert [row["devices"] for row in simulated["rows_by_subdomains"]["8"]] == list(benchmark.DEVICES)
    assert {f["verdict"] for f in result["figures"]} == {"not judged"}
    assert "pip install" in result["details"]["ray"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are told from /proc")
def test_who_kills_looks_at_its_own_descendants_alone():
    parents = {os.getpid(): 1, 70001: os.getpid(), 70002: 70001, 70003: 1}
    assert [kill.descends(pid, parents) for pid in (70002, 70003)] == [True, False]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert kill.working_actors() == []
        other.communicate(b"\n")
