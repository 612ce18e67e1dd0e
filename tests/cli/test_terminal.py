"""Where output goes and how: width, colours, bars or lines, what is silenced."""

import io
import re
import sys

import pytest
from rich.table import Table

from freemoe.cli import common
from freemoe.cli.common import PIPED, CommandOutput, make_console, progress_of
from freemoe.core.run import progress
from freemoe.core.run.progress import BarProgress, LineProgress, QuietProgress, StageTimer, default_progress

XTERM = {"TERM": "xterm-256color"}


@pytest.mark.parametrize(
    ("terminal", "environ", "width"),
    [
        (False, {}, PIPED),
        (False, {"COLUMNS": "60"}, 60),
        (False, {"COLUMNS": "200"}, 200),
        (False, {"COLUMNS": "0"}, PIPED),
        (False, {"COLUMNS": "wide"}, PIPED),
        (True, {**XTERM, "COLUMNS": "60"}, 60),
        (True, {"TERM": "dumb", "COLUMNS": "60"}, 60),
        (True, {"TERM": "dumb"}, PIPED),
        (True, {"TERM": "dumb", "FORCE_COLOR": "1", "COLUMNS": "60"}, 60),
        (False, {"COLUMNS": "60", "FORCE_COLOR": "1", **XTERM}, 60),
    ],
)
def test_columns_are_heeded_wherever_output_goes(terminal, environ, width):
    assert make_console(False, terminal, environ).width == width


@pytest.mark.parametrize(
    ("terminal", "environ", "coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "0"}, False),
        (False, {"CLICOLOR_FORCE": "1"}, True),
        (True, {"CLICOLOR": "0"}, False),
        (True, {"CLICOLOR": "0", "CLICOLOR_FORCE": "1"}, True),
        (False, {"CLICOLOR": "1"}, False),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "dumb", "FORCE_COLOR": "1"}, False),
    ],
)
def test_colours(terminal, environ, coloured):
    console = make_console(False, terminal, {**XTERM, **environ})
    console.file = io.StringIO()
    console.print("word", style="bold red")
    assert ("\x1b[" in console.file.getvalue()) is coloured
    assert "word" in console.file.getvalue()


class Stream(io.StringIO):
    """A stream that is a terminal, or is not."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize(
    ("terminal", "term", "quiet", "expected"),
    [
        (True, "xterm", False, BarProgress),
        (True, "dumb", False, LineProgress),
        (False, "xterm", False, LineProgress),
        (True, "xterm", True, QuietProgress),
        (False, "xterm", True, QuietProgress),
    ],
)
def test_bars_lines_or_nothing(terminal, term, quiet, expected, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Stream(terminal))
    monkeypatch.setenv("TERM", term)
    # Colours in a log are no reason for bars that move.
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(progress_of(quiet), expected)
    # JSON on standard output takes nothing from standard error.
    assert isinstance(CommandOutput(as_json=True, quiet=quiet).make_progress(), expected)


def test_a_bar_says_the_time_left_of_steps_that_are_longer_than_half_a_minute(monkeypatch):
    now = 0.0
    console, shown = make_console(False, True, {**XTERM, "COLUMNS": "100"}), io.StringIO()
    console.file = shown
    monkeypatch.setattr(progress, "StageTimer", lambda total: StageTimer(total, lambda: now))
    with BarProgress(console).stage("cells", 4) as advance:
        now = 600
        advance(1)
        now = 1200
        advance(1)
    assert "2/4" in shown.getvalue()
    assert "left 0:20:00" in shown.getvalue()


def test_words_of_a_table_are_broken_and_never_cut(monkeypatch):
    name = "a_name_that_is_longer_than_the_line"
    console = make_console(False, False, {"COLUMNS": "20"})
    console.file = io.StringIO()
    monkeypatch.setattr(common, "out", console)
    table = Table("domain", "expert", box=None)
    table.add_row(name, "other")
    common.print_table(table)
    shown = console.file.getvalue()
    assert "…" not in shown
    assert name in "".join(line[:13].strip() for line in shown.splitlines()[1:])
    assert all(len(line) <= 20 for line in shown.splitlines())


def test_progress_of_a_run_is_lines_on_standard_error(freemoe, folder):
    arguments = ["eval", "freemoe-demo", "-d", "law=law.jsonl"]
    for more in ([], ["--json"], ["--summary"]):
        done = freemoe(*arguments, *more).ok()
        lines = [line for line in done.err.splitlines() if line.startswith("progress: ")]
        assert lines[-1].startswith("progress: law 1/1 (100 %) elapsed ")
        assert "progress" not in done.out
        assert re.fullmatch(r"[^\x00-\x09\x0b-\x1f\x7f]*", done.err)
    assert "progress" not in freemoe(*arguments, "-q").err


@pytest.mark.parametrize(
    ("terminal", "term", "kind"),
    [(True, "xterm", BarProgress), (True, "dumb", QuietProgress), (False, "xterm", QuietProgress)],
)
def test_python_draws_bars_on_a_terminal_alone(terminal, term, kind, monkeypatch):
    shown = io.StringIO()
    shown.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", shown)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    found = default_progress()
    assert type(found) is kind
    with found.stage("cells", 2) as advance:
        advance(2)
    assert ("2/2" in shown.getvalue()) == (kind is BarProgress)
