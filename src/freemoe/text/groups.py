"""What belongs together and is never divided: copies of one text or question, and what their source calls one thing."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from freemoe.text.words import about_words, exact_words


class Passage(str):
    """A text that knows where it comes from; whoever needs no source reads it as the text that it is.

    Attributes:
        about: The question that it asks, and its right answer where it has one: as `Document.about`.
        group: Name that passages of one source share.
    """

    about: tuple[str, ...]
    group: str

    def __new__(cls, text: str, about: tuple[str, ...] = (), group: str = "") -> Passage:
        """Arguments as the attributes."""
        made = super().__new__(cls, text)
        made.about, made.group = about, group
        return made


def clusters(names: Sequence[Collection[Hashable]]) -> list[int]:
    """Number the clusters of items that share a name, directly or through others.

    Args:
        names: Of every item.
    """
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

    Args:
        questions: As of `about_words`; without words where nothing is asked.
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
    return clusters(names)
