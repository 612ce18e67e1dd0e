"""The one training loop: steps, looks between them, and states that a killed run goes on from.

What a step does and what a look judges is the caller's. Before each look the state is kept, and every few seconds between two
looks: a run that stops, whatever stopped it, goes on at the last state, and as a state holds everything that the next step
depends on, it ends with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from freemoe.core.run.folder import RunFolder
from freemoe.core.run.unit_state import UnitState
from freemoe.training.states import State


@dataclass(frozen=True)
class Store:
    """A run folder, as training keeps its states in it."""

    run: RunFolder

    def has(self, name: str) -> bool:
        """See `RunFolder.has`."""
        return self.run.has(name)

    def keep(self, name: str, work: Callable[[], State]) -> State:
        """See `RunFolder.tensors`."""
        return self.run.tensors(name, work)

    def drop(self, name: str) -> None:
        """See `RunFolder.drop`."""
        self.run.drop(name)

    def on_the_way(self, name: str) -> UnitState:
        """See `RunFolder.state`."""
        return self.run.state(name)


@dataclass(frozen=True)
class Kept:
    """How a training is kept.

    Attributes:
        store: Where; each state replaces the one before.
        name: Of the training: states are called ``name|steps``.
        state: Everything that the next step depends on.
        load: Go on from a state.
        between: Keep states between two looks too.
    """

    store: Store
    name: str
    state: Callable[[], State]
    load: Callable[[State], None]
    between: bool = True

    def last(self, steps: int, every: int) -> int:
        """Steps done at the last state that is kept; 0 where there is none."""
        return max((n for n in looks(steps, every) if self.store.has(f"{self.name}|{n}")), default=0)


def looks(steps: int, every: int) -> list[int]:
    """Steps done at each look: none, then every so many, then all."""
    return [*range(0, steps, every), steps]


def train(
    step: Callable[[int], None],
    look: Callable[[int], bool],
    steps: int,
    every: int,
    *,
    kept: Kept | None = None,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Train, in place.

    Args:
        step: Does the step of a number, counted from 0.
        look: Judges what was trained, told how many steps are done; says whether that is enough. A resumed run begins
            with the look that it stopped at.
        steps: At most.
        every: Steps between two looks; there is one before the first step and one after the last.
        kept: How states are kept; None: they are not.
        advance: Told how many steps more are done.

    Raises:
        NumericError: A loss is NaN or infinite, when steps check it (`descend`); the last state is kept.
    """
    advance = advance or (lambda number: None)
    done = kept.last(steps, every) if kept else 0
    advance(done)
    for end in looks(steps, every):
        if end < done:
            continue

        def work(numbers: range = range(done, end)) -> State:
            for number in _on_the_way(kept, numbers, advance):
                step(number)
                advance(1)
            return kept.state() if kept else {}

        if kept is None:
            work()
        else:
            kept.load(kept.store.keep(f"{kept.name}|{end}", work))
            if done < end:
                kept.store.drop(f"{kept.name}|{done}")
        if look(end):
            return
        done = end


def _on_the_way(kept: Kept | None, numbers: range, advance: Callable[[int], None]) -> Iterable[int]:
    """The steps up to a look, without those that a process which was stopped between two looks has done."""
    if kept is None or not kept.between:
        return numbers
    between = kept.store.on_the_way(f"{kept.name}|{numbers.stop}")
    return between.over(numbers, kept.state, kept.load, advance)
