"""The one training loop: steps, looks between them, and states that a killed run goes on from.

What a step does and what a look judges is the caller's. Before each look the state is kept, and every few seconds between two
looks: a run that stops, whatever stopped it, goes on at the last state, and as a state holds everything that the next step
depends on, it ends with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from freemoe.core.run.folder import RunFolder
from freemoe.training.states import State


@dataclass(frozen=True)
class TrainingCheckpoints:
    """How a training is kept."""

    run: RunFolder  # Where; each state replaces the one before
    name: str  # Of the training: states are called ``name|steps``
    state: Callable[[], State]  # Everything that the next step depends on
    load: Callable[[State], None]  # Go on from a state
    between: bool = True  # Keep states between two looks too

    def last_step(self, steps: int, every: int) -> int:
        """Steps done at the last state that is kept; 0 where there is none."""
        return max((n for n in eval_steps(steps, every) if self.run.has_tensors(f"{self.name}|{n}")), default=0)


def eval_steps(steps: int, every: int) -> list[int]:
    """Steps done at each look: none, then every so many, then all."""
    return [*range(0, steps, every), steps]


def run_training_loop(
    step: Callable[[int], None],  # Does the step of a number, counted from 0
    # Judges what was trained, told how many steps are done; says whether that is enough. A resumed run begins with
    # the look that it stopped at
    look: Callable[[int], bool],
    steps: int,  # At most
    every: int,  # Steps between two looks; there is one before the first step and one after the last
    *,
    checkpoints: TrainingCheckpoints | None = None,  # How states are kept; None: they are not
    advance: Callable[[int], None] | None = None,  # Told how many steps more are done
) -> None:
    """Train, in place.

    Raises:
        NumericError: A loss is NaN or infinite, when steps check it (`optimizer_step`); the last state is kept.
    """
    advance = advance or (lambda number: None)
    done = checkpoints.last_step(steps, every) if checkpoints else 0
    advance(done)
    for end in eval_steps(steps, every):
        if end < done:
            continue

        def train_to_eval(numbers: range = range(done, end)) -> State:
            for number in _remaining_steps(checkpoints, numbers, advance):
                step(number)
                advance(1)
            return checkpoints.state() if checkpoints else {}

        if checkpoints is None:
            train_to_eval()
        else:
            checkpoints.load(checkpoints.run.run_tensor_unit(f"{checkpoints.name}|{end}", train_to_eval))
            if done < end:
                checkpoints.run.delete_tensors(f"{checkpoints.name}|{done}")
        if look(end):
            return
        done = end


def _remaining_steps(
    checkpoints: TrainingCheckpoints | None, numbers: range, advance: Callable[[int], None]
) -> Iterable[int]:
    """The steps up to a look, without those that a process which was stopped between two looks has done."""
    if checkpoints is None or not checkpoints.between:
        return numbers
    between = checkpoints.run.unit_state(f"{checkpoints.name}|{numbers.stop}")
    return between.resume_iter(numbers, checkpoints.state, checkpoints.load, advance)
