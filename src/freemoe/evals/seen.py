"""What the making of an artefact has seen, as hashes, so that no later evaluation calls it held out.

Three kinds of hash, 8 bytes each, sorted, in one small file that the artefact's manifest names:

- *keys*: content keys of all documents, which a carve with any seed keeps together;
- *questions*: a question's own words (without the few-shot examples before them) with its right answer, for the same
  question in another file or under another key;
- *runs*: every run of `RUN` words of plain text, for blocks that overlap without being equal (another offset, tokenizer,
  limit or share); and whole lines of at least `LINE` characters that are shorter than a run.

What stands in the artefact's own reported part as well (boilerplate, a template's words) cannot tell one part from the other,
and is left out. Of many runs the `MOST` smallest hashes are kept, an even sample: `Seen.share` says which share that is.
A wrong match is as likely as two 64-bit hashes that fall together: below ``MOST / 2 ** 64`` for each run looked up.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from freemoe.core.errors import ArtifactError
from freemoe.evals.tasks.documents import Document

RUN = 13
"""Words of a run: as many as GPT-3's authors took to tell copies from turns of phrase (Brown et al. 2020, app. C)."""
LINE = 40
"""Characters of a line that is its own evidence; `text_tasks` drops shared lines from this length on."""
MOST = 1 << 19
"""Most runs that a file holds: 4 MiB."""
WHY = ("key", "question", "text")

Hashes = NDArray[np.uint64]

# Scripts without spaces between words: every character counts as a word there.
_DENSE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_DENSE}]|[^\W_{_DENSE}]+")
_FEWEST = 3  # words of its own, below which a question is known by its whole prompt
_LONGEST = 4096  # words of a question that are looked at, from its end
_BASE = np.uint64(0x9E3779B97F4A7C15)
_NONE: Hashes = np.zeros(0, np.uint64)


def words(text: str) -> list[str]:
    """The words of a text in lower case; punctuation and white space only part them."""
    return _WORD.findall(text.lower())


def _hash(text: str, kind: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=kind).digest())


@lru_cache(maxsize=1 << 17)
def _word_hash(word: str) -> int:
    return _hash(word, b"word")


