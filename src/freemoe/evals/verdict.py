"""The verdict on what a run made, as page, card and terminal all say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from freemoe.evals.statistics import exponential, mean_interval

BY_BLOCKS = "over blocks (by an older version: too narrow where blocks are of one article)"
"""Of the intervals of text that were made before documents knew their groups."""

State = Literal["better", "same", "worse", "fact"]

Measured = Mapping[str, Any]
"""``mean``, ``low`` and ``high`` of a figure and its 95 % interval; an end that is None is not known."""


@dataclass(frozen=True)
class GainVerdict:
    """The answer to "is there a reliable gain?"."""

    state: State  # How it is marked
    label: str  # In two or three words
    words: str  # In a few sentences, with the figures and their intervals


def groups_text(groups: int | None) -> str:
    """What the interval of a figure of text is over.

    ``groups``: how many; None where an older version did not say.
    """
    return f"over {groups:,} group{'s' if groups > 1 else ''} (articles, rows)" if groups else BY_BLOCKS


def perplexity_against(
    top: Sequence[float], bottom: Sequence[float], tokens: Sequence[float], groups: Sequence[int] | None = None
) -> dict[str, Any]:
    """Ratio of two perplexities on the same blocks, as ``Measured``; no interval where there is one group.

    ``top``: sums of negative log-likelihoods by block. ``bottom``: the same under the model that it is held against.
    ``tokens``: of every block. ``groups``: of every block; each block is its own where an older version did not say.
    """
    clusters = [str(number) for number in (groups or range(len(tokens)))]
    each = np.subtract(top, bottom) / np.maximum(tokens, 1)
    return exponential(mean_interval(each.tolist(), clusters, tokens)).as_json()


def interval_sign(measured: Measured | None, home: float = 1.0) -> int:
    """1 where the interval lies above ``home``, -1 below, 0 where it holds it or there is none."""
    if measured is None or measured["low"] is None or measured["high"] is None:
        return 0
    return (measured["low"] > home) - (measured["high"] < home)


def judge_against_model(
    perplexity: Measured, read: str, speed: Mapping[str, Any] | None, then: str, missed: str = ""
) -> GainVerdict:
    """The verdict on a model that reads fewer weights: first its price against the model that it was made of, then its rivals.

    Yes: something is reliably better than that model, and nothing worse. Mixed: both. No: nothing is better. Only what was
    measured counts: fewer weights are no gain by themselves.

    ``perplexity``: over the model's on the same text. ``speed``: as `speed.compare_speed` returns it; None where nothing
    was timed. ``then``: what it is against its rivals, in sentences. ``missed``: what was asked for and not reached, in a
    sentence; the answer is no then.
    """
    signs = (-interval_sign(perplexity), *(interval_sign((speed or {}).get(part)) for part in ("decode", "prefill")))
    better, worse = 1 in signs, -1 in signs
    answers: dict[tuple[bool, bool], tuple[str, State, str]] = {
        (True, False): ("Yes", "better", "Better than your model"),
        (True, True): ("Mixed", "same", "A gain at a price"),
        (False, True): ("No", "worse", "Worse than your model"),
        (False, False): ("No", "same", "No reliable difference from your model"),
    }
    answer, state, label = answers[better, worse]
    if not (better or worse) and perplexity["low"] is None:
        label = "Undecided: no interval"
    if missed:
        answer, state, label = "No", "worse", "The budget was missed"
    price = f"{answer}: {_perplexity_text(perplexity)}; reads {read} per token; {_speed_text(speed)}."
    return GainVerdict(state, label, " ".join(part for part in (price, missed, then) if part))


def _perplexity_text(ratio: Measured) -> str:
    if interval_sign(ratio) < 0:
        saved = {"mean": 1 - ratio["mean"], "low": 1 - ratio["high"], "high": 1 - ratio["low"]}
        return f"saves {_percent_text(saved)} perplexity against your model"
    more = {name: end if end is None else end - 1 for name, end in ratio.items()}
    if interval_sign(ratio) > 0:
        return f"costs {_percent_text(more)} perplexity against your model"
    unsure = "no interval" if ratio["low"] is None else "no reliable difference"
    return f"perplexity {_percent_text(more, '+')} against your model ({unsure})"


def _percent_text(share: Measured, signed: str = "") -> str:
    """``14 % [12, 16]``, with as many decimals as tell the ends apart."""
    low, high = share["low"], share["high"]
    width = abs(share["mean"]) if low is None or high is None else high - low
    places = 0 if width >= 0.02 else 1 if width >= 0.002 else 2
    mean, *ends = (f"{100 * v:{signed}.{places}f}" for v in (share["mean"], low, high) if v is not None)
    return f"{mean} %" + (f" [{', '.join(ends)}]" if len(ends) == 2 else "")


def _speed_text(speed: Mapping[str, Any] | None) -> str:
    if not speed:
        return "its speed was not measured"
    if not speed.get("decode"):
        return "its speed was measured without an interval"
    said = [f"{verb} {ratio_text(speed[part])}" for part, verb in (("decode", "decodes"), ("prefill", "reads prompts"))]
    return f"{' and '.join(said)} as fast here (batch 1, prompt of {speed['prompt']} tokens)"


def ratio_text(ratio: Measured, places: int = 2) -> str:
    """A ratio with its interval: ``1.40x [1.31, 1.52]``."""
    if ratio["low"] is None or ratio["high"] is None:
        return f"{ratio['mean']:.{places}f}x (no interval)"
    return f"{ratio['mean']:.{places}f}x [{ratio['low']:.{places}f}, {ratio['high']:.{places}f}]"
