"""Text as token blocks for training: documents apart from each other, and parts that never mix.

A passage is a document, or a run of paragraphs of a long one. Every passage begins with the beginning-of-text token and
at position 0, and lies in one part (train, held-out or test) by its content alone, so that copies of a passage, and of
the question that it asks, cannot stand on both sides.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import DataError
from freemoe.text.files import split_paragraphs
from freemoe.text.groups import LOOSE, TextPassage, cluster_texts, divide_by_source, passage_clusters

log = logging.getLogger(__name__)

PASSAGE_CHARACTERS = 4000
TOKENS_AT_ONCE = 4096
"""Tokens of one forward pass, where nothing else bounds them: activations grow with them, not with rows."""


@dataclass(frozen=True)
class PackedBlocks:
    """Rows of token ids, all of one length."""

    ids: Tensor  # (rows, length) int64
    # (rows, length) int64, counted anew at every passage and at every row. Where they fall back to 0 transformers keeps
    # tokens from looking at the passage before (no attention mask, no cache)
    positions: Tensor
    groups: tuple[str, ...] = ()  # Of every row the group that most of its tokens come from; empty where nobody says

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def row_length(self) -> int:
        """Number of tokens in a row."""
        return self.ids.shape[1]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all rows."""
        return self.ids.numel()

    def select_rows(self, which: Sequence[int] | Tensor) -> PackedBlocks:
        """Some of the rows, in the order given."""
        index = torch.as_tensor(which, dtype=torch.int64)
        return PackedBlocks(
            self.ids[index], self.positions[index], tuple(self.groups[i] for i in index) if self.groups else ()
        )

    def group_numbers(self) -> list[int]:
        """Number of every row's group: rows of one article are no independent documents; each its own where nobody says."""
        numbers: dict[str, int] = {}
        return [numbers.setdefault(name, len(numbers)) for name in self.groups or map(str, range(len(self)))]

    @property
    def rows_at_once(self) -> int:
        """Rows that hold ``TOKENS_AT_ONCE`` tokens at most; one where a row is longer."""
        return max(1, TOKENS_AT_ONCE // self.row_length)

    def iter_batches(self, tokens: int | None = None) -> Iterator[PackedBlocks]:
        """All rows in order, as many at a time as have together at most ``tokens`` (``TOKENS_AT_ONCE``); at least one."""
        size = max(1, tokens // self.row_length) if tokens else self.rows_at_once
        for start in range(0, len(self), size):
            yield self.select_rows(range(start, min(start + size, len(self))))

    def prediction_mask(self) -> Tensor:
        """(rows, length - 1) bool: where the next token continues the same passage, so that predicting it makes sense."""
        return self.positions[:, 1:] > 0

    def next_tokens(self, device: Any) -> tuple[Tensor, Tensor]:
        """Where in (rows * length) the next token is `predicted`, and which it is: (n,) int64 each, on a device."""
        at = torch.nn.functional.pad(self.prediction_mask(), (0, 1)).flatten().nonzero()[:, 0]
        places, wanted = (t.to(device, non_blocking=True) for t in (at, self.ids.flatten()[at + 1]))
        return places, wanted


@dataclass(frozen=True)
class TextSplits:
    """Passages by what they are for."""

    train: list[str]  # A method learns from these
    held_out: list[str]  # Settle what training left open (K, thresholds, which of several results is kept)
    test: list[str]  # Are reported, and decide nothing

    def seen_questions(self) -> Iterator[tuple[str, ...]]:
        """The questions that methods and choices may see, of rows that ask one."""
        return (text.about for text in (*self.train, *self.held_out) if isinstance(text, TextPassage) and text.about)


def cut_passages(documents: Sequence[str], characters: int = PASSAGE_CHARACTERS) -> list[str]:
    """Cut long documents at paragraph ends into passages of about ``characters``; short ones stay whole.

    A passage lies in one group of `divide_by_source`, so that all of an article come into one part.
    """
    articles, unit = divide_by_source(documents)
    if unit.startswith(LOOSE):
        log.warning(
            "a text has %s; neighbours of one article may come into several parts, and figures may be too good.", unit
        )
    found: list[str] = []
    for article in articles:
        if len(article) <= characters:
            found += [article] if article.strip() else []
            continue
        current = ""
        for piece in split_paragraphs(article):
            current += piece
            if len(current) >= characters:
                found.append(TextPassage(current, article.about, article.group))
                current = ""
        if current.strip():
            found.append(TextPassage(current, article.about, article.group))
    return found


def split_passages(texts: Sequence[str], held_out: float = 0.1, test: float = 0.1, seed: int = 0) -> TextSplits:
    """Divide passages by a hash of seed and content; what belongs together (`passage_clusters`) stays in one part.

    ``held_out``: share of the held-out part, about.

    Raises:
        DataError: When a part stays empty.
    """
    parts = TextSplits([], [], [])
    label = passage_clusters(texts)
    drawn = {
        cluster: int.from_bytes(hashlib.sha256(f"{seed}/{text}".encode("utf-8", "surrogatepass")).digest()[:8]) / 2**64
        for cluster, text in cluster_texts(texts, label).items()
    }
    # In the order drawn, one for each part at least.
    order = sorted(drawn, key=lambda cluster: drawn[cluster])
    tests = min(max(1, sum(share < test for share in drawn.values())), max(1, len(drawn) - 2))
    others = max(1, min(sum(share < test + held_out for share in drawn.values()), len(drawn) - 1) - tests)
    parted = chain(repeat(parts.test, tests), repeat(parts.held_out, others), repeat(parts.train))
    of = dict(zip(order, parted, strict=False))
    for text, cluster in zip(texts, label, strict=True):
        of[cluster].append(text)
    empty = [name for name in ("train", "held_out", "test") if not getattr(parts, name)]
    if empty:
        raise DataError(
            f"{len(texts)} passages are too few to divide: nothing is left for {', '.join(empty)}. Give more text (a passage "
            f"is a document, or about {PASSAGE_CHARACTERS} characters of a long one)."
        )
    return parts


def join_passages(texts: Sequence[str]) -> list[str]:
    """Passages of one article or row as one text again, where they stand one behind the other."""
    numbered = [(_group_of(text, number), text) for number, text in enumerate(texts)]
    parted = groupby(numbered, key=operator.itemgetter(0))
    return [TextPassage("".join(text for _, text in own), (), group) for group, own in parted]


def pack_blocks(
    tokenizer: Any, texts: Sequence[str], length: int, what: str = "text", contiguous: bool = False
) -> PackedBlocks:
    """Tokenise passages and lay them one behind the other into rows; only the last tokens that fill no row are left out.

    ``contiguous``: every row lies within one passage; what fills no row of its own is left out, of each passage.

    Raises:
        DataError: When there are fewer tokens than one row.
    """
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    ids: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    for number, text in enumerate(texts):
        own = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if own[:1] != start:  # a chat template writes it itself
            own = start + own
        if contiguous:
            own = own[: len(own) // length * length]
        ids += own
        positions += range(len(own))
        sources += [number] * len(own)
    rows = len(ids) // length
    if rows == 0:
        raise DataError(
            f"The {what} has {len(ids)} tokens, which is less than one block of {length}. Give more text, or shorter blocks."
        )
    shape = (rows, length)
    place = torch.tensor(positions[: rows * length]).view(shape)
    # A passage that goes on in the next row counts from that row's start: no position is beyond the row.
    begins = torch.where(place == 0, torch.arange(length).expand(shape), 0).cummax(dim=1).values
    groups = tuple(
        Counter(_group_of(texts[n], n) for n in sources[row : row + length]).most_common(1)[0][0]
        for row in range(0, rows * length, length)
    )
    return PackedBlocks(
        torch.tensor(ids[: rows * length]).view(shape), torch.arange(length).expand(shape) - begins, groups
    )


def _group_of(text: str, number: int) -> str:
    return getattr(text, "group", "") or f"passage {number}"


def row_texts(tokenizer: Any, blocks: PackedBlocks) -> Iterator[str]:
    """The text of rows again, one piece per passage, without special tokens.

    A row that does not begin with the beginning-of-text token goes on from the row before it, as far as a tokenizer with
    such a token lets us know.
    """
    piece: list[int] = []
    for ids, positions in zip(blocks.ids.tolist(), blocks.positions.tolist(), strict=True):
        for column, (token, position) in enumerate(zip(ids, positions, strict=True)):
            if position == 0 and piece and (column > 0 or token == tokenizer.bos_token_id):
                yield tokenizer.decode(piece, skip_special_tokens=True)
                piece = []
            piece.append(token)
    if piece:
        yield tokenizer.decode(piece, skip_special_tokens=True)


@torch.no_grad()
def seconds_per_token(model: Any, blocks: PackedBlocks) -> float:
    """Time of a forward pass by its tokens: of the beginning of one block, and of a whole batch where that takes seconds only."""
    seconds, some = 0.0, PackedBlocks(blocks.ids[:1, :128], blocks.positions[:1, :128])
    for _ in range(3):
        start = time.perf_counter()
        model(some.ids.to(model.device), position_ids=some.positions.to(model.device), use_cache=False)
        seconds = (time.perf_counter() - start) / some.num_tokens
        if seconds * TOKENS_AT_ONCE < 10:
            some = next(blocks.iter_batches())
    return seconds
