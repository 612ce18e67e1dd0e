"""Carving and drawing: deterministic, by content key, and independent of the order of a file."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain, zip_longest


def seeded_rank(seed: int, *names: str) -> str:
    """A seeded order that depends on the names alone."""
    return hashlib.sha256("\x1f".join((str(seed), *names)).encode()).hexdigest()


def carve_by_key(keys: Sequence[str], share: float = 0.5, seed: int = 0) -> tuple[list[int], list[int]]:
    """Part items into reference and reported by content key, so that no key stands on both sides.

    Gives indices of the reference items and of the reported items, each in file order.
    """
    order = sorted(set(keys), key=lambda key: seeded_rank(seed, "carve", key))
    chosen = set(order[: round(len(order) * share)])
    reference = [i for i, key in enumerate(keys) if key in chosen]
    reported = [i for i, key in enumerate(keys) if key not in chosen]
    return reference, reported


def large_group_text(keys: Sequence[str]) -> str:
    """What to say where one key is that of more than half of the items: parts can be no more even than that allows."""
    count = max(Counter(keys).values(), default=0)
    if len(keys) < 3 or 2 * count <= len(keys):
        return ""
    return f"; one group is {count} of {len(keys)} documents, more than half: the parts are as uneven as it makes them"


def draw_balanced(names: Sequence[str], fields: Sequence[str], limit: int | None, seed: int = 0) -> list[int]:
    """Draw ``limit`` items, balanced over fields: one of each field in turn, until there are enough.

    ``names``: stable name of every item. ``fields``: field of every item (all empty: a plain draw). Gives indices in file
    order.
    """
    if limit is None or limit >= len(names):
        return list(range(len(names)))
    groups: dict[str, list[int]] = {}
    for i in sorted(range(len(names)), key=lambda i: seeded_rank(seed, "draw", names[i])):
        groups.setdefault(fields[i], []).append(i)
    ordered = [groups[f] for f in sorted(groups, key=lambda f: seeded_rank(seed, "field", f))]
    turns = chain.from_iterable(zip_longest(*ordered))
    taken = [i for i in turns if i is not None][:limit]
    return sorted(taken)
