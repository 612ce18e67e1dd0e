"""The tasks of a table, scored in every way that a run compares, and their mean."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from freemoe.core.run.progress import Progress
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.recipes import EvalRecipe, recipe_from
from freemoe.tomoe.recipe import ConvertRecipe

if TYPE_CHECKING:
    from freemoe.evals.evaluation import Open

AVERAGE = "Average"
"""The column of the mean over tasks."""


def scored(
    artefact: str,
    subject: Open,
    recipe: ConvertRecipe | TrimRecipe,
    tasks: Mapping[str, list[str]],
    data: Mapping[str, Any],
    progress: Progress,
    apart: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Column -> way -> score and paired gain over the first way; `AVERAGE` too, each column but those ``apart`` counting the same.

    ``tasks``: column -> tasks. Documents that the artefact's making saw are set aside; ``subject`` opens it.
    """
    from freemoe.evals.evaluation import evaluate_target
    from freemoe.evals.summary import mean_of_domains

    if not tasks:
        return {}
    columns = {re.sub(r"[^A-Za-z0-9_-]", "-", column): column for column in tasks}
    asked = {
        "command": "eval",
        "artefact": artefact,
        "domains": {name: tasks[column] for name, column in columns.items()},
        "data": dict(data),
        "seed": recipe.seed,
        "dtype": recipe.dtype,
        "threads": recipe.threads,
    }
    evaluation = recipe_from(asked, "The table's evaluation")
    assert isinstance(evaluation, EvalRecipe)
    domains = evaluate_target(evaluation, subject, progress=progress)["domains"]
    found = {
        columns[d["name"]]: {
            way: {key: row[key] for key in ("score", "gain", "documents", "also") if key in row} | {"unit": d["unit"]}
            for way, row in d["rows"].items()
        }
        for d in domains
    }
    general = [d for d in domains if columns[d["name"]] not in apart and d["unit"] == "points"]
    return found | ({AVERAGE: mean_of_domains(general)} if general else {})
