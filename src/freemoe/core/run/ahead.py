"""Workers that fill a run's journal ahead of it.

Each of them makes the same run up to where it stands, from what the run's folder holds, and does a part of a stage. The run
itself then finds all of it in its journal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from freemoe.core.run.away import RunFiles, run_remote_part
from freemoe.core.run.folder import RunFolder
from freemoe.core.run.pool import WorkerPool
from freemoe.core.run.units import Unit


@dataclass(eq=False)
class ParallelStages:
    """Lets workers do parts of a run; alive inside its ``with``."""

    run: RunFolder  # The run's folder
    executor: WorkerPool  # Who does the work; closed at the end
    # Does a part, as ``package.module:function``: called with ``output``, ``stage``, ``name`` and what is known, it leaves
    # what it finished in the `RunPart` named ``STAGE|NAME`` of that output
    function: str
    known: dict[str, Any]  # More arguments of the function: plain data that is the same for every part
    # Stage, name of a part, name of a unit whose tensors the run keeps -> whether that part reads them
    needs: Callable[[str, str, str], bool]

    def __post_init__(self) -> None:
        share = getattr(self.executor, "share", None)
        self._luggage = RunFiles(self.run, share) if share is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.executor.close()

    def run_stage(self, stage: str, names: Sequence[str], on_done: Callable[[str], None]) -> set[str]:
        """Fill the journal with parts of a stage, in their order whoever is done first.

        ``on_done`` is called with each name as its part is finished.

        Returns:
            The names of what was done: none where there is nothing to do side by side.

        Raises:
            FreeMoEError: What went wrong in a part; all parts that were finished are in the journal.
        """
        if len(names) < 2:
            return set()
        parts = {f"{stage}|{name}": name for name in names}
        units = [self._stage_unit(stage, part, name) for part, name in parts.items()]
        order, finished = list(parts), set[str]()
        try:
            with contextlib.closing(self.executor.run(units)) as results:
                for unit, found in results:
                    if self._luggage is not None:
                        self._luggage.write_results(found)
                    on_done(parts[unit.name])
                    finished.add(unit.name)
                    while order and order[0] in finished:
                        self.run.merge_parts(order.pop(0))
        finally:
            self.run.merge_parts()
        return set(names)

    def _stage_unit(self, stage: str, part: str, name: str) -> Unit:
        arguments = {**self.known, "stage": stage, "name": name, "output": str(self.run.output)}
        if self._luggage is None:
            return Unit(part, self.function, arguments)
        files = self._luggage.upload_files(lambda unit: self.needs(stage, name, unit))
        away = {"function": self.function, "arguments": arguments, "part": part, "files": files}
        return Unit(part, f"{run_remote_part.__module__}:{run_remote_part.__name__}", away)
