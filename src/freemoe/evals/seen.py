"""What the making of an artefact has seen, as hashes, so that no later evaluation calls it held out.

Hashes of 8 bytes each, sorted, in one small file that the artefact's manifest names:

- *keys*: content keys of all documents, which a carve with any seed keeps together;
- *questions*: a question's own words with its right answer, and without it, for the same question in another file, under
  another key or in another shape; what is answered freely counts as the same question whatever the answer;
- *phrases*: the words of a question, or of a short one with its answer, by which it is found inside a text;
- *runs*: every run of `RUN` words of plain text, for blocks that overlap without being equal (another offset, tokenizer,
  limit or share); and whole lines of at least `LINE` characters that are shorter than a run.

A run that stands in the artefact's own reported part as well (boilerplate, a template's words) cannot tell one part from the
other, and is left out; a question never is. Of many runs the `MOST` smallest hashes are kept, an even sample: `SeenHashes.share` says
which share that is. A wrong match is as likely as two 64-bit hashes that fall together: below ``MOST / 2 ** 64`` for each run
looked up.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from freemoe.core.errors import ArtifactError
from freemoe.evals.tasks.documents import Document
from freemoe.text.words import about_words, question_words, split_words

RUN = 13
"""Words of a run: as many as GPT-3's authors took to tell copies from turns of phrase (Brown et al. 2020, app. C)."""
LINE = 40  # Characters of a line that is its own evidence; `text_tasks` drops shared lines from this length on
MOST = 1 << 19  # Most runs that a file holds: 4 MiB
WHY = ("key", "question", "text")

Hashes = NDArray[np.uint64]

_FEWEST = 3  # words below which the end of a prompt is no question
_SHORT, _LONG = 4, 8  # words of a question with its answer, and without it, that are found inside a text
_LONGEST = 4096  # words of a question that are looked at, from its end
_ANY = ("\x00",)  # stands for every answer where a question is answered freely
_BASE = np.uint64(0x9E3779B97F4A7C15)
_NONE: Hashes = np.zeros(0, np.uint64)


def _hash_text(text: str, kind: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=kind).digest())


@lru_cache(maxsize=1 << 17)
def _word_hash(word: str) -> int:
    return _hash_text(word, b"word")


