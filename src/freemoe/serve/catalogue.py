"""Which experts can be asked for, and how one gets onto the engine: all of them at the start, or each when it is asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import FreeMoEError
from freemoe.core.registry import unknown_name
from freemoe.recipes.expert_names import AUTO, BASE, PREFIX, ExpertRef, require_new_names

if TYPE_CHECKING:
    from freemoe.serve.engine.engine import Engine

log = logging.getLogger(__name__)


class NotLoadedError(FreeMoEError):
    """An expert that stands in the catalogue and could not be put onto the base."""


class Experts:
    """Which experts can be asked for: all that are on the engine, from the start or since they were loaded.

    Used on the server's event loop.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changes = 0

    @property
    def names(self) -> list[str]:
        """Their names."""
        return self._engine.experts

    @property
    def rejected(self) -> list[str]:
        """Those of them that were rejected: they are the base."""
        return getattr(self._engine.host, "rejected", [])

    @property
    def changes(self) -> int:
        """A number that grows whenever other experts can be asked for."""
        return self._changes

    async def bring(self, name: str) -> None:
        """Have an expert, or all parts of a combination, on the engine."""

    async def load(self, folder: Path, prefix: str) -> list[str]:
        """Let the experts of an artefact be asked for too, under the names that are returned.

        Raises:
            FreeMoEError: As `FreeMoE.load_expert`; nothing has changed.
        """
        host = self._engine.host
        names = await asyncio.wrap_future(self._engine.call(lambda: host.load_expert(folder, prefix=prefix)))
        self._changes += 1
        return names

    async def drop(self, name: str) -> None:
        """Let nobody ask for an expert any more, and wait until those who did have their answers.

        Raises:
            UnknownNameError: There is no such expert.
        """
        await asyncio.wrap_future(self._engine.drop(name))
        self._changes += 1


@dataclass(frozen=True)
class Entry:
    """Where an expert is read.

    Attributes:
        name: By which it is asked for.
        folder: Its artefact, under the same path on every machine.
        original: Its name there.
        since: The version of the catalogue that it came with: files that are read anew are another expert.
        kind: See `domain_experts.expert.Expert`.
    """

    name: str
    folder: str
    original: str
    since: int
    kind: str = ""

    @property
    def prefix(self) -> str:
        """What stands before the original name."""
        return self.name.removesuffix(self.original)


