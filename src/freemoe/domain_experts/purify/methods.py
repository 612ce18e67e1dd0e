"""The ways of signed purification, by name: `saliency.method` of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from freemoe.core.registry import Registry
from freemoe.domain_experts.purify.greedy import (
    PurifyResult,
    PurifyTask,
    from_state,
    greedy_purify,
    step_share,
    to_state,
)
from freemoe.domain_experts.purify.learned import MEASURED_STEPS, MOST_STEPS, ROUNDS, learn_switches, training_schedule
from freemoe.domain_experts.recipe import PURIFICATIONS, SaliencySection
from freemoe.models.precision import compute_dtype, held_in
from freemoe.models.weights import WeightMatrix

# A base of fewer weights is small: hundreds of passes over some hundred questions take seconds to minutes.
_SMALL = 1 << 24
# Rounds that greedy purification takes before it stops, as seen on small models.
_TYPICAL_ROUNDS = 25
# A backward pass costs about two forward passes.
_BACKWARD = 3


@dataclass(frozen=True)
class PurifyMethod:
    """A way of purifying, and what it takes."""

    # Purifies for one subdomain, in the number format that the model has
    search: Callable[[PurifyTask, SaliencySection], PurifyResult]
    rounds: Callable[[SaliencySection, bool], int]  # Most rounds it can take, given whether the documents are text
    # What it takes, as documents scored once, given whether they are text, how many reference documents the subdomain
    # has and how many answer tokens these have
    cost: Callable[[SaliencySection, bool, int, int], float]

    def run(self, task: PurifyTask, section: SaliencySection) -> PurifyResult:
        """Purify in the number format of gradient passes that the recipe asks for."""
        with held_in(task.model, compute_dtype(section.compute, task.model)):
            return self.search(task, section)


def method_of(section: SaliencySection, text: bool, weights: Sequence[WeightMatrix]) -> PurifyMethod:
    """The way that a recipe asks for; ``auto`` leaves it to the kind of documents and the size of the base.

    A hundred questions make few steps of training, and greedy rounds find more; over a large base they take too long.
    """
    name = section.method
    if name == "auto":
        name = "learned" if text or sum(w.size for w in weights) >= _SMALL else "greedy"
    return METHODS.get(name)


def _greedy_rounds(section: SaliencySection, text: bool) -> int:
    return max(1, int(section.budget / step_share(section, text)))


def _greedy_cost(section: SaliencySection, text: bool, documents: int, tokens: int) -> float:
    rounds = min(_TYPICAL_ROUNDS, _greedy_rounds(section, text))
    return rounds * documents * (_BACKWARD * section.gradient_share + section.stop_share)


def _learned_rounds(section: SaliencySection, text: bool) -> int:
    # As long as no one has counted the tokens; a bar that ends early jumps to its end.
    return ROUNDS if section.every is None else math.ceil((section.steps or MOST_STEPS) / section.every)


def _learned_cost(section: SaliencySection, text: bool, documents: int, tokens: int) -> float:
    steps, each = training_schedule(max(1, round(section.gradient_share * tokens)), section.step_tokens, section.steps)
    looks = (ROUNDS if section.every is None else math.ceil(steps / section.every)) * section.stop_share * documents
    return _BACKWARD * (steps + MEASURED_STEPS) * each * documents / max(1, tokens) + looks


def _search_both(task: PurifyTask, section: SaliencySection) -> PurifyResult:
    rounds = _greedy_rounds(section, task.text)
    ended = task.checkpoint.part_state("greedy, its end")
    known = ended.read_state()
    if known is None:
        greedy = METHODS.get("greedy").search(replace(task, checkpoint=task.checkpoint.part_state("greedy")), section)
        ended.write_state(lambda: to_state(greedy), now=True)
    else:
        greedy = from_state(known, task.weights)
    second = replace(
        task,
        on_round=lambda number, *outcome: task.on_round(rounds + number, *outcome),
        checkpoint=task.checkpoint.part_state("learned"),
    )
    learned = METHODS.get("learned").search(second, section)
    return learned if learned.losses[learned.best] < greedy.losses[greedy.best] else greedy


METHODS: Registry[PurifyMethod] = Registry("way of signed purification", PURIFICATIONS)
METHODS.add(
    "greedy",
    PurifyMethod(greedy_purify, _greedy_rounds, _greedy_cost),
    "cut the strongest few weights, rank anew, until the stopping documents no longer gain",
)
METHODS.add(
    "learned",
    PurifyMethod(learn_switches, _learned_rounds, _learned_cost),
    "train which weights are off, within the budget; no value changes",
)
METHODS.add(
    "both",
    PurifyMethod(
        _search_both,
        lambda *given: _greedy_rounds(*given) + _learned_rounds(*given),
        lambda *given: _greedy_cost(*given) + _learned_cost(*given),
    ),
    "greedy, then learned from the start; what is lower on the stopping documents is kept",
)