def run_hashes(words: Sequence[str], lengths: Sequence[int] = (RUN,)) -> Hashes:
    """Hash of every ``RUN`` words in a row, in their order: ``(W - RUN + 1,)``, or none for fewer words.

    ``words``: the words, W of them. ``lengths``: other lengths of runs, rising; the hashes of all are returned one length
    after the other.
    """
    single = np.array([_word_hash(word) for word in words], np.uint64)
    total, parts = np.zeros(len(words) + 1, np.uint64), [_NONE]
    for length in range(1, min(max(lengths, default=0), len(words)) + 1):
        total = total[:-1] * _BASE + single[length - 1 :]
        if length in lengths:
            # The last steps of splitmix64 spread the sums evenly, so that the smallest are a fair sample.
            mixed = (total ^ (total >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            parts.append(mixed ^ (mixed >> np.uint64(31)))
    return np.concatenate(parts)


def text_hashes(text: str) -> Hashes:
    """Runs of a plain text, and its whole lines that are too short to hold a run."""
    lines = []
    for line in text.splitlines():
        found = split_words(line)
        plain = " ".join(found)
        if len(found) < RUN and len(plain) >= LINE:
            lines.append(_hash_text(plain, b"line"))
    return np.unique(np.concatenate([run_hashes(split_words(text)), np.array(lines, np.uint64)]))


def ending_hashes(prompt: Sequence[str], answer: Sequence[str]) -> Iterator[int]:
    """Hashes of an answer with the last word of its prompt, the last two, and so on to the whole prompt.

    A question is found at the end of a prompt whatever stands before it.
    """
    state = hashlib.blake2b(digest_size=8, person=b"question")
    state.update("\x1f".join([*answer, ""]).encode("utf-8", "surrogatepass") + b"\x1e")
    for word in prompt[: -_LONGEST - 1 : -1]:
        state.update(word.encode("utf-8", "surrogatepass") + b"\x1f")
        yield int.from_bytes(state.digest())


@dataclass(frozen=True, eq=False)
class SeenHashes:
    """Hashes of everything that the making of an artefact has seen."""

    keys: Hashes = field(default_factory=_NONE.copy)  # ``(K,)`` uint64, sorted, as are the others
    questions: Hashes = field(default_factory=_NONE.copy)  # ``(Q,)``
    runs: Hashes = field(default_factory=_NONE.copy)  # ``(R,)``
    phrases: Hashes = field(default_factory=_NONE.copy)  # ``(P,)``
    lengths: tuple[int, ...] = ()  # How many words phrases have, rising
    documents: int = 0  # Documents (for training text: passages) that were seen
    longest: int = 0  # Words of the longest question
    share: float = 1.0  # Of all runs, those that are kept

    @classmethod
    def from_documents(cls, documents: Sequence[Document], apart: Sequence[Document] = ()) -> SeenHashes:
        """Of a domain's reference documents.

        ``apart``: the domain's own reported documents.
        """
        texts, others = ([d.answers[0] for d in side if d.kind == "text"] for side in (documents, apart))
        asked = cls._from_question_words((*d.question_answer_words(), question_words(d.reference)) for d in documents)
        keys = _sorted_hashes(_hash_text(key, b"key") for d in documents for key in {d.key, d.row_key or d.key})
        return replace(cls.from_texts(texts, others).union_with(asked), keys=keys, documents=len(documents))

    @classmethod
    def from_questions(cls, about: Iterable[tuple[str, ...]]) -> SeenHashes:
        """Of the questions of rows that were read as text, each as `TrainingDocument.about`."""
        return cls._from_question_words((*about_words(parts), []) for parts in about)

    @classmethod
    def _from_question_words(cls, questions: Iterable[tuple[list[str], list[str], list[str]]]) -> SeenHashes:
        """Of the words of each question, of the right answer where that belongs to it, and of what answered it."""
        exact: set[int] = set()
        phrases: dict[int, set[int]] = {}
        longest = 0
        for question, answer, reference in questions:
            asked, told = question[-_LONGEST:], answer or reference
            if not asked:
                continue
            longest = max(longest, len(asked))
            kinds = [(), answer or _ANY, *([told] if len(told) <= RUN else [])]
            exact |= {list(ending_hashes(asked, kind))[-1] for kind in kinds}
            phrase = asked if len(asked) >= _LONG else asked + told[:RUN]
            if len(phrase) >= _LONG or (told and len(phrase) >= _SHORT):
                phrases.setdefault(len(phrase), set()).update(run_hashes(phrase, [len(phrase)]).tolist())
        return cls(
            questions=_sorted_hashes(exact),
            phrases=_sorted_hashes(hash for found in phrases.values() for hash in found),
            lengths=tuple(sorted(phrases)),
            longest=longest,
        )

    @classmethod
    def from_texts(cls, texts: Iterable[str], apart: Iterable[str] = (), most: int = MOST) -> SeenHashes:
        """Of pieces of plain text; arguments as in `of`."""
        told = _merge_hashes(text_hashes(text) for text in apart)
        count, kept, share = 0, _NONE, 1.0
        waiting: list[Hashes] = []

        def merge_waiting() -> None:
            nonlocal kept, share
            kept, share = _smallest_hashes(np.setdiff1d(_merge_hashes([kept, *waiting]), told), most, share)
            waiting.clear()

        for text in texts:
            count += 1
            waiting.append(text_hashes(text))
            if sum(map(len, waiting)) > 4 * most:
                merge_waiting()
        merge_waiting()
        return cls(runs=kept, documents=count, share=share)

    def union_with(self, other: SeenHashes, most: int = MOST) -> SeenHashes:
        """Hashes of what either has seen, at most ``most`` of them."""
        # The finer sample is thinned to the coarser one's share, so that the union is an even sample again.
        share = min(self.share, other.share)
        runs = np.union1d(_below_share(self.runs, share), _below_share(other.runs, share))
        runs, share = _smallest_hashes(runs, most, share)
        return SeenHashes(
            np.union1d(self.keys, other.keys),
            np.union1d(self.questions, other.questions),
            runs,
            np.union1d(self.phrases, other.phrases),
            tuple(sorted({*self.lengths, *other.lengths})),
            self.documents + other.documents,
            max(self.longest, other.longest),
            share,
        )

    def has_question(self, text: str, answer: str | None) -> bool:
        """Whether a prompt ends in a question that was seen: with this answer, or where it is answered freely (None) with any."""
        if not len(self.questions):
            return False
        answers = [()] if answer is None else [question_words(answer), split_words(answer), _ANY]
        prompts = {
            tuple(split(text)) for split in (question_words, split_words)
        }  # the second: as older versions hashed them
        for prompt, told in itertools.product(prompts, answers):
            hashes = np.fromiter(ending_hashes(prompt[-self.longest :], told), np.uint64)
            # The last word or two of a longer prompt are no question.
            if _isin_sorted(hashes[min(len(prompt), _FEWEST) - 1 :], self.questions).any():
                return True
        return False

    def has_text(self, text: str) -> bool:
        """Whether a text shares a run of words, or a line, with one that was seen, or holds a question that was."""
        return self.has_phrase(text) or bool(_isin_sorted(text_hashes(text), self.runs).any())

    def has_phrase(self, text: str) -> bool:
        """Whether a text holds a question that was seen, a short one with its answer."""
        return bool(_isin_sorted(run_hashes(question_words(text), self.lengths), self.phrases).any())

    def seen_reason(self, document: Document) -> str:
        """Why a document counts as seen, one of ``WHY``, or nothing where it does not; shown examples do not count."""
        keys = np.array([_hash_text(key, b"key") for key in (document.key, document.row_key)], np.uint64)
        if _isin_sorted(keys, self.keys).any():
            return "key"
        # What it asks and its right answer (None where it is answered freely): as its row has it, and as it is put.
        asked = [(document.about[0], " ".join(document.about[1:]) or None)] if document.about else []
        if document.prompt:
            asked.append((document.prompt, document.reference if document.kind in ("choice", "target") else None))
        if any(self.has_question(*question) for question in asked):
            return "question"
        if document.kind == "text":
            inside = self.has_phrase(f"{document.prompt} {document.answers[0]}") or self.has_text(document.answers[0])
            return "text" if inside else ""
        said = f"{document.about[0] if document.about else document.prompt} {document.reference}"
        return "text" if _isin_sorted(text_hashes(said), self.runs).any() else ""

    def to_bytes(self) -> bytes:
        """As a safetensors file; equal hashes give equal bytes."""
        about = {"documents": self.documents, "longest": self.longest, "share": self.share, "run": RUN, "line": LINE}
        about |= {"lengths": self.lengths} if self.lengths else {}
        # Not as the file's own metadata: these are written in no certain order.
        text = np.frombuffer(json.dumps(about, sort_keys=True).encode(), np.uint8)
        tensors = {"keys": self.keys, "questions": self.questions, "runs": self.runs, "about": text}
        return save(tensors | ({"phrases": self.phrases} if self.lengths else {}))

    @classmethod
    def from_bytes(cls, data: bytes) -> SeenHashes:
        """Read what `to_bytes` wrote.

        Raises:
            ArtifactError: Something else, or hashes of runs of another length.
        """
        try:
            tensors = load(data)
            head = json.loads(tensors["about"].tobytes())
            run, line = int(head["run"]), int(head["line"])
            found = cls(
                tensors["keys"],
                tensors["questions"],
                tensors["runs"],
                tensors.get("phrases", _NONE),  # files of older versions have none
                tuple(map(int, head.get("lengths", ()))),
                int(head["documents"]),
                int(head["longest"]),
                float(head["share"]),
            )
        except Exception as error:  # safetensors raises a kind of its own
            raise ArtifactError(f"The hashes of seen documents cannot be read ({error!r}). Build it anew.") from None
        if (run, line) != (RUN, LINE):
            raise ArtifactError(
                f"The hashes of seen text are of runs of {run} words and lines of {line} characters; this freemoe compares "
                f"{RUN} and {LINE}. Install the freemoe that wrote them, or build it anew."
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """Counts, for the manifest and the result."""
        return {
            "documents": self.documents,
            "hashes": {"keys": len(self.keys), "questions": len(self.questions), "runs": len(self.runs)},
            "share_of_runs": self.share,
        }


def _sorted_hashes(hashes: Iterable[int]) -> Hashes:
    return np.unique(np.fromiter(hashes, np.uint64))


def _merge_hashes(parts: Iterable[Hashes]) -> Hashes:
    return np.unique(np.concatenate([_NONE, *parts]))


def _below_share(hashes: Hashes, share: float) -> Hashes:
    return hashes if share >= 1 else hashes[hashes < np.uint64(int(share * 2.0**64))]


def _smallest_hashes(hashes: Hashes, most: int, share: float) -> tuple[Hashes, float]:
    """The smallest of sorted hashes below a share of their range, ``most`` at most, and the share that they are."""
    hashes = _below_share(hashes, share)
    if len(hashes) <= most:
        return hashes, share
    return hashes[:most], float(hashes[most]) / 2.0**64


def _isin_sorted(hashes: Hashes, among: Hashes) -> NDArray[np.bool_]:
    """Which hashes stand among sorted others."""
    if not len(among) or not len(hashes):
        return np.zeros(len(hashes), bool)
    return among[np.minimum(np.searchsorted(among, hashes), len(among) - 1)] == hashes
