"""T19: many clients for minutes, some of them hostile, while experts come and go: wrong answers, errors without a cause, leaks."""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Figure, Outcome, Settings, in_own_process
from benchmarks.serve.material import NAMES, Wish, open_base, serving, wishes, write_experts
from freemoe.core.memory import used_memory_bytes
from freemoe.domain_experts.mixture import FreeMoE

MINUTES, CLIENTS = 10.0, 16
PASSING = ("five", "six")
"""Experts that are loaded and dropped over and over."""

NEAR = 1e-4
"""Logits of two tokens that are closer are a tie: which of them is larger depends on how rows are put together."""

GROWTH = 5.0


def run(settings: Settings) -> Outcome:
    """Let clients ask, and look at what they saw."""
    clients, seconds = CLIENTS, 60 * (MINUTES if settings.minutes is None else settings.minutes)
    if settings.quick:
        clients, seconds = 4, 3.0
    moe = open_base(settings)
    asked = wishes(moe, 12 if settings.quick else 70, 24, ["base", *NAMES, "one+two", *PASSING], settings.seed)
    with tempfile.TemporaryDirectory() as name, settings.progress.stage("soak", 1) as advance:
        folder = write_experts(Path(name) / "passing", moe, PASSING, settings.seed + 100)
        moe.load_expert(folder)
        true = [generated(moe, wish) for wish in asked]
        for expert in PASSING:
            moe.delete_expert(expert)
        rows = [[w.expert, w.prompt, w.tokens, _text(moe, ids)] for w, ids in zip(asked, true, strict=True)]
        how = {"asked": rows, "passing": PASSING, "folder": str(folder), "seconds": seconds, "seed": settings.seed}
        with serving(moe, CLIENTS, [folder]) as (url, engine), Memory(seconds) as memory:
            seen = in_own_process("benchmarks.serve.soak_clients", [url, clients, how])
            left = engine.busy
        moe.load_expert(folder)
        gaps = [gap(moe, asked[number], true[number], said) for number, said in seen["differs"]]
        advance(1)
    return _outcome(seen, gaps, memory, left, seconds)


def generated(moe: FreeMoE, wish: Wish) -> list[int]:
    """The tokens of an answer, by transformers' generate alone."""
    ids = torch.tensor([wish.prompt])
    options = {"max_new_tokens": wish.tokens, "do_sample": False, "pad_token_id": moe.tokenizer.pad_token_id or 0}
    out = moe.generate(ids, attention_mask=torch.ones_like(ids), expert=wish.expert, **options)
    return out[0, ids.shape[1] :].tolist()


def _text(moe: FreeMoE, ids: Sequence[int]) -> str:
    return moe.tokenizer.decode(list(ids), skip_special_tokens=True)


@torch.no_grad()
def gap(moe: FreeMoE, wish: Wish, true: Sequence[int], said: str) -> float:
    """By how much the first two tokens' logits differ where an answer leaves the right one; the least up to there.

    Args:
        moe: The base.
        wish: What was asked.
        true: Tokens of the right answer.
        said: The text of the other.
    """
    agree = next((n for n in range(len(true), 0, -1) if said.startswith(_text(moe, true[:n]).rstrip("\ufffd"))), 0)
    ids = torch.tensor([[*wish.prompt, *true]])
    logits = moe(ids, expert=wish.expert).logits[0, len(wish.prompt) - 1 : len(wish.prompt) + agree]
    best = logits.topk(2, dim=-1).values
    # A character that is not whole hides where exactly they part.
    return float((best[:, 0] - best[:, 1])[-4:].min())


class Memory:
    """What this process holds, looked at once in a while inside a ``with`` block.

    Args:
        seconds: How long the block takes, about.
    """

    def __init__(self, seconds: float) -> None:
        self.seen: list[int] = []
        self._pause = max(0.05, seconds / 200)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(self._pause):
            self.seen.append(used_memory_bytes())

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    @property
    def growth(self) -> float:
        """Per cent from the second fifth of the time to the last."""
        return growth(self.seen)


def growth(seen: Sequence[int]) -> float:
    """Per cent between the medians of the second fifth and the last fifth; NaN of too few."""
    fifth = len(seen) // 5
    if not fifth:
        return float("nan")
    early, late = statistics.median(seen[fifth : 2 * fifth]), statistics.median(seen[-fifth:])
    return 100 * (late / early - 1) if early else float("nan")


def _outcome(seen: dict[str, Any], gaps: list[float], memory: Memory, left: int, seconds: float) -> Outcome:
    counts = dict.fromkeys(("right", "gone", "bad", "absent", "loads", "errors", "differs"), 0) | seen["counts"]
    ties = sum(value <= NEAR for value in gaps)
    answers = counts["right"] + counts["differs"]
    figures = (
        Figure(
            "answers that differ from those of single requests",
            counts["differs"] - ties,
            0,
            "lower",
            "",
            0,
            f"of {answers:,} in {seconds / 60:.1f} minutes; {ties} more at ties of two tokens within {NEAR:g}",
        ),
        Figure(
            "errors without a cause",
            counts["errors"],
            0,
            "lower",
            "",
            0,
            f"{counts['bad']:,} wrong requests, {counts['gone']:,} clients gone, {counts['loads']:,} times experts loaded and dropped",
        ),
        Figure("growth of memory", memory.growth, GROWTH, "lower", " %", 1, f"{len(memory.seen)} looks"),
        Figure("sequences left behind", left, None, "lower", "", 0),
    )
    details = {"counts": counts, "errors": seen["errors"], "gaps": gaps, "memory_bytes": memory.seen}
    return Outcome(figures, details)
