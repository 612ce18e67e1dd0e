"""Many clients for minutes, some of them hostile, while experts come and go: wrong answers, errors without a cause, leaks."""

import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.harness import Figure, Outcome, Settings, in_own_process
from benchmarks.serve.material import NAMES, generated, open_base, random_experts, serving, wishes
from freemoe.assets import BUNDLED
from freemoe.core.memory import used_memory_bytes
from freemoe.domain_experts.mixture import FreeMoE
from tests.hardening.full import count, none
from tests.hardening.worker import Sampled

SECONDS, CLIENTS, REQUESTS = 600.0, 16, 70
PASSING = ("five", "six")
"""Experts that are loaded and dropped over and over."""

NEAR = 1e-4
"""Logits of two tokens that are closer are a tie: which of them is larger depends on how rows are put together."""

GROWTH, JUDGED = 5.0, 60.0
"""Per cent; in fewer seconds memory grows by what first requests take."""


def run(seconds, seed, clients=CLIENTS, requests=REQUESTS):
    """Let clients ask, each one of so many requests at a time, and look at what they saw."""
    moe = open_base(Settings(seed=seed))
    asked = wishes(moe, requests, 24, ["base", *NAMES, "one+two", *PASSING], seed)
    with tempfile.TemporaryDirectory() as name:
        passing = FreeMoE(moe.model, random_experts(moe.model, PASSING, seed + 100), None, moe.tokenizer)
        folder = passing.save_pretrained(Path(name) / "passing", base=BUNDLED)
        moe.load_expert(folder)
        true = [generated(moe, wish) for wish in asked]
        for expert in PASSING:
            moe.delete_expert(expert)
        rows = [[w.expert, w.prompt, w.tokens, _text(moe, ids)] for w, ids in zip(asked, true, strict=True)]
        how = {"asked": rows, "passing": PASSING, "folder": str(folder), "seconds": seconds, "seed": seed}
        memory = Sampled(used_memory_bytes, max(0.05, seconds / 200))
        with serving(moe, CLIENTS, [folder]) as (url, engine), memory:
            seen = in_own_process("tests.hardening.soak.clients", [url, clients, how])
            left = engine.num_unfinished
        moe.load_expert(folder)
        gaps = [gap(moe, asked[number], true[number], said) for number, said in seen["differs"]]
    return outcome(seen, gaps, memory.seen, left, seconds)


def _text(moe, ids):
    return moe.tokenizer.decode(list(ids), skip_special_tokens=True)


@torch.no_grad()
def gap(moe, wish, true, said):
    """By how much the first two tokens' logits differ where an answer leaves the right one; the least up to there."""
    agree = next((n for n in range(len(true), 0, -1) if said.startswith(_text(moe, true[:n]).rstrip("\ufffd"))), 0)
    ids = torch.tensor([[*wish.prompt, *true]])
    logits = moe(ids, expert=wish.expert).logits[0, len(wish.prompt) - 1 : len(wish.prompt) + agree]
    best = logits.topk(2, dim=-1).values
    # A character that is not whole hides where exactly they part.
    return float((best[:, 0] - best[:, 1])[-4:].min())


def growth(seen):
    """Per cent between the medians of the second fifth and the last fifth; NaN of too few."""
    fifth = len(seen) // 5
    if not fifth:
        return float("nan")
    early, late = statistics.median(seen[fifth : 2 * fifth]), statistics.median(seen[-fifth:])
    return 100 * (late / early - 1) if early else float("nan")


def outcome(seen, gaps, memory, left, seconds):
    """The figures of what clients saw."""
    counts = dict.fromkeys(("right", "gone", "bad", "absent", "loads", "errors", "differs"), 0) | seen["counts"]
    ties = sum(value <= NEAR for value in gaps)
    answers = counts["right"] + counts["differs"]
    wrong = f"{counts['bad']:,} wrong requests, {counts['gone']:,} clients gone"
    of = f"of {answers:,} in {seconds / 60:.1f} minutes; {ties} more at ties of two tokens within {NEAR:g}"
    most = GROWTH if seconds >= JUDGED else None
    figures = (
        none("answers that differ from those of single requests", counts["differs"] - ties, of),
        none(
            "errors without a cause", counts["errors"], f"{wrong}, {counts['loads']:,} times experts loaded and dropped"
        ),
        Figure("growth of memory", growth(memory), most, "lower", " %", 1, f"{len(memory)} looks"),
        count("sequences left behind", left),
    )
    details = {"counts": counts, "errors": seen["errors"], "gaps": gaps, "memory_bytes": memory}
    return Outcome(figures, details)
