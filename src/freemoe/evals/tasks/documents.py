"""Documents and the two kinds of split: what the search may read, and what is only ever reported.

The two splits are two types. Search, calibration and router training take a `ReferenceSplit`; the reported
documents sit in a `ReportedSplit`, which offers no documents until a `FrozenChoice` is shown to it.
A score carries the split it came from, so that choosing by reported scores is an error, not a habit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from freemoe.core.errors import DataError, SplitError
from freemoe.text.groups import cluster_labels, copy_names
from freemoe.text.words import about_words, question_words

Kind = Literal["choice", "target", "generate", "code", "text"]


@dataclass(frozen=True)
class Document:
    """One item of a task, as the scorer sees it."""

    task: str  # Name of the task it belongs to
    id: str  # Stable name within the task and its source split
    # Its cluster: documents that share one (copies, paraphrases, the same entity) share a split and are one cluster of
    # the statistics
    key: str
    # How it is scored: ``choice`` (likelihood of each answer), ``target`` (is the greedy continuation equal to the
    # target), ``generate`` and ``code`` (generated until a stop string, then graded), ``text`` (likelihood of plain
    # text, or of a response after its prompt)
    kind: Kind
    prompt: str  # All text before the answer, few-shot examples included; empty for plain text
    # Continuations to score: the choices, or the one target; for ``text`` the text itself, or the response
    answers: tuple[str, ...] = ()
    gold: int | None = None  # Index of the right answer, where there is one
    reference: str = ""  # Gold answer as text, used for calibration and for the loss of signed purification
    until: tuple[str, ...] = ()  # Stop strings of a generation
    max_new_tokens: int = 256  # Cap of a generation
    # What it asks, as its row has it (no examples, no template), and what else makes it another document: the right
    # answer. Documents about the same are copies, whatever their keys (`splits.join_copies`). Empty for plain text
    about: tuple[str, ...] = field(default=(), repr=False)
    row_key: str = field(default="", repr=False)  # The key that its row had, where copies made it join another
    # For ``text`` only: words that begin in it, where a perplexity per word is reported
    words: int = field(default=0, repr=False)
    field: str = ""  # Subject or sub-task name, for ``by: field``
    index: int = 0  # Position in the task's own data, for grading
    # For ``text`` only: the exact token ids to score, each predicted from those before it in the block (the first from
    # the tokenizer's beginning-of-text token where it has one, else it is context only)
    tokens: tuple[int, ...] = ()
    # For ``text`` only: leading tokens that are context and not scored, such as a response's prompt; 0 puts the
    # beginning-of-text token before the block
    given: int = 0
    # For ``choice`` only, where the choices are different contexts of one continuation (WinoGrande): what stands before
    # each answer in the place of ``prompt``, which then has a blank for the choice
    contexts: tuple[str, ...] = ()

    def question_answer_words(self) -> tuple[list[str], list[str]]:
        """Words of what it asks, and of the answer without which it would be another question; none for plain text."""
        if self.about:
            return about_words(self.about)
        if not self.prompt:
            return [], []
        # Generated answers and responses are not part of what is asked.
        answer = question_words(self.reference) if self.kind in ("choice", "target") else []
        return question_words(self.prompt), answer

    def content_text(self) -> str:
        """What it says, whatever examples and template it stands in."""
        words, answer = self.question_answer_words()
        return " ".join([*words, *answer] or self.answers)


def content_key(*parts: str) -> str:
    """Hash what a document is about, ignoring case and white space, so that copies get the same key."""
    text = "\x1f".join(" ".join(p.lower().split()) for p in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_documents(documents: Sequence[Document]) -> str:
    """Hash of everything that documents say, in their order."""
    total = hashlib.sha256()
    for document in documents:
        total.update(repr(document).encode())
    return total.hexdigest()[:16]


@dataclass(frozen=True)
class ReferenceSplit:
    """Documents that may be searched, calibrated and trained on."""

    documents: tuple[Document, ...]
    name: str = "reference"

    def __len__(self) -> int:
        return len(self.documents)

    def select_indices(self, indices: Sequence[int]) -> ReferenceSplit:
        """Return the documents at ``indices``, still a reference split."""
        return ReferenceSplit(tuple(self.documents[i] for i in indices), self.name)


@dataclass(frozen=True)
class FrozenChoice:
    """Proof that the choice of experts is made and written down; it opens the reported split."""

    digest: str


@dataclass(frozen=True)
class ReportedSplit:
    """Documents that are only reported on: closed until the choice is frozen."""

    _documents: tuple[Document, ...] = field(repr=False)
    name: str = "reported"

    def __len__(self) -> int:
        return len(self._documents)

    def content_keys(self) -> set[str]:
        """Content keys, for checking that the two splits share nothing."""
        return {d.key for d in self._documents}

    def document_kinds(self) -> list[str]:
        """Kinds of documents, in order of first appearance."""
        return list(dict.fromkeys(d.kind for d in self._documents))

    def content_digest(self) -> str:
        """Hash of everything the documents say, for noticing that they changed; it shows none of them."""
        return digest_documents(self._documents)

    def filter_documents(self, wanted: Callable[[Sequence[Document]], Sequence[bool]]) -> ReportedSplit:
        """The documents that a test of all of them wants, as closed as before; it learns nothing of how they score."""
        kept = zip(self._documents, wanted(self._documents), strict=True)
        return ReportedSplit(tuple(document for document, keep in kept if keep), self.name)

    def open(self, choice: FrozenChoice) -> tuple[Document, ...]:
        """Return the documents, once the choice of experts is frozen.

        Raises:
            SplitError: When no frozen choice is shown.
        """
        if not isinstance(choice, FrozenChoice):
            raise SplitError(
                f"The reported split {self.name!r} was asked for with {type(choice).__name__} in hand. It "
                "opens only with a FrozenChoice, which exists once every expert is chosen; search on the "
                "ReferenceSplit instead."
            )
        return self._documents


def require_reference(split: object, what: str) -> ReferenceSplit:
    """Return ``split`` if it is a reference split, else raise: nothing is chosen on the reported one."""
    if not isinstance(split, ReferenceSplit):
        raise SplitError(
            f"{what} takes a ReferenceSplit, but got {type(split).__name__}. Documents that are reported "
            "on must not choose, calibrate or train anything."
        )
    return split


def join_copies(documents: Sequence[Document]) -> list[Document]:
    """Give documents that are copies of each other (`copy_names`), or share a key, one key; others stay as they are."""
    names = copy_names([document.question_answer_words() for document in documents])
    for own, document in zip(names, documents, strict=True):
        own |= {("key", key) for key in (document.key, document.row_key) if key}
    label, key = cluster_labels(names), dict[int, str]()
    for document, cluster in zip(documents, label, strict=True):
        key[cluster] = min(key.get(cluster, document.key), document.key)
    return [
        document
        if document.key == key[cluster]
        else replace(document, key=key[cluster], row_key=document.row_key or document.key)
        for document, cluster in zip(documents, label, strict=True)
    ]


def join_splits(
    references: Sequence[ReferenceSplit], reported: Sequence[ReportedSplit]
) -> tuple[list[ReferenceSplit], list[ReportedSplit]]:
    """Join the copies in all these splits (`join_copies`), and drop reference documents that any of them reports on.

    Gives the splits in their order; those of reported documents as closed as before, and with all their documents.
    """
    closed = [document for split in reported for document in split._documents]
    joined = iter(join_copies([*(d for split in references for d in split.documents), *closed]))
    first = [tuple(next(joined) for _ in split.documents) for split in references]
    second = [ReportedSplit(tuple(next(joined) for _ in split._documents), split.name) for split in reported]
    keys = {key for split in second for key in split.content_keys()}
    kept = [tuple(d for d in documents if d.key not in keys) for documents in first]
    return [ReferenceSplit(documents, s.name) for documents, s in zip(kept, references, strict=True)], second


def check_disjoint(
    name: str, reference: ReferenceSplit, reported: ReportedSplit
) -> tuple[ReferenceSplit, ReportedSplit]:
    """Drop reference documents that also stand in the reported split, under whatever key; refuse when none is left.

    Raises:
        DataError: When a split is empty, or the reference split is the reported one.
    """
    if not len(reference) or not len(reported):
        empty = "reference" if not len(reference) else "reported"
        raise DataError(
            f"Domain {name!r}: the {empty} split has no documents (reference {len(reference)}, reported "
            f"{len(reported)}). Check the task's files and --limit."
        )
    (kept,), (joined,) = join_splits([reference], [reported])
    if not len(kept):
        raise DataError(
            f"Domain {name!r}: all {len(reference)} reference documents also stand in the reported split. "
            "What is searched on cannot be reported on; give the task a reference split of its own."
        )
    return kept, joined
