"""Progress in a log: a line every ten seconds by the clock, one line at the end, nothing that a terminal would obey."""

import contextlib
import queue
import re

import pytest

from freemoe.core.run.progress import EVERY, LineProgress, StageTimer

LINE = re.compile(r"progress: (.+) (\d+)/(\d+) \((\d+) %\) elapsed (\d+:\d\d:\d\d) left (\d+:\d\d:\d\d|unknown)")


class Clock:
    """Time that passes when it is told to: it stands for the clock, and for the event that lines wait for."""

    def __init__(self):
        self.now = 100.0
        self.asked = queue.Queue()
        self.answers = queue.Queue()

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.asked.put(seconds)
        return self.answers.get(timeout=30)

    def set(self):
        self.answers.put(True)

    def passes(self):
        """Ten seconds pass, and what is to be said then is said."""
        self.now += EVERY
        self.answers.put(False)
        assert self.asked.get(timeout=30) == EVERY


def shown(clock):
    lines = []
    event = lambda: clock  # noqa: E731
    return LineProgress(lines.append, clock, event), lines


def test_a_line_every_ten_seconds_and_one_at_the_end():
    clock = Clock()
    progress, lines = shown(clock)
    with progress.stage("search", 12) as advance:
        assert clock.asked.get(timeout=30) == EVERY == 10
        assert lines == []
        clock.passes()
        advance(1)
        advance(2)
        assert lines == ["progress: search 0/12 (0 %) elapsed 0:00:10 left unknown"]
        clock.passes()
        for _ in range(5):
            clock.passes()
        advance(9)
        clock.now += 1
    assert lines[1] == "progress: search 3/12 (25 %) elapsed 0:00:20 left 0:00:45"
    assert lines[6] == "progress: search 3/12 (25 %) elapsed 0:01:10 left 0:04:30"
    assert lines[7:] == ["progress: search 12/12 (100 %) elapsed 0:01:11 left 0:00:00"]
    assert all(LINE.fullmatch(line) for line in lines)


def test_a_stage_that_fails_ends_its_lines_and_none_holds_what_a_terminal_would_obey():
    progress, lines = shown(Clock())
    with contextlib.suppress(ValueError), progress.stage("a\x1b[2Jname\nof two\rlines", 0):
        raise ValueError
    (line,) = lines
    assert line.isprintable()
    assert line.endswith(" 0/0 (0 %) elapsed 0:00:00 left unknown")
    assert LINE.fullmatch(line)


def test_steps_that_a_resumed_run_finds_say_nothing_of_those_it_does():
    clock = Clock()
    pace = StageTimer(30, clock)
    for _ in range(20):
        clock.now += 0.5
        pace.add_steps(1)
    for done in range(1, 5):
        clock.now += 600
        pace.add_steps(1)
        clock.now += 100
        seconds = [60**k * int(n) for k, n in enumerate(reversed(pace.left.split(":")))]
        assert sum(seconds) == pytest.approx(700 * (10 - done), rel=0.2)


def test_a_step_counts_however_long_ago_it_ended():
    clock = Clock()
    pace = StageTimer(3, clock)
    clock.now += 60
    pace.add_steps(1)
    assert pace.left == "unknown"  # one sample says nothing of the next
    clock.now += 60
    pace.add_steps(1)
    pace.add_steps(0)
    clock.now += 3600
    assert pace.left == "1:01:00"
    pace.add_steps(1)
    assert pace.left == "0:00:00"
