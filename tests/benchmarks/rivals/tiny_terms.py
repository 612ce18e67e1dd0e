"""A tiny model with a few documents, as a rival is given them."""

import torch

from benchmarks.rivals.rival import Materials, Schedule, Terms
from freemoe.domain_experts.purify.batches import answer_batches, gold_rows
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document
from freemoe.models.weights import find_weights
from tests.tiny import tiny_model, tiny_tokenizer


def texts(count, first=0):
    """Blocks of drawn tokens in which every second one follows from the one before it."""
    found = []
    for n in range(first, first + count):
        halves = torch.randint(3, 40, (8,), generator=torch.Generator().manual_seed(n))
        ids = torch.stack([halves, halves + 1], 1).flatten().tolist()
        text = " ".join(map(str, ids))
        found.append(Document("t", str(n), str(n), "text", "", (text,), reference=text, tokens=tuple(ids)))
    return tuple(found)


def questions(count, first=0):
    """Questions with two answers."""
    return tuple(
        Document("q", str(n), str(n), "choice", f"{n}?", (" yes", " no"), n % 2, reference=(" yes", " no")[n % 2])
        for n in range(first, first + count)
    )


def given(family="llama", kind="text", stop=None, **config):
    """A tiny model and what a rival may look at."""
    model, tokenizer = tiny_model(family, **config), tiny_tokenizer()
    scorer = Scorer(model, tokenizer)
    documents = texts if kind == "text" else questions
    parts = documents(8), documents(4, 100) if stop is None else stop

    def batches(some):
        return answer_batches(gold_rows(scorer, some), [0] * len(some), 64, "cpu")

    return model, Materials(kind, tokenizer, scorer.max_length, find_weights(model), *parts, batches)


TERMS = Terms(share=0.25, rank=1, rate=1e-2, schedule=Schedule(steps=6, step_tokens=64, every=2, patience=3))
