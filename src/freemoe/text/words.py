"""The words of a text, by which copies are recognised whatever their case, punctuation, white space and Unicode form."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# Scripts without spaces between words: every character counts as a word there.
_DENSE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_DENSE}]|[^\W_{_DENSE}]+")
# Between numbers, variables and brackets these signs say what is asked: 3+4 is not 3-4.
_SIGN = r"(?:(?<=[\d)])|(?<=\b\w))\s*([-+*/%^=<>]+)\s*(?=[\d(]|\w\b)"
_WORD_OR_SIGN = re.compile(rf"({_WORD.pattern})|{_SIGN}")
_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"))

# What prompts write before a question and before its answer, at a line's beginning or at the end.
_LABELS = "q|a|question|answer|task|instruction|input|output|prompt|response|completion|user|human|assistant"
_LABEL = re.compile(rf"^\W*(?:{_LABELS})\s*:|\b(?:{_LABELS})\s*:\s*\Z", re.MULTILINE)


def _casefold_text(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def split_words(text: str) -> list[str]:
    """The words of a text in one case and one Unicode form (NFKC); punctuation and white space only part them."""
    return _WORD.findall(_casefold_text(text))


def exact_words(text: str) -> list[str]:
    """As `split_words`, with the signs between numbers and variables; the characters of a text that has neither."""
    found = [word or sign for word, sign in _WORD_OR_SIGN.findall(_casefold_text(text).translate(_DASHES))]
    return found or list("".join(text.split()))


def question_words(text: str) -> list[str]:
    """As `exact_words`, without the labels before a question and before its answer."""
    return exact_words(_LABEL.sub(" ", _casefold_text(text))) or exact_words(text)


def about_words(about: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words of a question, and of the answer without which it would be another one: of ``(question, *answer)``."""
    return question_words(about[0]), [word for part in about[1:] for word in question_words(part)]