@dataclass(frozen=True)
class Catalogue:
    """Experts that can be asked for, loaded or not. Of two catalogues the one with the higher version is in force.

    Attributes:
        version: Nanoseconds since 1970, or one more than the version before where the clock stands behind it.
        entries: In the order of their coming.
    """

    version: int = 0
    entries: tuple[Entry, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the experts."""
        return [entry.name for entry in self.entries]

    @property
    def rejected(self) -> list[str]:
        """Names of those that were rejected."""
        return [entry.name for entry in self.entries if entry.kind == BASE]

    def entry(self, name: str) -> Entry | None:
        """Where an expert is read; None where there is no such expert."""
        return next((entry for entry in self.entries if entry.name == name), None)

    def plus(self, folder: Path, prefix: str = "") -> Catalogue:
        """The next catalogue, with all experts of an artefact.

        Raises:
            DataError: A name is taken or cannot be one, or there are too many experts.
            ArtifactError: There is no artefact.
        """
        version = self._next()
        new = tuple(
            Entry(f"{prefix}{expert['name']}", str(folder), str(expert["name"]), version, str(expert.get("kind")))
            for expert in read_manifest(folder, check=False).get("experts", ())
        )
        require_new_names([entry.name for entry in new], self.names)
        return Catalogue(version, self.entries + new)

    def without(self, name: str) -> Catalogue:
        """The next catalogue, without an expert."""
        return Catalogue(self._next(), tuple(entry for entry in self.entries if entry.name != name))

    def _next(self) -> int:
        return max(time.time_ns(), self.version + 1)


def model_names(experts: Sequence[str], has_router: bool) -> list[str]:
    """What ``model`` can be; unions ``base:a+b`` and intersections ``base:a&b`` of experts beside them.

    Args:
        experts: Names of those that can be asked for.
        has_router: Whether ``auto`` can be.
    """
    return [BASE, *([AUTO] if has_router else []), *(PREFIX + name for name in experts)]


class OnDemand(Experts):
    """Experts of a catalogue, each put onto the engine when it is first asked for.

    Args:
        engine: Its host is a `FreeMoE` without experts.
        catalogue: Those that can be asked for.
    """

    def __init__(self, engine: Engine, catalogue: Catalogue) -> None:
        super().__init__(engine)
        self.catalogue = catalogue
        self._held: dict[str, Entry] = {}
        self._leaving: dict[str, Future[None]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def names(self) -> list[str]:
        """Their names."""
        return self.catalogue.names

    @property
    def rejected(self) -> list[str]:
        """Those of them that were rejected: they are the base."""
        return self.catalogue.rejected

    @property
    def changes(self) -> int:
        """The version of the catalogue."""
        return self.catalogue.version

    def adopt(self, catalogue: Catalogue) -> None:
        """Take over a catalogue, if it is newer; what it has no longer, or reads elsewhere, is let go of."""
        if catalogue.version <= self.catalogue.version:
            return
        self.catalogue = catalogue
        for name, entry in list(self._held.items()):
            if catalogue.entry(name) != entry:
                self._let_go(name)

    async def left(self) -> None:
        """Wait until what was let go of is gone."""
        await asyncio.gather(*(asyncio.wrap_future(future) for future in list(self._leaving.values())))

    def _let_go(self, name: str) -> None:
        del self._held[name]
        self._leaving[name] = self._engine.drop(name)

    async def bring(self, name: str) -> None:
        """Have an expert, or all parts of a combination, on the engine.

        Raises:
            NotLoadedError: Its files are not what they were.
        """
        for part in dict.fromkeys(ExpertRef.parse(name).names):
            async with self._locks[part]:
                await self._bring(part)

    async def _bring(self, name: str) -> None:
        entry = self.catalogue.entry(name)
        if entry is None or self._held.get(name) == entry:
            return
        await self._gone(name)
        host = self._engine.host
        try:
            await asyncio.wrap_future(
                self._engine.call(lambda: host.load_expert(entry.folder, entry.original, prefix=entry.prefix))
            )
        except FreeMoEError as error:
            # The error names files, which is nobody's business over HTTP.
            log.error("The expert %r could not be loaded: %s", name, error)
            raise NotLoadedError(
                f"The expert {name!r} could not be loaded; the server's log says why. Others are not touched."
            ) from None
        self._took(entry)

    def _took(self, entry: Entry) -> None:
        """Note that an expert is on the engine now; the catalogue may be another one meanwhile."""
        self._held[entry.name] = entry
        if self.catalogue.entry(entry.name) != entry:
            self._let_go(entry.name)

    async def _gone(self, name: str) -> None:
        """Wait until an expert of this name that was let go of is gone."""
        leaving = self._leaving.get(name)
        if leaving is not None:
            await asyncio.wrap_future(leaving)
            if self._leaving.get(name) is leaving:
                del self._leaving[name]

    async def load(self, folder: Path, prefix: str) -> list[str]:
        """Let the experts of an artefact be asked for too; they are put onto the engine at once, which shows that they belong there.

        Raises:
            FreeMoEError: As `FreeMoE.load_expert`; the catalogue is as it was.
        """
        # Refused before anything is read: a name that is taken by an expert that nobody has asked for yet.
        names = self.catalogue.plus(folder, prefix).names[len(self.catalogue.entries) :]
        for name in names:
            await self._gone(name)
        loaded = await super().load(folder, prefix)
        self.catalogue = self.catalogue.plus(folder, prefix)
        for entry in self.catalogue.entries:
            if entry.name in loaded:
                self._took(entry)
        return loaded

    async def drop(self, name: str) -> None:
        """Let nobody ask for an expert any more, and wait until it is gone.

        Raises:
            UnknownNameError: There is no such expert.
        """
        if self.catalogue.entry(name) is None:
            raise unknown_name("expert", name, self.names)
        self.adopt(self.catalogue.without(name))
        await self.left()
