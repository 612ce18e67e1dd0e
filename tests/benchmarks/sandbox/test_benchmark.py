"""The attack on the sandbox: that it sees what happens, and its quick run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.harness import Settings
from benchmarks.sandbox import benchmark, worker
from benchmarks.sandbox.benchmark import FAILING, PROGRAMS, QUICK, Found, attack
from benchmarks.sandbox.programs.right import RIGHT, WITH_PROCESSES
from benchmarks.sandbox.witness import Witness
from tests.sandbox import needs_bubblewrap


class Open(worker.Parent):
    """A parent without a sandbox."""

    def run(self, program: str, isolation: str, timeout: float, memory: int) -> dict[str, Any] | None:
        done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
        return {"passed": done.returncode == 0, "detail": done.stderr, "status": ""}


@pytest.fixture
def witness() -> Iterator[Witness]:
    """A scene that is taken away afterwards."""
    made = Witness()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kind", "name", "seen"),
    [
        ("files", "dir_fd", "freemoe-mark"),
        ("files", "mkfifo", "freemoe-mark"),
        ("files", "chmod", "precious 100777"),
        ("files", "read a secret", "told the secret"),
        ("network", "TCP", "somebody came to socket 0"),
        ("network", "datagrams of a pair to a path", "somebody came to socket 3"),
        ("network", "datagrams of a pair to a name", "somebody came to socket 5"),
    ],
)
def test_an_effect_is_seen_where_nothing_keeps_it_off(
    witness: Witness, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, seen: str
) -> None:
    found = Found()
    witness.parent  # noqa: B018
    monkeypatch.setattr(worker.Parent, "run", Open.run)
    attack(witness, "bubblewrap", kind, name, found)
    assert seen in found.effects[0]
    attack(witness, "bubblewrap", kind, name, found)
    assert len(found.effects) == 2, "the scene was not mended"


def test_harm_and_false_passes_are_seen(witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found()
    witness.parent  # noqa: B018
    monkeypatch.setattr(worker.Parent, "run", Open.run)
    attack(witness, "bubblewrap", "processes", "take turns away", found)
    attack(witness, "bubblewrap", "verdicts", "os._exit", found)
    assert found.harmed[0].startswith("take turns away (bubblewrap): victim")
    assert found.false_passes == ["os._exit (bubblewrap)"]


def test_programs_and_combinations() -> None:
    names = [name for of_kind in PROGRAMS.values() for name in of_kind]
    assert len(names) >= 60
    assert set(QUICK) <= set(names)
    assert len({**RIGHT, **WITH_PROCESSES}) >= 15
    for program in (p for of_kind in PROGRAMS.values() for p in of_kind.values()):
        compile(program + FAILING, "program.py", "exec")


@needs_bubblewrap
def test_a_quick_run() -> None:
    outcome = benchmark.run(Settings(quick=True))
    figures = {f.name: f for f in outcome.figures}
    for name in ("effects outside", "false passes", "parent or other processes harmed", "right programs failed"):
        assert figures[name].value == 0, figures[name].note
    assert figures["programs with an effect or harm where nothing isolates them"].value > 0
    json.dumps(outcome.details)
