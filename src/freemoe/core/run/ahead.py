"""Workers that fill a run's journal ahead of it.

Each of them makes the same run up to where it stands, from what the run's folder holds, and does a part of a stage. The run
itself then finds all of it in its journal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

from freemoe.core.run.away import RunFiles, run_remote_part
from freemoe.core.run.folder import RunFolder
from freemoe.core.run.pool import WorkerPool
from freemoe.core.run.units import Unit


class ParallelStages:
    """Lets workers do parts of a run; alive inside its ``with``.

    Args:
        run: The run's folder.
        executor: Who does the work; closed at the end.
        function: Does a part, as ``package.module:function``: called with ``output``, ``stage``, ``name`` and what is known, it
            leaves what it finished in the `RunPart` named ``STAGE|NAME`` of that output.
        known: More arguments of the function: plain data that is the same for every part.
        needs: Stage, name of a part, name of a unit whose tensors the run keeps -> whether that part reads them.
    """

    def __init__(
        self,
        run: RunFolder,
        executor: WorkerPool,
        function: str,
        known: dict[str, Any],
        needs: Callable[[str, str, str], bool],
    ) -> None:
        self._run = run
        self._executor = executor
        self._function = function
        self._known = known
        self._needs = needs
        share = getattr(executor, "share", None)
        self._luggage = RunFiles(run, share) if share is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.close()

    def run_stage(self, stage: str, names: Sequence[str], on_done: Callable[[str], None]) -> set[str]:
        """Fill the journal with parts of a stage, in their order whoever is done first.

        Args:
            stage: What is done.
            names: Of its parts.
            on_done: Called with each name as its part is finished.

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
            with contextlib.closing(self._executor.run(units)) as results:
                for unit, found in results:
                    if self._luggage is not None:
                        self._luggage.write_results(unit.name, found)
                    on_done(parts[unit.name])
                    finished.add(unit.name)
                    while order and order[0] in finished:
                        self._run.merge_parts(order.pop(0))
        finally:
            self._run.merge_parts()
        return set(names)

    def _stage_unit(self, stage: str, part: str, name: str) -> Unit:
        arguments = {**self._known, "stage": stage, "name": name, "output": str(self._run.output)}
        if self._luggage is None:
            return Unit(part, self._function, arguments)
        files = self._luggage.upload_files(lambda unit: self._needs(stage, name, unit))
        away = {"function": self._function, "arguments": arguments, "part": part, "files": files}
        return Unit(part, f"{run_remote_part.__module__}:{run_remote_part.__name__}", away)