def run_hashes(found: Sequence[str]) -> Hashes:
    """Hash of every ``RUN`` words in a row, in their order: ``(W - RUN + 1,)``, or none for fewer words."""
    count = len(found) - RUN + 1
    if count < 1:
        return _NONE
    single = np.array([_word_hash(word) for word in found], np.uint64)
    total = np.zeros(count, np.uint64)
    for i in range(RUN):
        total = total * _BASE + single[i : i + count]
    # The last steps of splitmix64 spread the sums evenly, so that the smallest are a fair sample.
    total = (total ^ (total >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    total = (total ^ (total >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return total ^ (total >> np.uint64(31))


def text_hashes(text: str) -> Hashes:
    """Runs of a plain text, and its whole lines that are too short to hold a run."""
    lines = []
    for line in text.splitlines():
        found = words(line)
        plain = " ".join(found)
        if len(found) < RUN and len(plain) >= LINE:
            lines.append(_hash(plain, b"line"))
    return np.unique(np.concatenate([run_hashes(words(text)), np.array(lines, np.uint64)]))


def endings(prompt: Sequence[str], answer: Sequence[str]) -> Iterator[int]:
    """Hashes of an answer with the last word of its prompt, the last two, and so on to the whole prompt.

    A question is found at the end of a prompt whatever stands before it.
    """
    state = hashlib.blake2b(digest_size=8, person=b"question")
    state.update("\x1f".join([*answer, ""]).encode("utf-8", "surrogatepass") + b"\x1e")
    for word in prompt[: -_LONGEST - 1 : -1]:
        state.update(word.encode("utf-8", "surrogatepass") + b"\x1f")
        yield int.from_bytes(state.digest())


def own_words(documents: Sequence[Document]) -> list[list[str]]:
    """Words of every prompt without what all prompts of its task and field begin with: few-shot examples, a template."""
    found = [words(d.prompt) for d in documents]
    groups: dict[tuple[str, str], list[int]] = {}
    for i, document in enumerate(documents):
        groups.setdefault((document.task, document.field), []).append(i)
    own = list(found)
    for members in groups.values():
        first, last = min(found[i] for i in members), max(found[i] for i in members)
        # What the first and the last in order begin with, all between them begin with.
        shared = next(
            (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
        )
        for i in members:
            # Alone, a prompt's last paragraph is as good a guess as any.
            own[i] = found[i][shared:] if len(members) > 1 else words(documents[i].prompt.rsplit("\n\n", 1)[-1])
    return own


def answer_words(document: Document) -> list[str]:
    """Words of the answer that belongs to a question's identity: none where answers are generated."""
    return words(document.reference) if document.kind in ("choice", "target") else []


@dataclass(frozen=True, eq=False)
class Seen:
    """Hashes of everything that the making of an artefact has seen.

    Attributes:
        keys: ``(K,)`` uint64, sorted, as are the others.
        questions: ``(Q,)``.
        runs: ``(R,)``.
        documents: Documents (for training text: passages) that were seen.
        longest: Words of the longest question.
        share: Of all runs, those that are kept.
    """

    keys: Hashes = field(default_factory=_NONE.copy)
    questions: Hashes = field(default_factory=_NONE.copy)
    runs: Hashes = field(default_factory=_NONE.copy)
    documents: int = 0
    longest: int = 0
    share: float = 1.0

    @classmethod
    def of(cls, documents: Sequence[Document], apart: Sequence[Document] = (), most: int = MOST) -> Seen:
        """Of a domain's reference documents.

        Args:
            documents: What was seen.
            apart: The domain's own reported documents.
            most: Runs that are kept at most.
        """
        asked, told = _questions(documents), _questions(apart)
        texts, others = ([d.answers[0] for d in side if d.kind == "text"] for side in (documents, apart))
        text = cls.of_texts(texts, others, most)
        return cls(
            _sorted(_hash(d.key, b"key") for d in documents),
            np.setdiff1d(_sorted(asked), _sorted(told)),
            text.runs,
            len(documents),
            max(asked.values(), default=0),
            text.share,
        )

    @classmethod
    def of_texts(cls, texts: Iterable[str], apart: Iterable[str] = (), most: int = MOST) -> Seen:
        """Of pieces of plain text; arguments as in `of`."""
        told = _joined(text_hashes(text) for text in apart)
        count, kept, share = 0, _NONE, 1.0
        waiting: list[Hashes] = []

        def settle() -> None:
            nonlocal kept, share
            kept, share = _smallest(np.setdiff1d(_joined([kept, *waiting]), told), most, share)
            waiting.clear()

        for text in texts:
            count += 1
            waiting.append(text_hashes(text))
            if sum(map(len, waiting)) > 4 * most:
                settle()
        settle()
        return cls(runs=kept, documents=count, share=share)

    def joined(self, other: Seen, most: int = MOST) -> Seen:
        """What either has seen."""
        # The finer sample is thinned to the coarser one's share, so that the union is an even sample again.
        share = min(self.share, other.share)
        runs = np.union1d(_below(self.runs, share), _below(other.runs, share))
        runs, share = _smallest(runs, most, share)
        return Seen(
            np.union1d(self.keys, other.keys),
            np.union1d(self.questions, other.questions),
            runs,
            self.documents + other.documents,
            max(self.longest, other.longest),
            share,
        )

    def has_question(self, prompt: Sequence[str], answer: Sequence[str]) -> bool:
        """Whether a prompt ends in a question that was seen with this answer."""
        if not len(self.questions):
            return False
        hashes = np.fromiter(endings(prompt[-self.longest :], answer), np.uint64)
        return bool(_known(hashes, self.questions).any())

    def has_text(self, text: str) -> bool:
        """Whether a text shares a run of words, or a line, with one that was seen."""
        return bool(_known(text_hashes(text), self.runs).any())

    def reasons(self, documents: Sequence[Document]) -> list[str]:
        """Why each document counts as seen, one of ``WHY``, or nothing where it does not.

        Few-shot examples in a prompt do not count.
        """
        found = []
        for document, own in zip(documents, own_words(documents), strict=True):
            if _known(np.array([_hash(document.key, b"key")], np.uint64), self.keys).any():
                found.append("key")
            elif document.kind == "text":
                found.append("text" if self.has_text(document.answers[0]) else "")
            elif self.has_question(words(document.prompt), answer_words(document)):
                found.append("question")
            else:
                runs = run_hashes([*own, *words(document.reference)])
                found.append("text" if _known(runs, self.runs).any() else "")
        return found

    def overlaps(self, document: Document) -> bool:
        """Whether one document was seen."""
        return bool(self.reasons([document])[0])

    def to_bytes(self) -> bytes:
        """As a safetensors file; equal hashes give equal bytes."""
        about = {"documents": self.documents, "longest": self.longest, "share": self.share, "run": RUN, "line": LINE}
        # Not as the file's own metadata: these are written in no certain order.
        text = np.frombuffer(json.dumps(about, sort_keys=True).encode(), np.uint8)
        return save({"keys": self.keys, "questions": self.questions, "runs": self.runs, "about": text})

    @classmethod
    def from_bytes(cls, data: bytes) -> Seen:
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

    def describe(self) -> dict[str, Any]:
        """Counts, for the manifest and the result."""
        return {
            "documents": self.documents,
            "hashes": {"keys": len(self.keys), "questions": len(self.questions), "runs": len(self.runs)},
            "share_of_runs": self.share,
        }


def _questions(documents: Sequence[Document]) -> dict[int, int]:
    """Hash of every question, and its length in words."""
    found = {}
    for document, rest in zip(documents, own_words(documents), strict=True):
        own = rest if len(rest) >= _FEWEST else words(document.prompt)
        if document.kind != "text" and own:
            *_, last = endings(own, answer_words(document))
            found[last] = min(len(own), _LONGEST)
    return found


def _sorted(hashes: Iterable[int]) -> Hashes:
    return np.unique(np.fromiter(hashes, np.uint64))


def _joined(parts: Iterable[Hashes]) -> Hashes:
    return np.unique(np.concatenate([_NONE, *parts]))


def _below(hashes: Hashes, share: float) -> Hashes:
    return hashes if share >= 1 else hashes[hashes < np.uint64(int(share * 2.0**64))]


def _smallest(hashes: Hashes, most: int, share: float) -> tuple[Hashes, float]:
    """The smallest of sorted hashes below a share of their range, ``most`` at most, and the share that they are."""
    hashes = _below(hashes, share)
    if len(hashes) <= most:
        return hashes, share
    return hashes[:most], float(hashes[most]) / 2.0**64


def _known(hashes: Hashes, among: Hashes) -> NDArray[np.bool_]:
    """Which hashes stand among sorted others."""
    if not len(among) or not len(hashes):
        return np.zeros(len(hashes), bool)
    return among[np.minimum(np.searchsorted(among, hashes), len(among) - 1)] == hashes
