"""Real text and real questions for a real small model: what trains and stops a method, and what is only reported.

Text: WikiText-2 and GSM8K as blocks of tokens, the figure being held-out perplexity. Questions: find the right answer
among four by likelihood. Methods learn these from text too, a question with its right answer; whether that helps to
choose is what the reported items say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.real_llm.data import Texts, cut_solutions, matched, needed, read_gsm8k, read_rows, read_wikitext
from freemoe.domain_experts.recipe import SaliencySection
from freemoe.domain_experts.select.choice import split_by_share
from freemoe.evals.engine.scorer import Scorer, TokenPair
from freemoe.evals.tasks.benchmark_files import arc_jsonl
from freemoe.evals.tasks.documents import Document, content_key
from freemoe.evals.tasks.text_tasks import TextTask

MODEL = "models/stories260k"

_TRAINED, _STOPPING, _REPORTED = 2000, 300, 1000


@dataclass(frozen=True)
class Material:
    """Tokens that train and stop a method, and documents that chose nothing, of the kind ``text`` or ``choice``."""

    gradient: list[TokenPair]
    stop: list[TokenPair]
    reported: list[Document]


def _text(name: str, texts: Texts, scorer: Scorer, seed: int, limit: int | None) -> Material:
    task = TextTask(name, *texts, tokenizer=scorer.tokenizer, given=0, limit=limit)
    documents = task.reference()
    section = SaliencySection()
    # Parted as a build does it: the guard's part stays unread here, so that all methods see what a build's see.
    gradient, stop, _ = split_by_share([d.key for d in documents], [section.gradient_share, section.stop_share], seed)
    pairs = [scorer.gold_pair(d) for d in documents]
    return Material([pairs[i] for i in gradient], [pairs[i] for i in stop], task.reported())


Choices = Sequence[tuple[str, tuple[str, ...], int]]
"""Question, answers to choose from, number of the right one."""


def _choices(
    name: str, items: tuple[Sequence[tuple[str, str]], Choices], scorer: Scorer, seed: int, limit: int | None
) -> Material:
    """Questions with answers to choose from; learned from the right ones of other questions, as plain text."""
    train, test = items
    rng = random.Random(f"{name}/{seed}")
    drawn = rng.sample(list(train), min(len(train), limit or _TRAINED + _STOPPING))
    texts = [scorer.text_pair(scorer.tokenizer.encode(q + a, add_special_tokens=False)) for q, a in drawn]
    texts = [TokenPair(t.context, t.continuation[: scorer.max_length - 1]) for t in texts]
    stopping = min(_STOPPING, len(texts) // 4)
    documents = [
        Document(name, str(i), content_key(question), "choice", question, answers, gold)
        for i, (question, answers, gold) in enumerate(rng.sample(list(test), min(len(test), limit or _REPORTED)))
    ]
    return Material(texts[stopping:], texts[:stopping], documents)


def _gsm8k_matching(root: Path) -> tuple[Sequence[tuple[str, str]], Choices]:
    """Which of four worked solutions belongs to the question; the other three are other questions'."""
    test = matched(cut_solutions(read_rows(root, "gsm8k/test.jsonl")), random.Random("gsm8k matching"))
    return cut_solutions(read_rows(root, "gsm8k/train.jsonl")), test


def _arc_easy(root: Path) -> tuple[Sequence[tuple[str, str]], Choices]:
    """ARC-Easy, its own choices, learned from its training questions with their right answers."""

    def read(split: str) -> list[tuple[str, tuple[str, ...], int]]:
        items = []
        for row in arc_jsonl(needed(root, f"arc/ARC-Easy/ARC-Easy-{split}.jsonl")):
            choices = row["choices"]
            items.append((f"{row['question']}\n", tuple(choices["text"]), choices["label"].index(row["answerKey"])))
        return items

    return [(question, choices[gold]) for question, choices, gold in read("Train")], read("Test")


_READERS: dict[str, tuple[Callable[[Path], Any], Callable[..., Material]]] = {
    "wikitext": (read_wikitext, _text),
    "gsm8k": (read_gsm8k, _text),
    "gsm8k-matching": (_gsm8k_matching, _choices),
    "arc-easy": (_arc_easy, _choices),
}
MATERIALS = tuple(_READERS)


def read_material(name: str, root: Path, scorer: Scorer, seed: int, limit: int | None) -> Material:
    """A material of `MATERIALS` from the data folder, ``limit`` documents of each part at most."""
    read, make = _READERS[name]
    return make(name, read(root), scorer, seed, limit)
