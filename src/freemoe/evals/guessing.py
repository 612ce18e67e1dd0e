"""Whether the base is better than guessing on the reported documents: build, convert and eval say so where it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from freemoe.core.numbers import format_decimals
from freemoe.evals.statistics import mean_interval
from freemoe.evals.tasks.documents import Document
from freemoe.results.common import GuessingResult


def vocabulary_of(model: Any) -> int:
    """Tokens that a model chooses from."""
    return int(model.config.get_text_config().vocab_size)


def against_guessing(
    documents: Sequence[Document], values: Sequence[float], score: float, vocabulary: int
) -> dict[str, Any] | None:
    """What to say of the base on a domain's documents, or None where it is better than guessing.

    ``values``: the base's reported figure for each: 1 or 0 for right or wrong. ``score``: of text: its perplexity.
    """
    if documents[0].kind == "text":
        return text_against_guessing(score, vocabulary)
    asked = [i for i, document in enumerate(documents) if document.kind == "choice"]
    if not asked:
        return None
    chance = 100 * float(np.mean([1 / len(documents[i].answers) for i in asked]))
    # Around one half, so that the interval adds one right and one wrong answer.
    around = mean_interval([values[i] - 0.5 for i in asked], [documents[i].key for i in asked])
    found = around.mapped(lambda share: 100 * (share + 0.5))
    if found.low > chance:
        return None
    return {
        "unit": "points",
        "score": found.mean,
        "low": found.low,
        "high": found.high,
        "guessing": chance,
        "documents": len(asked),
    }


def text_against_guessing(perplexity: float, vocabulary: int) -> dict[str, Any] | None:
    """The same for text: a perplexity of the vocabulary's size or more is no better than all tokens alike."""
    if perplexity < vocabulary:
        return None
    return {"unit": "perplexity", "score": perplexity, "guessing": float(vocabulary)}


def guessing_text(name: str, result: GuessingResult | None) -> str:
    """One line with both figures; empty for None."""
    if not result:
        return ""
    score, guessing = result.score, result.guessing
    if result.unit == "perplexity":
        return (
            f"base: {math.log(score):.2f} nats per token on {name} (perplexity {format_decimals(score, 2)}), all tokens alike have "
            f"{math.log(guessing):.2f} (a vocabulary of {guessing:,.0f}): the base does not know this text, so a gain says little"
        )
    worse = result.high is not None and result.high < guessing
    return (
        f"base: {score:.1f} % [{result.low:.1f}, {result.high:.1f}] on {name}, chance is {guessing:.1f} % "
        f"({result.documents} questions): {'worse than' if worse else 'not to be told from'} guessing, so a gain says little"
    )
