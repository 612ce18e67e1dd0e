"""What belongs together and is never divided: copies of one text or question, and what comes from one source.

The source of a row is the row, or what a column of it names; of a text it is the article, by its headings or by what stands
between articles; where there are too few of these it is a stretch of neighbouring paragraphs.
"""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Collection, Hashable, Sequence
from itertools import pairwise

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from freemoe.text.files import split_paragraphs
from freemoe.text.words import about_words, exact_words

FEWEST = 5  # Groups without which a text has none for each of gradient, stopping, guard, gap and reported part
FEW = 20  # Groups below which a figure hangs on single ones

LOOSE, STRETCHES = "too few articles", "stretches"
"""How a unit is called whose groups share articles, and one whose borders mean nothing."""

_STRETCH, _SHORTEST_STRETCH = 8000, 2000  # characters; some 2,000 tokens at most
_MOST_STRETCHES, _FEWEST_STRETCHES = 24, 12  # of a text that is too short for the longest, and for the shortest
_SHORTEST_ARTICLE, _LONGEST_SECTION = 200, 40_000
_NAMED_BY = 30  # words at the beginning of an article that name it

_WIKI = re.compile(r"(=(?: ?=)*) ?([^=\s].*?) ?\1")  # "= Title =", "= = Section = =" (WikiText), "== Section =="
_MARKDOWN = re.compile(r"(#{1,6})\s+\S.*")
_RULE = re.compile(r"([-*_~])(?:\s*\1){2,}")
_END = "<|endoftext|>"


class TextPassage(str):
    """A text that knows where it comes from; whoever needs no source reads it as the text that it is."""

    # The question that it asks, and its right answer where it has one: as `TrainingDocument.about`
    about: tuple[str, ...]
    group: str  # Name that passages of one source share

    def __new__(cls, text: str, about: tuple[str, ...] = (), group: str = "") -> TextPassage:
        """Make the text, with its attributes."""
        made = super().__new__(cls, text)
        made.about, made.group = about, group
        return made


def cluster_labels(names: Sequence[Collection[Hashable]]) -> list[int]:
    """Number the clusters of items that share a name, directly or through others."""
    places: dict[Hashable, int] = {}
    links = [
        (number, places.setdefault(name, len(names) + len(places))) for number, own in enumerate(names) for name in own
    ]
    size = len(names) + len(places)
    graph = coo_array((np.ones(len(links)), np.array(links, int).reshape(-1, 2).T), shape=(size, size))
    return connected_components(graph, directed=False)[1][: len(names)].tolist()


