"""The ledger of test documents counts openings, and never stands in a run's way."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from freemoe.core.ledger import OFF, VARIABLE, count_openings, keep_none, ledger_folder, openings_text


@pytest.fixture(autouse=True)
def ledger(tmp_path, monkeypatch):
    folder = tmp_path / "ledger"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def test_what_is_counted(ledger):
    first, second = ["What is 2 + 2?", "a"], ["b", "what is  2 + 2?"]
    assert count_openings(first, {"seed": 0}) == 1
    assert count_openings(first, {"seed": 0}) == 1  # the same run again
    assert count_openings(reversed(first), {"seed": 1}) == 2
    assert count_openings(second, {"seed": 1}) == 3  # one document is the same
    assert count_openings(["another"], {"seed": 1}) == 1
    assert count_openings([], {"seed": 1}) is None
    kept = "".join(path.read_text() for path in ledger.iterdir())
    assert "what" not in kept.lower()
    assert len(list(ledger.iterdir())) == 4


def test_openings_side_by_side_are_all_counted():
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: count_openings(["a", "b"], seed), range(40)))
    assert count_openings(["b"], "last") == 41


def test_damage_is_passed_over(ledger):
    count_openings(["a"], 0)
    (ledger / "cut").write_bytes(b"\xff\x00")
    (ledger / "folder").mkdir()
    assert count_openings(["a"], 1) == 2


def test_a_ledger_that_cannot_be_kept_stops_nothing(ledger, monkeypatch):
    ledger.write_text("a file where the folder should be")
    assert count_openings(["a"], 0) is None
    monkeypatch.setenv(VARIABLE, OFF)
    assert count_openings(["a"], 0) is None
    assert ledger_folder() is None


def test_where_it_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ledger_folder() == tmp_path / "freemoe" / "ledger"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ledger_folder() == tmp_path / ".local/state/freemoe/ledger"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "named"))
    keep_none()
    assert ledger_folder() == tmp_path / "named"


@pytest.mark.parametrize(
    ("count", "words"),
    [(2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (21, "21st"), (112, "112th")],
)
def test_the_line(count, words):
    assert f"opened for the {words} time" in openings_text(count)[0]
    assert openings_text(1) == openings_text(None) == []
