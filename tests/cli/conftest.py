"""The command line inside the test's own process: quick, and yet through its real entry point."""

import json
import re
import sys
from typing import NamedTuple

import pytest

from freemoe.cli import main
from freemoe.cli.failures import FAULT
from freemoe.cli.schemas import DOCUMENTS
from tests.serve.conftest import folders, no_key  # noqa: F401  (fixtures)


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    def ok(self):
        """The same, found to have ended well."""
        assert self.code == 0, self.err
        return self

    def refused(self, *parts):
        """The same, found to have been refused in one line that has these parts."""
        assert self.code == 2, self
        assert self.out == ""
        assert len([line for line in self.err.splitlines() if line.startswith("error: ")]) == 1, self.err
        assert "Traceback" not in self.err
        for part in parts:
            assert part in self.err
        return self

    @property
    def json(self):
        """What it printed as JSON, having ended well."""
        return json.loads(self.ok().out)


def document(done, command):
    """The one JSON document on standard output, found to be what `freemoe schema` says of the command's."""
    assert (done.code == 0) == (command != "error"), done.err
    found = json.loads(done.out)
    assert found["schema"] == f"freemoe.{command}/1", done.err
    DOCUMENTS[command].model_validate(found)
    assert next(iter(found)) == "schema"
    assert all(re.fullmatch("[a-z][a-z0-9_]*", key) for key in found)
    return found


def numbers_are_numbers(value):
    """Whether no text of plain data is a number, with or without a unit."""
    if isinstance(value, dict):
        return all(re.fullmatch(r"[a-z][\w-]*", key) and numbers_are_numbers(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(numbers_are_numbers, value))
    return not (isinstance(value, str) and re.fullmatch(r"[\d.,]+ ?(%|s|ms|MiB|tokens)?", value))


def started(capsys, monkeypatch, cache, start=main):
    """Run a command line, ``freemoe`` where no other is given, and say how it ended; a fault of freemoe itself fails the test."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    monkeypatch.setenv("FREEMOE_CACHE", str(cache))

    def run(*arguments, faults=False):
        monkeypatch.setattr(sys, "argv", ["freemoe", *arguments])
        capsys.readouterr()
        code = 0
        try:
            start()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        done = Done(code, *capsys.readouterr())
        assert faults or done.code != FAULT, "".join(path.read_text() for path in cache.glob("fault-*.txt"))
        return done

    yield run
    logging.set_verbosity(verbosity)


@pytest.fixture
def freemoe(capsys, monkeypatch, tmp_path_factory):
    """Run ``freemoe ARGUMENTS`` and say how it ended; ``faults=True`` where a fault is what is tested."""
    yield from started(capsys, monkeypatch, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, but for forty easy questions."""
    monkeypatch.chdir(tmp_path)
    lines = [
        json.dumps({"question": f"{a} + {b} =", "choices": [str(a + b), str(a + b + 1)], "answer": 0})
        for a in range(1, 6)
        for b in range(8)
    ]
    (tmp_path / "law.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path