def copy_names(questions: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[set[Hashable]]:
    """Names that copies of a question share.

    Copies ask the same and have the same right answer. Where one of them is answered freely, the question alone makes it a
    copy: other answers to the same request belong to one side.

    ``questions``: as of `about_words`; without words where nothing is asked.
    """
    plain = [(" ".join(asked), " ".join(answer)) for asked, answer in questions]
    free = {asked for asked, answer in plain if asked and not answer}
    names: list[set[Hashable]] = [{("copy", asked, answer)} if asked else set() for asked, answer in plain]
    for own, (asked, _) in zip(names, plain, strict=True):
        if asked in free:
            own.add(("copy", asked, ""))
    return names


def passage_clusters(texts: Sequence[str]) -> list[int]:
    """Number the clusters of passages: copies of each other, copies of one question, or of one group."""
    about = [getattr(text, "about", ()) for text in texts]
    names = copy_names([about_words(parts) if parts else ((), ()) for parts in about])
    for own, text in zip(names, texts, strict=True):
        plain = " ".join(exact_words(text)).encode("utf-8", "surrogatepass")
        own.add(hashlib.blake2b(plain, digest_size=16).digest())
        if getattr(text, "group", ""):
            own.add(("group", text.group))  # pyright: ignore[reportAttributeAccessIssue]
    return cluster_labels(names)


def divide_by_source(documents: Sequence[str]) -> tuple[list[TextPassage], str]:
    """Divide documents into what comes from one source.

    ``documents``: A file of plain text is one; else one for each row. Gives passages with their groups, in order, and what
    a group is, in words. Where neighbours of one article may come into several groups, for want of articles, the words
    begin with `LOOSE`.
    """
    if sum(_heading_level(text) == 1 for text in documents) >= FEWEST:  # a data set with a row for each line
        documents = ["".join(text if text.endswith("\n") else f"{text}\n" for text in documents)]
    label = passage_clusters(documents)
    named = any(getattr(text, "group", "") for text in documents)
    if named or len(set(label)) >= FEWEST:
        first = cluster_texts(documents, label)
        names = [_group_name(first[cluster]) for cluster in label]
        about = [getattr(text, "about", ()) for text in documents]
        return list(map(TextPassage, documents, about, names)), "groups of rows" if named else "rows"
    articles, unit = _find_articles(documents)
    return [TextPassage(a, (), _group_name(" ".join(exact_words(a[:1000])[:_NAMED_BY]))) for a in articles], unit


def cluster_texts(texts: Sequence[str], label: Sequence[int]) -> dict[int, str]:
    """Of every cluster the text that stands for it, whatever their order: the first by its characters."""
    first: dict[int, str] = {}
    for text, cluster in zip(texts, label, strict=True):
        first[cluster] = min(first.get(cluster, text.strip()), text.strip())
    return first


def _group_name(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def end_with_blank_line(text: str) -> str:
    """A row with the blank line that parts it from the next."""
    return text.rstrip("\n") + "\n\n"


def _find_articles(documents: Sequence[str]) -> tuple[list[str], str]:
    """The articles of a text, and what they are; stretches of it where it has too few."""
    text = "".join(map(end_with_blank_line, documents[:-1])) + documents[-1]
    headings, breaks = _article_starts(text)
    levels = sorted({level for _, level in headings})
    for depth in levels:
        found = _cut_at(text, [at for at, level in headings if level <= depth])
        if _has_enough_articles(found) and depth == levels[0]:
            return found, "articles by heading"
        # Where most headings were lost, what stands between two of them is no section.
        if _has_enough_articles(found) and statistics.median(map(len, found)) <= _LONGEST_SECTION:
            return found, f"{LOOSE}: sections by heading"
    found = _cut_at(text, breaks)
    if _has_enough_articles(found):
        return found, "articles by the lines between them"
    size = min(_STRETCH, max(len(text) // _MOST_STRETCHES, min(_SHORTEST_STRETCH, len(text) // _FEWEST_STRETCHES)))
    found = []
    for document in documents:
        found.append("")
        for piece in split_paragraphs(document):
            if len(found[-1]) >= size:
                found.append("")
            found[-1] += piece
    return found, f"{LOOSE}: {STRETCHES} of about {size} characters"


def _has_enough_articles(articles: Sequence[str]) -> bool:
    return len(articles) >= FEWEST and statistics.median(map(len, articles)) >= _SHORTEST_ARTICLE


def _cut_at(text: str, starts: Sequence[int]) -> list[str]:
    """Parts of a text, each from one start to the next; what stands before the first belongs to it."""
    return [text[a:b] for a, b in pairwise([0, *starts[1:], len(text)])]


def _heading_level(line: str) -> int:
    """Level of a heading; 0 for any other line."""
    wiki, markdown = _WIKI.fullmatch(line.strip()), _MARKDOWN.fullmatch(line.strip())
    return wiki[1].count("=") if wiki else len(markdown[1]) if markdown else 0


def _article_starts(text: str) -> tuple[list[tuple[int, int]], list[int]]:
    """Where headings stand, with their levels, and where an article begins after a rule or several blank lines."""
    headings: list[tuple[int, int]] = []
    breaks = [0]
    at, blank, fenced, rule = 0, 1, False, False
    for line in text.splitlines(keepends=True):
        plain = line.strip()
        fenced ^= plain.startswith(("```", "~~~"))
        if plain:
            if blank > 1 or rule:
                breaks.append(at)
            if blank and not fenced and (level := _heading_level(plain)):
                headings.append((at, level))
            rule = plain == _END or bool(blank and _RULE.fullmatch(plain))
        blank = 0 if plain else blank + 1
        at += len(line)
    return headings, breaks
