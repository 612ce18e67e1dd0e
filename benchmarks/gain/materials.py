"""Real text and real questions for a real small model: what trains and stops a method, and what is only reported.

Text: WikiText-2 and GSM8K as blocks of tokens, the figure being held-out perplexity. Questions: find the right answer
among four by likelihood. Methods learn these from text too, a question with its right answer; whether that helps to
choose is what the reported items say.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.domain_experts.recipe import SaliencySection
from freemoe.domain_experts.select.choice import split_by_share
from freemoe.evals.engine.scorer import Scorer, TokenPair
from freemoe.evals.tasks.documents import Document, content_key
from freemoe.evals.tasks.text_tasks import TextTask
from freemoe.text.documents import read_documents

MODEL = "models/stories260k"

# As the questions are cut: a context of 512 tokens of half a word each must hold a question and an answer.
_QUESTION, _ANSWER, _CHOICES = 250, 160, 4
_TRAINED, _STOPPING, _REPORTED = 2000, 300, 1000


@dataclass(frozen=True)
class Material:
    """What a method is given, as tokens, and what it is held against.

    Attributes:
        gradient: Texts that train.
        stop: Texts that stop.
        reported: Documents that chose nothing: kind ``text`` or ``choice``.
    """

    gradient: list[TokenPair]
    stop: list[TokenPair]
    reported: list[Document]


def needed(root: Path, name: str) -> Path:
    """A file or folder of the data folder.

    Raises:
        DataError: When it is not there.
    """
    path = root / name
    if not path.exists():
        raise DataError(f"{str(name)!r} is not under the data folder {root.resolve()} (--data-root). Check the path.")
    return path


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _gsm8k(root: Path, split: str) -> list[str]:
    return [f"{row['question']}\n{row['answer']}" for row in _lines(needed(root, f"gsm8k/{split}.jsonl"))]


def _text(name: str, reference: Sequence[str], reported: Sequence[str]) -> Callable[..., Material]:
    def make(scorer: Scorer, seed: int, given: int, limit: int | None) -> Material:
        task = TextTask(name, reference, reported, tokenizer=scorer.tokenizer, given=given, limit=limit)
        documents = task.reference()
        section = SaliencySection()
        # Parted as a build does it: the guard's part stays unread here, so that all methods see what a build's see.
        gradient, stop, _ = split_by_share(
            [d.key for d in documents], [section.gradient_share, section.stop_share], seed
        )
        pairs = [scorer.gold_pair(d) for d in documents]
        return Material([pairs[i] for i in gradient], [pairs[i] for i in stop], task.reported())

    return make


def wikitext(root: Path) -> Callable[..., Material]:
    """WikiText-2: reference from the training text, reported from the test text."""
    train = read_documents(needed(root, "wikitext-2-raw/wikitext2_train_5k.txt"))
    return _text("wikitext", train, read_documents(needed(root, "wikitext-2-raw/wiki.test.raw")))


def gsm8k(root: Path) -> Callable[..., Material]:
    """GSM8K as text, question and worked solution: reference from train, reported from test."""
    return _text("gsm8k", _gsm8k(root, "train"), _gsm8k(root, "test"))


def _matching(
    name: str, train: Sequence[tuple[str, str]], test: Sequence[tuple[str, tuple[str, ...], int]]
) -> Callable[..., Material]:
    """Questions with answers to choose from; learned from the right ones of other questions, as plain text."""

    def make(scorer: Scorer, seed: int, given: int, limit: int | None) -> Material:
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

    return make


def gsm8k_matching(root: Path) -> Callable[..., Material]:
    """Which of four worked solutions belongs to the question; the other three are other questions'."""
    asked = [
        (row["question"][-_QUESTION:] + "\n", row["answer"][:_ANSWER])
        for row in _lines(needed(root, "gsm8k/test.jsonl"))
    ]
    rng = random.Random("gsm8k matching")
    test = []
    for i, (question, answer) in enumerate(asked):
        others = [asked[j][1] for j in rng.sample([j for j in range(len(asked)) if j != i], _CHOICES - 1)]
        gold = rng.randrange(_CHOICES)
        test.append((question, (*others[:gold], answer, *others[gold:]), gold))
    rows = _lines(needed(root, "gsm8k/train.jsonl"))
    train = [(row["question"][-_QUESTION:] + "\n", row["answer"][:_ANSWER]) for row in rows]
    return _matching("gsm8k-matching", train, test)


def arc_easy(root: Path) -> Callable[..., Material]:
    """ARC-Easy, its own choices, learned from its training questions with their right answers."""

    def read(split: str) -> list[tuple[str, tuple[str, ...], int]]:
        items = []
        for row in _lines(needed(root, f"arc/ARC-Easy/ARC-Easy-{split}.jsonl")):
            choices = row["question"]["choices"]
            gold = [c["label"] for c in choices].index(row["answerKey"])
            items.append((f"{row['question']['stem']}\n", tuple(c["text"] for c in choices), gold))
        return items

    train = [(question, choices[gold]) for question, choices, gold in read("Train")]
    return _matching("arc-easy", train, read("Test"))


MATERIALS: dict[str, Callable[[Path], Callable[..., Material]]] = {
    "wikitext": wikitext,
    "gsm8k": gsm8k,
    "gsm8k-matching": gsm8k_matching,
    "arc-easy": arc_easy,
}
