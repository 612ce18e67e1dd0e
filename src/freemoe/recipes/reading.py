"""Recipes from YAML, from mappings and back."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from freemoe.core.errors import RecipeError
from freemoe.core.untrusted import dump_yaml, read_yaml
from freemoe.recipes.evaluate import EvalRecipe
from freemoe.recipes.sections import Recipe
from freemoe.systems import SYSTEMS

MOST_PROBLEMS = 50  # Problems of one recipe that are told; of the others, their number
MOST_DEEP = 8  # Names in a path of ``--set``


def recipe_from(data: object, source: str = "recipe") -> Recipe:
    """Check a mapping and return the recipe it describes.

    Raises:
        RecipeError: With every problem at once: its path, the value seen and what is allowed.
    """
    if not isinstance(data, dict):
        raise RecipeError(f"{source}: a recipe is a mapping of names to values, got {type(data).__name__}.")
    command = data.get("command", "build")
    known = {system.command: system.recipe_type for system in map(SYSTEMS.get, SYSTEMS)} | {"eval": EvalRecipe}
    if not isinstance(command, str) or command not in known:
        raise RecipeError(f"{source}: command is {command!r}; allowed: {', '.join(known)}.")
    kind = known[command]
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = []
        for problem in error.errors()[:MOST_PROBLEMS]:
            path = ".".join(str(p) for p in problem["loc"]) or "(recipe)"
            said = repr(problem["input"])
            said = said if len(said) <= 300 else f"{said[:200]} ... ({len(said):,} characters)"
            seen = "" if problem["type"] == "missing" else f" (value seen: {said})"
            if problem["type"] == "extra_forbidden":
                lines.append(f"  {path}: there is no such field{seen}{_suggest_fields(kind, problem['loc'])}")
            else:
                lines.append(f"  {path}: {problem['msg'].removeprefix('Value error, ')}{seen}")
        if (more := error.error_count() - len(lines)) > 0:
            lines.append(f"  and {more:,} more")
        raise RecipeError(f"{source} cannot be used:\n" + "\n".join(lines)) from None


def _suggest_fields(kind: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """For an unknown key: fields that may have been meant, here or in another section, and those that are allowed here."""
    inside: Any = kind
    for part in location[:-1]:
        fields = getattr(inside, "model_fields", {})
        inside = fields[part].annotation if part in fields else None
    names = list(getattr(inside, "model_fields", {}))
    wanted = str(location[-1])
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    here = ".".join(map(str, location[:-1]))
    meant = [f"{here}.{name}" if here else name for name in near]
    meant += [path for path in _field_paths(kind) if path.rpartition(".")[2] == wanted]
    hint = f" (did you mean {' or '.join(dict.fromkeys(meant))}?)" if meant else ""
    return f"{hint}; allowed here: {', '.join(names)}" if names else hint


def _field_paths(kind: Any, before: str = "") -> Iterator[str]:
    """Every field of a recipe, as ``--set`` has it."""
    for name, field in getattr(kind, "model_fields", {}).items():
        yield before + name
        yield from _field_paths(field.annotation, f"{before}{name}.")


def set_path(target: dict[str, Any], path: str, value: Any) -> None:
    """Set ``a.b.c`` in nested dicts."""
    *parents, last = path.split(".")
    if len(parents) >= MOST_DEEP:
        raise RecipeError(f"--set {path[:80]}: no field lies {len(parents) + 1:,} names deep.")
    for part in parents:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise RecipeError(f"--set {path}: {part!r} is a value, not a section.")
    target[last] = value


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a YAML file."""
    file = Path(path)
    # A name that cannot be (too long, with NUL) is not there, where Path.exists raises.
    if not os.path.exists(file) or file.is_dir():  # noqa: PTH110
        raise RecipeError(f"Recipe {str(path)!r} is not a file. Print one with: freemoe build ... --print-recipe")
    data = read_yaml(file, RecipeError)
    return recipe_from(data, str(path))


def dump(recipe: Recipe) -> str:
    """Write a recipe as YAML that `load_recipe` reads back to an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))
