"""The journal of a run: finished units of work, so that what was killed goes on where it stopped."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from freemoe.core.files import disk_error, json_digest, notify_watchers, write_synced

log = logging.getLogger(__name__)


class RunJournal:
    """An append-only file of finished units: one JSON line each, ``{"unit", "value", "sum"}``.

    A line that was cut short by a crash does not count; neither does anything behind it.

    ``known`` are files of other processes, which are only read, and may be written meanwhile: what ``path`` gets is a part of
    another one's work, for its `merge_file`.
    """

    def __init__(self, path: Path, known: Sequence[Path] = ()) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        self._taken: set[str] = set()
        self.reused = 0
        self.done = 0
        if path.exists():
            whole = self._read_entries(path)
            if whole < path.stat().st_size:
                log.warning("The journal's last entry was cut short by a crash; that unit is done again.")
                with path.open("r+b") as stream:
                    stream.truncate(whole)
        for other in known:
            # Gone, when its own process has taken it in by now.
            with contextlib.suppress(FileNotFoundError):
                self._read_entries(other)

    def _read_entries(self, path: Path) -> int:
        """Load whole entries; return how many bytes they take."""
        whole = 0
        with path.open("rb") as stream:
            for line in stream:
                try:
                    entry = json.loads(line)
                    good = line.endswith(b"\n") and entry["sum"] == json_digest([entry["unit"], entry["value"]])
                except (ValueError, KeyError, TypeError):
                    good = False
                if not good:
                    return whole
                self._values[entry["unit"]] = entry["value"]
                whole += len(line)
        return whole

    def unit_names(self) -> list[str]:
        """Names of the finished units, in their order."""
        return list(self._values)

    def __contains__(self, unit: str) -> bool:
        return unit in self._values

    def run_unit(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the unit's value: from the journal if it is finished, else by doing the work and writing it down.

        The value is what JSON gives back, so that a resumed run sees the same as an unbroken one.
        """
        if name in self._values:
            # Done for this run by another process, it is not used again when it is first asked for.
            self.reused += name not in self._taken
            self._taken.discard(name)
            return self._values[name]
        value = json.loads(json.dumps(work()))
        line = json.dumps({"unit": name, "value": value, "sum": json_digest([name, value])}) + "\n"
        whole = self.path.stat().st_size if self.path.exists() else 0
        notify_watchers("begins", f"journal {name}")
        try:
            with self.path.open("ab") as stream:
                write_synced(stream, line.encode(), f"journal {name}")
        except OSError as error:
            found = disk_error(error, self.path, len(line))
            with contextlib.suppress(OSError):
                os.truncate(self.path, whole)
            raise found from error
        notify_watchers("done", f"journal {name}")
        self._values[name] = value
        self.done += 1
        return value

    def merge_file(self, path: Path) -> None:
        """Write down the finished units of another file, in their order; those that are here already stay as they are."""
        for name, value in RunJournal(path)._values.items():
            if name not in self._values:
                self.run_unit(name, lambda value=value: value)
                self._taken.add(name)
