"""Several processes that fill a build's journal ahead of it.

Each of them makes the same build up to where it stands, from what the run folder holds, and does one subdomain's or domain's
part of a stage. The build itself then finds all of it in its journal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from freemoe.core.run.folder import RunFolder
from freemoe.core.run.units import Executor, Processes, Unit
from freemoe.models.precision import compute_dtype
from freemoe.recipes import BuildRecipe

Stage = Literal["purify", "units", "search", "report"]

WORK = "freemoe.domain_experts.build:work_ahead"


class Ahead:
    """Does parts of a build in other processes; alive inside its ``with``.

    Args:
        recipe: The build's.
        model: Its base.
        run: Its folder.
        division: Hash of its subdomains' documents, which every process must find too.
        executor: Who does the work; by default the recipe's number of processes.
    """

    def __init__(
        self, recipe: BuildRecipe, model: Any, run: RunFolder, division: str, executor: Executor | None = None
    ) -> None:
        self._run = run
        self._known = {"recipe": _settled(recipe, model), "output": str(run.output), "division": division}
        # Sums depend on the number of threads: one that is asked for is that of every process, however many there are.
        threads = None if recipe.threads else max(1, torch.get_num_threads() // recipe.workers)
        self._executor: Executor = executor or Processes(recipe.workers, threads)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        if isinstance(self._executor, Processes):
            self._executor.close()

    def fill(self, stage: Stage, names: Sequence[str], told: Callable[[str], None]) -> set[str]:
        """Fill the journal with parts of a stage, in their order whoever is done first.

        Args:
            stage: What is done.
            names: Of subdomains, or of domains to report.
            told: Called with each name as its part is finished.

        Returns:
            The names of what was done: none where there is nothing to do side by side.

        Raises:
            FreeMoEError: What went wrong in a part; all parts that were finished are in the journal.
        """
        if len(names) < 2:
            return set()
        units = [Unit(f"{stage}|{name}", WORK, {**self._known, "stage": stage, "name": name}) for name in names]
        order, finished = [u.name for u in units], set[str]()
        try:
            with contextlib.closing(self._executor.run(units)) as results:
                for unit, _ in results:
                    told(unit.arguments["name"])
                    finished.add(unit.name)
                    while order and order[0] in finished:
                        self._run.join(order.pop(0))
        finally:
            self._run.join()
        return set(names)


def _settled(recipe: BuildRecipe, model: Any) -> dict[str, Any]:
    """The recipe as plain data, with what each process would measure for itself decided once for all."""
    compute = "own" if compute_dtype(recipe.saliency.compute, model) is None else "bfloat16"
    saliency = recipe.saliency.model_copy(update={"compute": compute})
    return recipe.model_copy(update={"saliency": saliency}).model_dump(mode="json")
