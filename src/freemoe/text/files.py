"""Local files of text and of JSON lines, their paragraphs, and where tokens lie in a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.core.untrusted import parse_json, read_text


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
    # Only a line feed ends a line: JSON strings may hold U+2028 and the like as they are.
    lines = enumerate(read_text_file(path).split("\n"), start=1)
    return [(number, parse_json(line, f"{path}:{number}")) for number, line in lines if line.strip()]


def split_paragraphs(text: str) -> list[str]:
    """Cut a text into paragraphs at blank lines, or at line ends where it has no blank line; joined again they give the text."""
    found: list[str] = []
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


def evenly_spaced(count: int, cap: int) -> list[int]:
    """At most ``cap`` indices below ``count``, evenly spaced and in order."""
    if count <= cap:
        return list(range(count))
    return [(2 * i + 1) * count // (2 * cap) for i in range(cap)]
