"""How fast one request is on this machine, before a change to a model and after it: in turns, batch 1, greedy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from freemoe.core.errors import RecipeError
from freemoe.core.run.folder import RunFolder
from freemoe.evals.statistics import over_seeds
from freemoe.recipes import TimingSection

T = TypeVar("T")

PARTS = {"prefill": "ttft", "decode": "itl"}
"""What is faster or slower -> the seconds that say so: to the first token, and between two further ones."""


_ONE_BY_ONE = 16  # A token that is written alone, in tokens of a prompt

Sides = Mapping[str, Callable[[], AbstractContextManager[Any]]]
"""Name -> opens a model; the one that was there before comes first."""


def prompt_lengths(timing: TimingSection, model: Any, block: int) -> list[int]:
    """Tokens of the prompts that are timed: those that were asked for, or one block of text as far as the context reaches.

    Raises:
        RecipeError: A prompt and its new tokens are more than the model has positions.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = max(timing.prompts, default=block) if most is None else max(1, most - timing.new_tokens)
    if timing.rounds and max(timing.prompts, default=0) > room:
        raise RecipeError(
            f"timing.prompts asks for {max(timing.prompts)} tokens and {timing.new_tokens} new ones, and the model has {most} "
            f"positions: prompts of {room} tokens at most."
        )
    return list(timing.prompts or (min(block, room),)) if timing.rounds else []


def timed_tokens(timing: TimingSection, block: int) -> int:
    """Tokens that `compare_prompts` is about as long as."""
    prompts = timing.prompts or (block,)
    each = sum(prompts) + len(prompts) * timing.new_tokens * _ONE_BY_ONE
    return 2 * (timing.rounds + 1) * each if timing.rounds else 0


def compare_prompts(
    timing: TimingSection, sides: Sides, ids: Tensor, lengths: Sequence[int], run: RunFolder
) -> dict[str, Any]:
    """`compare_speed` for prompts of several lengths, each timed once in a run.

    ``timing``: how often, and how long the answers are. ``ids``: (length,) int64, a text that the prompts repeat.
    ``lengths``: of the prompts; where there are none, nothing is timed. ``run``: keeps what was timed. Gives ``speed``: the
    first length's figures, and under ``lengths`` all; an empty mapping where nothing was timed.
    """
    found = []
    for length in lengths:
        prompt = ids.repeat(-(-length // len(ids)))[None, :length]
        timed = partial(compare_speed, sides, prompt, timing.new_tokens, timing.rounds)
        found.append(run.run_unit(f"speed|{length}", timed))
    return {"speed": {**found[0], "lengths": found}} if found else {}


def compare_speed(sides: Sides, prompt: Tensor, new: int, rounds: int) -> dict[str, Any]:
    """Time two models on one prompt, in turns, after a round that warms up.

    ``prompt``: (1, length) int64, where the models are. ``new``: tokens of the answer. Gives ``prompt`` (its tokens),
    ``new_tokens``, ``rounds``; per side the medians ``ttft`` and ``itl`` in seconds; ``prefill`` and ``decode``: how many
    times as fast the second is, the geometric mean over the rounds with Student's 95 % interval, whose ends are None where
    there was one round.
    """
    times = time_sides(sides, prompt, new, rounds)
    found: dict[str, Any] = {"prompt": prompt.shape[1], "new_tokens": new, "rounds": rounds}
    for name, parts in times.items():
        found[name] = {what: part["seconds"] for what, part in zip(PARTS.values(), parts, strict=True)}
    ratios = [part["times_as_fast"] for part in list(times.values())[-1]]
    return found | dict(zip(PARTS, ratios, strict=True))


def time_sides(sides: Sides, prompt: Tensor, new: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Name -> of the first token and of further ones the median ``seconds``, and ``times_as_fast`` over the first side.

    Arguments as of `compare_speed`.
    """

    def time_once(side: Callable[[], AbstractContextManager[Any]]) -> tuple[float, float]:
        with side() as model:
            return time_request(model, prompt, new)

    rows = in_turns({name: partial(time_once, side) for name, side in sides.items()}, rounds)
    columns = {name: list(zip(*times, strict=True)) for name, times in rows.items()}
    first = next(iter(columns.values()))
    return {
        name: [
            {"seconds": statistics.median(after), "times_as_fast": times_as_fast(before, after)}
            for before, after in zip(first, parts, strict=True)
        ]
        for name, parts in columns.items()
    }


def in_turns(sides: Mapping[str, Callable[[], T]], rounds: int, warm: bool = True) -> dict[str, list[T]]:
    """What each side says of itself, round after round, the first side changing; a round before them warms up."""
    names, found = list(sides), {name: [] for name in sides}
    for number in range(0 if warm else 1, rounds + 1):
        # Neither is always the one that finds the caches warm.
        turn = (number - 1) % len(names)
        for name in names[turn:] + names[:turn]:
            said = sides[name]()
            if number:
                found[name].append(said)
    return found


def times_as_fast(before: Sequence[float], after: Sequence[float]) -> dict[str, float | None]:
    """How many times as fast the second side is: geometric mean over the rounds' seconds, with Student's 95 % interval.

    The ends are None where there was one round.
    """
    mean = over_seeds((np.log(before) - np.log(after)).tolist())
    low, high = (float(np.exp(end)) if len(before) > 1 else None for end in (mean.low, mean.high))
    return {"mean": float(np.exp(mean.mean)), "low": low, "high": high}


@torch.no_grad()
def time_request(
    model: Any, prompt: Tensor, new: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Seconds to the first token, and between two further ones, of one greedy request for exactly ``new`` tokens."""
    seen = _TokenTimestamps(model.device, clock)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=1,
        min_new_tokens=new,
        max_new_tokens=new,
        streamer=seen,
    )
    began, _, first, *_, last = seen.times
    return first - began, (last - first) / (new - 1)


def wait_for(device: torch.device) -> None:
    """Until an accelerator has done what it was asked for: a kernel is only queued when its call returns."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class _TokenTimestamps:
    """A streamer that notes when each new token came, and when it was made."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self.device, self.clock = device, clock
        self.times: list[float] = []
        self.put()

    def put(self, value: Tensor | None = None) -> None:
        """The prompt first, then one token after the other."""
        wait_for(self.device)
        self.times.append(self.clock())

    def end(self) -> None:
        """Nothing is left to do."""


def speed_lines(speed: Mapping[str, Any] | None) -> list[str]:
    """Milliseconds of every prompt that was timed, for people."""
    lines = []
    for one in (speed or {}).get("lengths") or ([speed] if speed else []):
        sides = [side for side in one.values() if isinstance(side, dict) and "ttft" in side]
        (ttft, after), (itl, further) = ([1000 * side[what] for side in sides] for what in PARTS.values())
        lines.append(
            f"first token after {ttft:.1f} -> {after:.1f} ms, further ones every {itl:.1f} -> {further:.1f} ms (batch 1, prompt of "
            f"{one['prompt']} tokens, as this machine was loaded)"
        )
    return lines
