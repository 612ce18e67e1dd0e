"""The attack on the sandbox: that it sees what happens, and its quick run."""

import json
import subprocess
import sys
import time

import pytest

from tests.hardening import full
from tests.hardening.sandbox import attacks
from tests.hardening.sandbox.attacks import FAILING, PROGRAMS, RIGHT, Found, attack
from tests.hardening.sandbox.witness import Parent, Witness
from tests.sandbox import needs_bubblewrap

ABOUT = "hostile programs inside the sandbox, and without it as a control (T20)"
FEW = (
    *("dir_fd", "sqlite3", "mkfifo", "another interpreter, without the hook", "read a secret", "kill", "TCP"),
    *("the token in frames", "words on every descriptor", "a flooded verdict", "every answer, each in a child"),
    *("datagrams of a pair to a path", "datagrams of a pair to a name"),
    *("asyncio", "files and folders", "a pool of processes", "equal to everything"),
)


def unprotected(parent, program, isolation, timeout, memory):
    """A parent without a sandbox."""
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    return {"passed": done.returncode == 0, "detail": done.stderr}


@pytest.fixture
def witness():
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
def test_an_effect_is_seen_where_nothing_keeps_it_off(witness, monkeypatch, kind, name, seen):
    found = Found()
    monkeypatch.setattr(Parent, "run", unprotected)
    attack(witness, "bubblewrap", kind, name, found)
    assert seen in found.effects[0]
    attack(witness, "bubblewrap", kind, name, found)
    assert len(found.effects) == 2, "the scene was not mended"


def test_harm_and_false_passes_are_seen(witness, monkeypatch):
    found = Found()
    monkeypatch.setattr(Parent, "run", unprotected)
    attack(witness, "bubblewrap", "processes", "take turns away", found)
    attack(witness, "bubblewrap", "verdicts", "os._exit", found)
    assert found.harmed[0].startswith("take turns away (bubblewrap): victim")
    assert found.false_passes == ["os._exit (bubblewrap)"]


def test_programs_are_many_and_can_be_compiled():
    names = [name for of_kind in PROGRAMS.values() for name in of_kind]
    assert len(names) >= attacks.LEAST
    assert set(FEW) <= {*names, *RIGHT, *attacks.EQUAL}
    assert len(RIGHT) >= 15
    for program in (p for of_kind in PROGRAMS.values() for p in of_kind.values()):
        compile(program + FAILING, "program.py", "exec")


@needs_bubblewrap
def test_some_programs():
    outcome = attacks.run(lambda name: name in FEW, rounds=2)
    figures = {f.name: f for f in outcome.figures}
    for name in ("effects outside", "false passes", "parent or other processes harmed", "right programs failed"):
        assert figures[name].value == 0, figures[name].note
    assert figures["programs with an effect or harm where nothing isolates them"].value > 0
    json.dumps(outcome.details)


@pytest.mark.hardening
@needs_bubblewrap
def test_every_program():
    began = time.perf_counter()
    assert not full.keep("sandbox", ABOUT, attacks.run(), began)
