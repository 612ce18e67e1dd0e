"""Keyword arguments in place of a recipe: ``build(model=..., domains=..., metric="saliency", search={"alpha": 0.1})``.

A keyword is a field of the recipe, a section as a mapping, or a field of a section by its own name where one section only has such
a field or the command line has a flag of that name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from freemoe.core.errors import RecipeError
from freemoe.recipes.reading import recipe_from
from freemoe.recipes.sections import Recipe, is_section

R = TypeVar("R", bound=Recipe)


def recipe_of(kind: type[R], values: Mapping[str, Any]) -> R:
    """The recipe that keywords describe.

    Raises:
        RecipeError: An unknown keyword, with the near misses; a field that is given twice; every value that cannot be used.
    """
    command = kind.model_fields["command"].default
    found = recipe_from({"command": command, **nest_keywords(kind, values)}, f"{command}(...)")
    assert isinstance(found, kind)
    return found


def path_of(kind: type[Recipe], name: str) -> str:
    """The field that a keyword or a flag of that name says, as ``--set`` has it.

    Raises:
        RecipeError: There is no such keyword; with the near misses.
    """
    return name if name in kind.model_fields and name not in kind.SHORT else _resolve_path(kind, name)


def nest_keywords(kind: type[Recipe], values: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords as the mapping that a YAML file would hold.

    Raises:
        RecipeError: As `recipe_of`.
    """
    data: dict[str, Any] = {}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        plain = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        if name in kind.model_fields and not (name in kind.SHORT and not isinstance(plain, Mapping)):
            data[name] = dict(plain) if isinstance(plain, Mapping) else plain
        else:
            flat[name] = plain
    for name, value in flat.items():
        section, field = _resolve_path(kind, name).split(".")
        here = data.setdefault(section, {})
        if not isinstance(here, dict) or field in here:
            raise RecipeError(f"{name} and {section} both say what {section}.{field} is; give one of them.")
        here[field] = value
    return data


def _resolve_path(kind: type[Recipe], name: str) -> str:
    """Where a flat name stands in a recipe."""
    if name in kind.SHORT:
        return kind.SHORT[name]
    places = [f"{section}.{field}" for section, field in _fields_of_sections(kind) if field == name]
    if len(places) == 1:
        return places[0]
    if places:
        raise RecipeError(
            f"{name} could be {' or '.join(places)}; say which by its section: {places[0].split('.')[0]}={{{name!r}: ...}}."
        )
    known = [*kind.model_fields, *kind.SHORT, *(field for _, field in _fields_of_sections(kind))]
    near = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    own = ", ".join(n for n in kind.model_fields if n != "command")
    raise RecipeError(
        f"There is no keyword {name!r}.{hint} Keywords are {own}, and the fields of their sections (help({kind.__name__}))."
    )


def _fields_of_sections(kind: type[Recipe]) -> Iterator[tuple[str, str]]:
    for name, about in kind.model_fields.items():
        section = about.annotation
        if is_section(section):
            yield from ((name, field) for field in section.model_fields)
