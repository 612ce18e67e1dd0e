"""From token ids to text while they come: no character is split, and what may be a stop string is held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no character, or not yet one."""

_LONG = 32


class IncrementalDetokeniser:
    """Text of tokens, piece by piece; the pieces together are what the tokenizer makes of all of them.

    Special tokens are left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Tokens before `_read` are told; those from `_start` are decoded again, for what a token looks like depends on the one
        # before it.
        self._start = self._read = 0

    def _decode_range(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True)

    def add_token(self, token: int) -> str:
        """What is certain now; empty while a character is not whole."""
        self._ids.append(token)
        known, now = self._decode_range(self._start, self._read), self._decode_range(self._start, len(self._ids))
        if len(now) <= len(known):
            return ""
        if not now.endswith(BROKEN):
            return self._commit_text(len(self._ids), known, now)
        if len(self._ids) - self._read > _LONG:
            # Bytes that will never be a character: all but the last few tokens, parted where that changes nothing.
            for cut in range(len(self._ids) - 4, len(self._ids) - 8, -1):
                head = self._decode_range(self._start, cut)
                if head + self._decode_range(cut, len(self._ids)) == now and len(head) > len(known):
                    return self._commit_text(cut, known, head)
        return ""

    def _commit_text(self, end: int, known: str, now: str) -> str:
        self._start, self._read = self._read, end
        return now[len(known) :]

    def flush_text(self) -> str:
        """What was held back, at the end of the answer."""
        known, now = self._decode_range(self._start, self._read), self._decode_range(self._start, len(self._ids))
        self._start = self._read = len(self._ids)
        return now[len(known) :]


class StopTexts:
    """Passes text on up to the first of several texts, and holds back what may be the beginning of one.

    None of the texts is empty.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._withheld = ""

    def add_text(self, text: str) -> tuple[str, bool]:
        """What may be told of the text so far, and whether a stop text ended it."""
        whole = self._withheld + text
        found = [at for stop in self._texts if (at := whole.find(stop)) >= 0]
        if found:
            self._withheld = ""
            return whole[: min(found)], True
        # The longest end of the text that is a beginning of a stop text.
        keep = max((n for stop in self._texts for n in range(len(stop)) if whole.endswith(stop[:n])), default=0)
        self._withheld = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], False

    def flush_text(self) -> str:
        """What was held back, at the end of the answer."""
        text, self._withheld = self._withheld, ""
        return text
