"""What subdomains hold, in a few words for a reader: typical documents and frequent words. Of reference documents only, and cut short."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from freemoe.domain_experts.route.subdomains import DomainDivision
from freemoe.evals.tasks.documents import Document

LONGEST = 100
"""Characters of a document that are shown at most."""

PROMPTS, WORDS = 3, 6
_FEWEST = 3  # documents that a word has to stand in: what one document says is nobody else's business


def describe_subdomains(documents: Sequence[Document], part: DomainDivision) -> list[dict[str, Any]]:
    """What each subdomain of a domain holds.

    Returns:
        Per subdomain ``prompts``: of the documents nearest to its centroid, and ``words``: those that stand in a larger share of
        its documents than of the domain's others.
    """
    texts = [d.prompt or d.reference for d in documents]
    shared = _shared_prefix_length(texts)
    found = [frozenset(re.findall(r"[^\W\d_]{3,}", text[shared:].lower())) for text in texts]
    whole = Counter(word for words in found for word in words)
    held = []
    for k, near in enumerate(part.typical):
        own = [words for words, label in zip(found, part.labels, strict=True) if label == k]
        inside = Counter(word for words in own for word in words)
        others = len(found) - len(own)

        def excess_share(word: str, inside: Counter[str] = inside, size: int = len(own), others: int = others) -> float:
            return inside[word] / size - ((whole[word] - inside[word]) / others if others else 0.0)

        known = [
            w for w, count in inside.items() if count >= _FEWEST and excess_share(w) > 0 and (others or len(w) > 3)
        ]
        words = sorted(known, key=lambda word: (-excess_share(word), word))[:WORDS]
        held.append(
            {"prompts": list(dict.fromkeys(shorten_text(texts[i][shared:]) for i in near))[:PROMPTS], "words": words}
        )
    return held


def _shared_prefix_length(texts: Sequence[str]) -> int:
    """Length of what all documents begin with, such as the examples of a few-shot prompt; 0 where that is short."""
    first, last = min(texts), max(texts)  # what these two share, all of them do
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    if length <= LONGEST or first == last:
        return 0
    return max(first.rfind("\n", 0, length), first.rfind(" ", 0, length)) + 1


def shorten_text(text: str) -> str:
    """One line of at most `LONGEST` characters."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1].rstrip() + "…"
