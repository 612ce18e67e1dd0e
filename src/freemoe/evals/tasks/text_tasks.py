"""Plain text as a task: blocks of tokens, and as figure the mean negative log-likelihood in nats per token.

One file is cut in two: its contiguous tail is reported, the rest is reference, and the paragraph between them
belongs to neither. Lines of the reference that also stand in the reported part (once case and punctuation are
ignored) are dropped from the reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from freemoe.core.errors import DataError
from freemoe.evals.tasks.documents import Document, content_key
from freemoe.evals.tasks.task import Response, per_token
from freemoe.text.documents import read_documents
from freemoe.text.files import pack, paragraphs, spread

BLOCK = 256
CAPS = {"reference": 600, "reported": 300}
# No tokenizer in use makes a token of more characters than this on average, so that much text is always
# enough.
CHARACTERS_PER_TOKEN = 16
SHORTEST_LINE = 40


def _plain(line: str) -> str:
    return re.sub(r"[\W_]+", " ", line.lower()).strip()


def drop_shared_lines(reference: Sequence[str], reported: Sequence[str]) -> tuple[list[str], int]:
    """Drop from the reference every line of some length that the reported part has too.

    Returns:
        The paragraphs that remain, and how many lines were dropped.
    """
    known = {_plain(line) for piece in reported for line in piece.splitlines() if len(line) >= SHORTEST_LINE}
    kept, dropped = [], 0
    for piece in reference:
        lines = piece.splitlines(keepends=True)
        left = [line for line in lines if len(line) < SHORTEST_LINE or _plain(line) not in known]
        dropped += len(lines) - len(left)
        if "".join(left).strip():
            kept.append("".join(left))
    return kept, dropped


def split_tail(pieces: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Cut paragraphs into a head and a tail of about ``share`` of the characters, one paragraph between."""
    total = sum(map(len, pieces))
    at = 0
    for cut, piece in enumerate(pieces):
        at += len(piece)
        if at >= total * (1 - share):
            return list(pieces[:cut]), list(pieces[cut + 1 :])
    return list(pieces), []


def thin(pieces: Sequence[str], characters: int, runs: int = 100) -> list[str]:
    """Evenly spaced runs of paragraphs, ``characters`` in all, so that a huge file need not be tokenised."""
    total = sum(map(len, pieces))
    if total <= characters:
        return list(pieces)
    kept, at = [], 0
    for piece in pieces:
        # Position within the current run's stride of the whole text.
        if (at * runs / total) % 1.0 < characters / total:
            kept.append(piece)
        at += len(piece)
    return kept


@dataclass
class TextTask:
    """Blocks of plain text.

    Args:
        name: Name within its domain.
        documents: The text, or the reference text when ``test_documents`` is given.
        test_documents: The reported text.
        source: Where it comes from, for notes and errors.
        tokenizer: Tokenizer of the model to be scored: blocks are blocks of its tokens.
        length: Tokens of a block.
        share: Share of one text's characters, at its end, that is reported.
        limit: Blocks of each split at most (600 and 300 at most in any case).
        given: Tokens at a block's start that are context only; with 0 the beginning-of-text token stands before it.
        caps: Most blocks of each split, whatever ``limit`` says.
        metric: Name of the figure: nats per scored token.
    """

    name: str
    documents: Sequence[str]
    test_documents: Sequence[str] | None = None
    source: str = "text"
    tokenizer: Any = None
    length: int = BLOCK
    share: float = 0.3
    limit: int | None = None
    given: int = 0
    caps: Mapping[str, int] = field(default_factory=lambda: CAPS)
    metric: str = "nll"
    runs_code: bool = False

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise DataError(
                f"Task {self.name!r} cuts text into blocks of tokens and was given no tokenizer; pass the "
                "model's: load_domain(..., tokenizer=tokenizer)."
            )
        pieces = paragraphs(self.documents)
        how = self.source
        if self.test_documents is None:
            reference, reported = split_tail(pieces, self.share)
            how += f": reported its tail ({self.share:.0%}), reference the rest, one paragraph between"
        else:
            reference, reported = pieces, paragraphs(self.test_documents)
        reference, dropped = drop_shared_lines(reference, reported)
        if not reference and dropped:
            raise DataError(
                f"Task {self.name!r}: every line of the reference part of {self.source} also stands in the reported "
                "part. What is searched on cannot be reported on; give it other text."
            )
        if dropped:
            how += f"; {dropped} reference lines dropped as also reported"
        self._reference, whole = self._blocks(reference, "reference")
        self._reported, whole_reported = self._blocks(reported, "reported")
        self.note = (
            f"{self.name}: {how}; blocks of {self.length} tokens, reference {len(self._reference)} of "
            f"{whole}, reported {len(self._reported)} of {whole_reported}, evenly spaced"
            + (f", the first {self.given} given and not scored" if self.given else "")
        )

    def _blocks(self, pieces: list[str], side: str) -> tuple[list[Document], int]:
        cap = min(self.caps[side], self.limit or self.caps[side])
        pieces = thin(pieces, self.caps[side] * self.length * CHARACTERS_PER_TOKEN)
        blocks = pack(self.tokenizer, pieces, self.length)
        if not blocks:
            raise DataError(
                f"Task {self.name!r}: the {side} part of {self.source} ({sum(map(len, pieces))} "
                f"characters) gives no block of {self.length} tokens. Give more text (one file is cut at "
                "the end of a paragraph or line), or name two files: text:FILE::TESTFILE."
            )
        documents = [
            Document(
                task=self.name,
                id=f"{side}:{index}",
                key=content_key(pieces[blocks[index].paragraph], str(blocks[index].run)),
                kind="text",
                prompt="",
                answers=(blocks[index].text,),
                reference=blocks[index].text,
                index=index,
                tokens=blocks[index].tokens,
                given=self.given,
            )
            for index in spread(len(blocks), cap)
        ]
        return documents, len(blocks)

    def reference(self) -> list[Document]:
        """Blocks that may be searched on."""
        return list(self._reference)

    def reported(self) -> list[Document]:
        """Blocks that are only reported on."""
        return list(self._reported)

    def grade(self, document: Document, responses: Sequence[Response]) -> dict[str, float]:
        """Nats per scored token, under the name of the metric."""
        return {self.metric: per_token(document, responses)}


def text_task(
    name: str,
    source: str,
    test_source: str | None = None,
    *,
    tokenizer: Any = None,
    limit: int | None = None,
    given: int = 0,
) -> TextTask:
    """A text task from one source, whose tail is reported, or from two."""
    about = source if test_source is None else f"reference {source}, reported {test_source}"
    first, second = (None if s is None else read_documents(f"text:{s}") for s in (source, test_source))
    return TextTask(name, first or [], second, source=about, tokenizer=tokenizer, limit=limit, given=given)
