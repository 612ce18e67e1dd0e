"""Kills: where they are, that they happen, that their ends are compared, and that a wrong end is seen."""

import itertools
import json
import signal
import time

import pytest

from freemoe.core.errors import FreeMoEError
from freemoe.core.files import CARD, MANIFEST
from tests.hardening import full
from tests.hardening.kill import dying
from tests.hardening.kill.compare import differences
from tests.hardening.kill.dying import NOTED, Runs
from tests.hardening.kill.places import kind, places
from tests.hardening.kill.running import PLACES, Tally, kill_system, outcome
from tests.hardening.kill.systems import OUTPUT, RECIPES, prepare

ABOUT = "SIGKILL at the writes of build, convert and trim; then the same bytes"


def events(scores=30, states=40):
    made = ["identity.json", "journal inputs", *["state purify|a"] * states, *["state purify|b"] * 3]
    made += ["unit purify|a", "journal purify|a", *[f"journal score|{n}" for n in range(scores)], "result.json"]
    return [(stage, what) for what in made for stage in ("begins", "half", "done")]


def test_places_are_of_every_kind_and_evenly_spread():
    found = events()
    chosen = places(found, 60)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 60
    assert {kind(found[n]) for n in chosen} == {kind(event) for event in found}
    assert sum(found[n][1] == "state purify|a" for n in chosen) >= 10
    # The rest is everywhere: no stretch of a tenth of the run is spared.
    assert max(b - a for a, b in itertools.pairwise(chosen)) < len(found) / 10
    assert places(found, 10**6) == list(range(len(found)))
    assert len(places(found, 3)) == 3
    assert places([], 5) == []


def finished(folder, number, **result):
    """An artefact whose times and checksums are a number."""
    folder.mkdir(exist_ok=True)
    (folder / "experts.safetensors").write_bytes(b"abc")
    timed = {"created": number, "cost": {"wall": number}, "router": {"p50_ms": number}}
    (folder / "result.json").write_text(json.dumps({"kind": "experts", **timed, **result}))
    (folder / CARD).write_text(f"# Experts\n- first token after {number} ms\n")
    files = {"result.json": number, "experts.safetensors": 2}
    (folder / MANIFEST).write_text(json.dumps({"kind": "x", "files": files, "checksum": number}))
    return folder


def test_times_are_not_compared_and_all_else_is(tmp_path):
    one, other = finished(tmp_path / "one", 48.9), finished(tmp_path / "other", 50.1, cost={})
    assert differences(one, other) == []
    (other / "experts.safetensors").write_bytes(b"abd")
    assert differences(one, other) == ["experts.safetensors has other contents (bytes)"]
    finished(other, 50.1, router={"rows": [1]})
    (other / "experts.safetensors").write_bytes(b"abd")
    (other / "left.tmp").write_bytes(b"")
    assert [line.split()[0] for line in differences(one, other)] == ["left.tmp", "experts.safetensors", "result.json"]
    assert "/router/rows" in differences(one, other)[2]


def test_a_wrong_end_is_a_missed_figure():
    tallies = {name: Tally(writes=9, wrong={"3 half x": "result.json has other contents"}) for name in RECIPES}
    for tally in tallies.values():
        tally.kills.update({"half x": 2, "done x": 2})
    lines = [figure.line() for figure in outcome(tallies, PLACES).figures]
    assert "kill points, build: 4 (target >= 60) missed; 9 writes, 2 kinds" in lines
    # Four systems, one bad end in four each.
    assert "identical bytes: 75.0 % (target >= 100 %) missed" in lines


@pytest.fixture(scope="module")
def runs():
    opened = Runs()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def tallies():
    """Those of full runs, of all systems that were asked for."""
    found = {}
    began = time.perf_counter()
    yield found
    if found:
        full.keep("kill", ABOUT, outcome(found, round(PLACES * full.SHARE)), began)


@pytest.mark.hardening
@pytest.mark.parametrize("name", RECIPES)
def test_runs_that_are_killed_go_on_to_the_same_bytes(runs, tallies, tmp_path, name):
    tallies[name] = tally = kill_system(runs, name, tmp_path, round(PLACES * full.SHARE))
    assert tally.wrong == {}
    assert tally.kills.total() == round(PLACES * full.SHARE)


def test_a_run_that_dies_inside_a_unit_goes_on_to_the_same_bytes(runs, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    prepare(whole)
    assert runs.run("trim", whole, noted=True) == 0
    found = [tuple(event) for event in json.loads((whole / NOTED).read_text())]
    assert len(found) > 200
    assert {"half state hooks", "done state ridge", "half journal drop"} <= {kind(event) for event in found}
    prepare(folder)
    # In the middle of the hooks' training, a state half written; then in the middle of the last file.
    inside = [n for n, event in enumerate(found) if kind(event) == "half state hooks"]
    assert runs.run("trim", folder, dies_at=inside[len(inside) // 2]) == -signal.SIGKILL
    assert list((folder / f"{OUTPUT}.partial" / "states").glob("*.tmp"))
    assert not (folder / OUTPUT).exists()
    assert runs.run("trim", folder, noted=True) == 0
    assert differences(whole / OUTPUT, folder / OUTPUT) == []
    # It did not begin anew.
    again = [tuple(event) for event in json.loads((folder / NOTED).read_text())]
    assert sum(kind(event) == "done journal drop" for event in again) == 0
    assert sum(kind(e) == "done state hooks" for e in again) < sum(kind(e) == "done state hooks" for e in found)


def test_a_run_that_fails_says_why(runs, tmp_path):
    prepare(tmp_path / "run")
    (tmp_path / "run" / OUTPUT).mkdir()
    (tmp_path / "run" / OUTPUT / "mine").write_text("x")
    with pytest.raises(FreeMoEError, match=r"(?s)The run of 'trim' .* failed with code 1: .*exists already"):
        runs.run("trim", tmp_path / "run")


def test_an_ordinary_process_has_no_such_hook():
    assert dying.files.WATCHERS == []
