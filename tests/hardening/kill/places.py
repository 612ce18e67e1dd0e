"""Where a run is killed: its own writes, each kind of them at each stage, and the rest of the places evenly over the run."""

import re


def kind(event):
    """Stage and kind of a write: ``half journal score``, ``begins state purify``."""
    stage, what = event
    return f"{stage} {re.sub(r'[0-9]+', 'N', what.partition('|')[0])}"


def places(events, count):
    """Numbers of so many of an unbroken run's writes, ascending.

    The first of every stage and kind; the others evenly over what is left, so most in the longest unit.
    """
    first = {}
    for number, event in enumerate(events):
        first.setdefault(kind(event), number)
    chosen = set(_spread(sorted(first.values()), count))
    rest = [n for n in range(len(events)) if n not in chosen]
    return sorted(chosen | set(_spread(rest, count - len(chosen))))


def _spread(numbers, count):
    """So many of some numbers, evenly spread; all where there are no more."""
    if count >= len(numbers):
        return list(numbers)
    return [numbers[(2 * i + 1) * len(numbers) // (2 * count)] for i in range(max(0, count))]
