"""Data sets of a hub: asked for once, from the cache when it is out of reach."""

import json

import pytest

from freemoe.core.errors import DataError, HubError
from freemoe.evals.tasks.benchmarks import BENCHMARKS
from freemoe.evals.tasks.harness.rows import hub_rows
from freemoe.text.hub_data import load_hub_data
from freemoe.text.mixes import ALPACA, _read_mix_source

ROWS = [{"text": f"row {n}"} for n in range(5)]


def test_rows_come_from_the_hub_and_then_from_the_cache(hub, cut):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    hub.add("datasets/maker/notes", {"README.md": b"# Notes\n", "train.jsonl": lines})
    assert list(load_hub_data("maker/notes", None, "train")) == ROWS
    cut()
    asked = len(hub.asked)
    assert list(load_hub_data("maker/notes", None, "train")) == ROWS
    assert len(hub.asked) == asked


def test_a_split_that_there_is_not(hub):
    hub.add("datasets/maker/notes", {"README.md": b"# Notes\n", "train.jsonl": b'{"text": "x"}\n'})
    with pytest.raises(DataError, match=r"'maker/notes' could not be read \(ValueError: .*split 'dev'"):
        load_hub_data("maker/notes", None, "dev")
    with pytest.raises(DataError, match=r"'maker/notes' could not be read .*configuration 'french'"):
        load_hub_data("maker/notes", "french", "train")


def test_a_missing_data_set_is_one_message(hub):
    with pytest.raises(HubError, match=r"data set 'maker/none' cannot be read .*private and no token was sent"):
        load_hub_data("maker/none", None, "train")
    for path in {path for _, path in hub.asked}:
        assert sum(path == other for _, other in hub.asked) <= 2


def test_out_of_reach_nobody_is_asked(gone):
    row = BENCHMARKS.get("mmlu")
    for work, message in (
        (lambda: load_hub_data("maker/none", None, "train"), "data set 'maker/none': it is not in the cache"),
        (lambda: _read_mix_source(ALPACA, None), "tatsu-lab/alpaca.*--data-root FOLDER"),
        (
            lambda: hub_rows(row, {"dataset_path": "maker/mmlu"}, ["test"]),
            "could not be read from the hub.*--data-root",
        ),
    ):
        with pytest.raises(HubError, match=message) as caught:
            work()
        assert gone in str(caught.value)


def test_without_the_package(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'freemoe\[eval\]'"):
        load_hub_data("maker/notes", None, "train")
