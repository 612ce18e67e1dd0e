"""Rows that other packages add: the modules that their entry points name.

A package says so in its ``pyproject.toml``; the module calls ``add`` on our registries when it is imported::

    [project.entry-points."freemoe"]
    mine = "my_package.freemoe_rows"
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import metadata

log = logging.getLogger(__name__)

ROWS = "freemoe"
"""Modules that add rows to registries, imported before a name is looked up."""

MODEL_TYPES = "freemoe.model_types"
"""Modules that register classes with transformers, by how the ``model_type`` of their checkpoints begins."""


@cache
def _points(group: str) -> list[metadata.EntryPoint]:
    return sorted(metadata.entry_points(group=group), key=lambda point: (point.name, point.value))


_asked: list[str] = []


def load_rows() -> None:
    """Import what other packages add, once; a module that cannot be imported is named in a warning and left out."""
    # Marked before anything is imported: such a module may itself look a name up.
    if _asked:
        return
    _asked.append(ROWS)
    for point in _points(ROWS):
        try:
            point.load()
        except Exception as error:
            log.warning(
                "What %r adds to freemoe is left out: %s cannot be imported: %s", point.name, point.value, error
            )


def load_model_type(model_type: str) -> None:
    """Import the module that knows checkpoints of this type, if there is one."""
    for point in _points(MODEL_TYPES):
        if model_type.startswith(point.name):
            point.load()
