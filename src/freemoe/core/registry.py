"""One registry for everything that is chosen by name: metrics, families, tasks, searches, routers; and the rows that other packages add.

A package names the modules that add them in its ``pyproject.toml``; the module calls ``add`` on our registries when it is imported::

    [project.entry-points."freemoe"]
    mine = "my_package.freemoe_rows"
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from typing import Generic, TypeVar

from freemoe.core.errors import UnknownNameError

log = logging.getLogger(__name__)

ROWS = "freemoe"
"""Modules that add rows to registries, imported before a name is looked up."""

MODEL_TYPES = "freemoe.model_types"
"""Modules that register classes with transformers, by how the ``model_type`` of their checkpoints begins."""


@cache
def _entry_points(group: str) -> list[metadata.EntryPoint]:
    return sorted(metadata.entry_points(group=group), key=lambda point: (point.name, point.value))


_asked: list[str] = []


def load_rows() -> None:
    """Import what other packages add, once; a module that cannot be imported is named in a warning and left out."""
    # Marked before anything is imported: such a module may itself look a name up.
    if _asked:
        return
    _asked.append(ROWS)
    for point in _entry_points(ROWS):
        try:
            point.load()
        except Exception as error:
            log.warning(
                "What %r adds to freemoe is left out: %s cannot be imported: %s", point.name, point.value, error
            )


def load_model_type(model_type: str) -> None:
    """Import the module that knows checkpoints of this type, if there is one."""
    for point in _entry_points(MODEL_TYPES):
        if model_type.startswith(point.name):
            point.load()


T = TypeVar("T")

_MOST_LISTED = 200
_LONGEST_SHOWN = 120


def unknown_name(kind: str, name: str, known: list[str], advice: str = "") -> UnknownNameError:
    """Build the error for a name that nothing answers to, with near misses first.

    ``advice`` is one more sentence: what to do.
    """
    if len(str(name)) > _LONGEST_SHOWN:  # else it is a page, and looking for near misses takes minutes
        name = f"{str(name)[:_LONGEST_SHOWN]}..."
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    listed = "none" if not known else ", ".join(known) if len(known) <= _MOST_LISTED else f"{len(known):,} names"
    return UnknownNameError(f"Unknown {kind} {name!r}.{hint} Known: {listed}.{' ' + advice if advice else ''}")


def check_name(kind: str, name: str, allowed: list[str]) -> str:
    """Check a name in a recipe, where the registry itself is not loaded.

    Raises:
        ValueError: When it is none of those that are built in or that another package adds; pydantic says where it stands.
    """
    if name not in allowed:
        load_rows()
    if name not in allowed:
        raise ValueError(str(unknown_name(kind, name, allowed)))
    return name


class Registry(Generic[T]):
    """Names to things, each with one line that says what it is (shown by ``freemoe ls``).

    What other packages add (`plugins`) is there from the first look on.

    ``allowed``: names that a recipe's field may hold; grows with what is added, so that another package's entries may stand
    in recipes.
    """

    def __init__(self, kind: str, allowed: list[str] | None = None) -> None:
        self.kind = kind
        self.allowed = allowed
        self._entries: dict[str, T] = {}
        self._about: dict[str, str] = {}

    def add(self, name: str, entry: T, about: str) -> T:
        """Register ``entry``; a name can be taken once only."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        if self.allowed is not None and name not in self.allowed:
            self.allowed.append(name)
        self._entries[name] = entry
        self._about[name] = about
        return entry

    def get(self, name: str) -> T:
        """Return the entry, or raise an error that lists near misses and all names."""
        load_rows()
        if name not in self._entries:
            raise unknown_name(self.kind, name, self.names())
        return self._entries[name]

    def names(self) -> list[str]:
        """All names, in the order of registration."""
        load_rows()
        return list(self._entries)

    def loaded_names(self) -> list[str]:
        """The names so far, without a look at what other packages add; for help and completion, which must be quick."""
        return list(self._entries)

    def about(self, name: str) -> str:
        """The line that describes an entry."""
        return self._about[name]

    def __contains__(self, name: object) -> bool:
        load_rows()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
