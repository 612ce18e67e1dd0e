"""Local files of text and of JSON lines, and token ids packed into blocks of one length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.core.untrusted import parse_json, read_text


@dataclass(frozen=True)
class Block:
    """One run of tokens.

    Attributes:
        tokens: Its token ids.
        text: The text they stand for.
        paragraph: Index of the paragraph in which it begins.
        run: Which part of that paragraph: long paragraphs count anew every few blocks.
    """

    tokens: tuple[int, ...]
    text: str
    paragraph: int
    run: int


def read_text_file(path: Path) -> str:
    """Return a file's UTF-8 text.

    Raises:
        DataError: When it is absent, a folder, too large, empty or not UTF-8.
    """
    text = read_text(path).replace("\r\n", "\n")
    if not text.strip():
        raise DataError(f"{path} is empty; it needs at least one document.")
    return text


def read_json_lines(path: Path) -> list[tuple[int, Any]]:
    """Return ``(line number, value)`` of every line of a JSONL file that is not blank.

    Raises:
        DataError: With file, line number and the reason, when a line is not JSON.
    """
    rows = []
    # Only a line feed ends a line: JSON strings may hold U+2028 and the like as they are.
    for number, line in enumerate(read_text_file(path).split("\n"), start=1):
        if not line.strip():
            continue
        rows.append((number, parse_json(line, f"{path}:{number}")))
    return rows


def paragraphs(documents: Sequence[str]) -> list[str]:
    """Cut documents into paragraphs at blank lines, or at line ends where a document has no blank line.

    Joined again they give the documents' text; every document but the last is made to end in a blank line.
    """
    found: list[str] = []
    for place, document in enumerate(documents):
        text = document if place == len(documents) - 1 else document.rstrip("\n") + "\n\n"
        lines = text.splitlines(keepends=True)
        blanks = any(not line.strip() for line in lines[:-1])
        current: list[str] = []
        begun = ended = False
        for line in lines:
            blank = not line.strip()
            # Blank lines belong to the paragraph above them.
            if begun and not blank and (ended or not blanks):
                found.append("".join(current))
                current, begun = [], False
            current.append(line)
            begun, ended = begun or not blank, blank
        if current:
            found.append("".join(current))
    return found


def encode_with_places(tokenizer: Any, pieces: Sequence[str]) -> tuple[list[int], list[int], str]:
    """Token ids of the joined pieces, the character where each token begins, and the joined text.

    A fast tokenizer says where its tokens lie. Another one encodes piece by piece, so that a token's place
    is known to the piece, at the price of the tokens it sets at the start of a text.
    """
    text = "".join(pieces)
    if getattr(tokenizer, "is_fast", False):
        coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(coded["input_ids"]), [start for start, _ in coded["offset_mapping"]], text
    ids: list[int] = []
    starts: list[int] = []
    at = 0
    for piece in pieces:
        coded = tokenizer.encode(piece, add_special_tokens=False)
        ids.extend(coded)
        starts.extend([at] * len(coded))
        at += len(piece)
    return ids, starts, text


def pack(tokenizer: Any, pieces: Sequence[str], length: int, run_blocks: int = 4) -> list[Block]:
    """Cut the joined pieces into consecutive blocks of ``length`` tokens; the rest at the end is left out.

    Args:
        tokenizer: A tokenizer of transformers.
        pieces: Paragraphs, white space included.
        length: Tokens of a block.
        run_blocks: Blocks after which a paragraph longer than that counts as a new one.
    """
    ids, starts, text = encode_with_places(tokenizer, pieces)
    fast = getattr(tokenizer, "is_fast", False)
    begins = [0]
    for piece in pieces:
        begins.append(begins[-1] + len(piece))
    blocks = []
    first: dict[int, int] = {}  # paragraph -> the first block that begins in it
    for number, at in enumerate(range(0, len(ids) - length + 1, length)):
        end = starts[at + length] if at + length < len(ids) else len(text)
        tokens = tuple(ids[at : at + length])
        paragraph = bisect_right(begins, starts[at]) - 1
        run = (number - first.setdefault(paragraph, number)) // run_blocks
        # A token of several bytes may share its character with the next block: then the decoder knows better.
        piece = text[starts[at] : end] if fast else tokenizer.decode(list(tokens))
        blocks.append(Block(tokens, piece, paragraph, run))
    return blocks


def spread(count: int, cap: int) -> list[int]:
    """At most ``cap`` indices below ``count``, evenly spaced and in order."""
    if count <= cap:
        return list(range(count))
    return [(2 * i + 1) * count // (2 * cap) for i in range(cap)]
