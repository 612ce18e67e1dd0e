"""Rivals that change no weight: the base itself, and reference documents in front of every prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.rivals.rival import Fitted, Materials, Terms
from freemoe.domain_experts.purify.batches import mean_loss
from freemoe.evals.tasks.documents import Document

COUNTS = (1, 2, 5)
"""How many documents in front are tried; none always competes."""


@contextmanager
def untouched(model: Any, materials: Materials, terms: Terms) -> Iterator[Fitted]:
    """Nothing is done."""
    yield Fitted(losses=[mean_loss(model, materials.batches(materials.stop))])


@contextmanager
def fewshot(model: Any, materials: Materials, terms: Terms) -> Iterator[Fitted]:
    """The number of documents in front whose stopping loss is best; they ship as text."""
    begun = mean_loss(model, materials.batches(materials.stop))
    losses, best, shots = [begun], 0, ()
    for count in COUNTS:
        first = materials.gradient[:count]
        loss = mean_loss(model, materials.batches(in_front(materials, first, materials.stop)))
        losses.append(loss)
        if loss == min(losses) and loss < begun:
            best, shots = count, first
    yield Fitted(
        prompted=lambda documents: in_front(materials, shots, documents),
        losses=losses,
        bytes=sum(len((d.prompt + gold(d)).encode()) for d in shots),
        facts={"shots": best},
    )


def gold(document: Document) -> str:
    """The right answer, or the text itself."""
    if document.kind == "text":
        return document.answers[0]
    return document.answers[document.gold] if document.gold is not None else document.reference


def in_front(materials: Materials, shots: Sequence[Document], documents: Sequence[Document]) -> list[Document]:
    """Documents with others before them; a block of text is given as many of their last tokens as the context holds."""
    if not shots:
        return list(documents)
    if documents[0].kind != "text":
        before = "".join(f"{d.prompt}{gold(d)}\n\n" for d in shots)
        return [replace(d, prompt=before + d.prompt) for d in documents]
    ids = [token for d in shots for token in d.tokens]
    found = []
    for d in documents:
        room = max(0, materials.length - len(d.tokens))
        front = tuple(ids[len(ids) - min(room, len(ids)) :])
        # What was scored is scored: without given tokens the first one was predicted from the token before texts.
        found.append(replace(d, tokens=front + d.tokens, given=len(front) + d.given) if front else d)
    return found
