"""Names of experts: the one rule for all of them, and what is meant by ``a+b`` and ``a&b``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from freemoe.core.errors import DataError
from freemoe.core.registry import unknown_name

BASE, AUTO = "base", "auto"  # The names of the base itself, and of what the artefact picks
PREFIX = f"{BASE}:"  # Before an expert's name where a model is named: ``base:math``
MAX_NAME = 200  # Characters of an expert's name
MAX_EXPERTS = 1000  # Experts on one base beyond which no more are loaded or combined

Operation = Literal["union", "intersection"]

SIGNS: dict[str, Operation] = {"+": "union", "&": "intersection"}
"""How a combination is written where an expert is named."""


@dataclass(frozen=True)
class ExpertRef:
    """What is meant where an expert is named."""

    names: tuple[str, ...]  # Of the base, of an expert, or of all that are combined
    operation: Operation | None = None  # How they are combined; None for one

    @classmethod
    def parse(cls, text: str) -> ExpertRef:
        """Read ``a``, ``a+b`` or ``a&b``; what holds both signs names no expert, as no name has one."""
        for sign, operation in SIGNS.items():
            if sign in text:
                return cls(tuple(part.strip() for part in text.split(sign)), operation)
        return cls((text,))

    def require_known(self, known: Collection[str], others: Sequence[str] = ()) -> None:
        """Raise unless all that it names are known. The error lists ``others`` too.

        Raises:
            UnknownNameError: Names the first that is not.
        """
        for name in self.names:
            if name not in known:
                stands = f"It stands in {self!s:.120}; " if self.operation else ""
                advice = f"{stands}a+b is a union and a&b an intersection of experts." if stands else ""
                raise unknown_name("expert", name, [*([] if stands else others), *known], advice)

    def __str__(self) -> str:
        sign = next((sign for sign, operation in SIGNS.items() if operation == self.operation), "")
        return sign.join(self.names)


def name_fault(name: object) -> str | None:
    """Why something cannot be an expert's name; None where it can.

    A name is typed, listed in a line, combined with others and stands in an address, so it has to be seen, to mean one thing, and to
    come through unchanged.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        return f"is no text of 1 to {MAX_NAME} characters"
    if name in (BASE, AUTO) or name.startswith(PREFIX):
        return f"means the base or the router, as {BASE!r}, {AUTO!r} and all that begins with {PREFIX!r} do"
    if not name.isprintable():
        return "has characters that cannot be seen, such as a line break or a change of the direction of writing"
    if signs := [sign for sign in SIGNS if sign in name]:
        return f"has {signs[0]!r}, which combines experts"
    if name != name.strip() or any(part in ("", ".", "..") for part in name.split("/")):
        return "begins or ends with a space, or has an empty part, '.' or '..' between its slashes"
    return None


def require_new_names(names: Sequence[str], known: Collection[str]) -> None:
    """Raise unless experts can be added under some names.

    Raises:
        DataError: A name cannot be one, is taken or given twice; or there would be too many experts.
    """
    for name in names:
        if fault := name_fault(name):
            raise DataError(f"The name {name!r:.120} {fault}. Give the expert another one, or another prefix.")
    taken = [name for number, name in enumerate(names) if name in known or name in names[:number]]
    if taken:
        raise DataError(
            f"There is an expert {', '.join(map(repr, taken))} already. Put something before the names (prefix='NAME-', --experts "
            "NAME-=DIR), or delete the one that is there."
        )
    # An artefact's own are as many as they are; it is loading more and more that has an end.
    if known and len(known) + len(names) > MAX_EXPERTS:
        raise DataError(
            f"{len(known):,} experts are on this base, and {len(names):,} more exceed the limit of {MAX_EXPERTS:,}. Delete some first."
        )


def make_names(texts: Sequence[str]) -> list[str]:
    """Names for groups of documents that are called anything: each the text itself where it can be a name, all different."""
    names: list[str] = []
    for text in texts:
        seen = "".join("-" if sign in SIGNS or not sign.isprintable() else sign for sign in text[: MAX_NAME // 2])
        parts = [part.strip() for part in seen.split("/")]
        name = stem = "/".join(part for part in parts if part not in ("", ".", "..")) or "other"
        count = 1
        while name in names:
            count += 1
            name = f"{stem}-{count}"
        names.append(name)
    return names
