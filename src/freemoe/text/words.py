"""The words of a text, by which copies are recognised whatever their case, punctuation, white space and Unicode form."""

from __future__ import annotations

import re
import unicodedata

# Scripts without spaces between words: every character counts as a word there.
_DENSE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_DENSE}]|[^\W_{_DENSE}]+")

LABELS = frozenset(
    ["q", "a", "question", "answer", "task", "instruction", "input", "output", "prompt", "response", "completion", "user", "human", "assistant"]
)
"""Words that prompts write around a question and its answer; they do not belong to either."""


def words(text: str) -> list[str]:
    """The words of a text in one case and one Unicode form (NFKC); punctuation and white space only part them."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def question_words(text: str) -> list[str]:
    """The words of a question or an answer without the labels around it; the characters of a text that has no word."""
    found = words(text)
    return [word for word in found if word not in LABELS] or found or list("".join(text.split()))
