"""Workers that fill a build's journal ahead of it.

Each of them makes the same build up to where it stands, from what the run folder holds, and does one subdomain's or domain's
part of a stage. The build itself then finds all of it in its journal.
"""

from __future__ import annotations

from typing import Literal

from freemoe.core.run import ahead
from freemoe.core.run.folder import RunFolder
from freemoe.distributed.executors import executor_of
from freemoe.domain_experts.recipe import BuildRecipe

Stage = Literal["purify", "units", "search", "report"]

WORK = "freemoe.domain_experts.pipeline:work_ahead"

_OF_SUBDOMAINS = ("purify", "units")
"""Stages whose units hold what was found for one subdomain; `report` alone reads those of all."""


class ParallelBuildStages(ahead.ParallelStages):
    """Does parts of a build elsewhere; alive inside its ``with``.

    ``division``: hash of its subdomains' documents, which every worker must find too.
    """

    def __init__(self, recipe: BuildRecipe, run: RunFolder, division: str) -> None:
        known = {"recipe": recipe.model_dump(mode="json"), "division": division}
        super().__init__(run, executor_of(recipe), WORK, known, _needs_tensors)


def _needs_tensors(stage: str, name: str, unit: str) -> bool:
    """Whether a part of a build reads a unit's tensors: masks of other subdomains only to report."""
    about, _, whose = unit.partition("|")
    return stage == "report" or about not in _OF_SUBDOMAINS or whose.partition("|")[0] == name
