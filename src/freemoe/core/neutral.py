"""Names and texts of others, made harmless where they are shown: in a terminal, in Markdown, in HTML and SVG.

A terminal obeys escape sequences, a bidirectional override turns what stands behind it around, and Markdown and HTML have
characters of their own. What is shown is what was written: nothing is left out, an unsafe character becomes its escape.
"""

from __future__ import annotations

import html as _html
import re

# Control characters but tab and line feed; what changes the direction of writing; line ends that few expect; what has no width and
# joins nothing; half of a pair; tags.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)

# What Markdown would read: code, emphasis, the end of a link's text, tags, entities, cells, strikes, mathematics, bare addresses.
_MARKS = re.compile(
    r"\\|`|\*|(?<![^\W_])_|_(?![^\W_])|](?=[(\[:])|<(?=[A-Za-z/!?])|&(?=#|\w+;)|\||~~|\$|:(?=//)|(?<=\bwww)\.|^\s*(?:#|>|[-+]\s|\d+[.)]\s)"
)

_ENTITIES = {"<": "&lt;", "&": "&amp;"}


def escape_terminal(text: object) -> str:
    r"""Text for a terminal: an escape character is shown as ``\x1b``; tabs and line feeds stay."""
    return _UNSAFE.sub(_escape_character, str(text))


def one_line(text: object, most: int | None = None) -> str:
    """Text for a terminal on one line.

    ``most``: characters; what is longer is cut in its middle.
    """
    line = escape_terminal(" ".join(str(text).split()))
    if most is None or len(line) <= most:
        return line
    half = (most - 1) // 2
    return f"{line[: most - 1 - half]}…{line[-half:]}"


def escape_markdown(text: object) -> str:
    """Text for a line or a cell of Markdown that is read as nothing but text."""
    return _MARKS.sub(_escape_mark, one_line(text))


def code_span(text: object) -> str:
    """Text as a span of code in Markdown."""
    line = one_line(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    pad = " " if "`" in line else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def escape_html(text: object) -> str:
    """Text for HTML and SVG, in quoted attributes too."""
    return _html.escape(escape_terminal(text))


def _escape_character(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _escape_mark(match: re.Match[str]) -> str:
    mark = match[0]
    lead = mark[: len(mark) - len(mark.lstrip())]
    mark = mark[len(lead) :]
    if mark in _ENTITIES:  # which every reader of Markdown knows
        return lead + _ENTITIES[mark]
    if mark[:1].isdigit():  # "1. " begins a list
        return f"{lead}{mark[:-2]}\\{mark[-2:]}"
    return lead + "".join(f"\\{c}" if not c.isspace() else c for c in mark)
