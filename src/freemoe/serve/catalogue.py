"""Which experts can be asked for, and how one gets onto the engine: all of them at the start, or each when it is asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import FreeMoEError
from freemoe.core.registry import unknown_name
from freemoe.recipes.expert_names import AUTO, BASE, PREFIX, ExpertRef, require_new_names
from freemoe.serve.engine.hosts import VariantHost

if TYPE_CHECKING:
    from freemoe.serve.engine.engine import InferenceEngine

log = logging.getLogger(__name__)


class NotLoadedError(FreeMoEError):
    """An expert that stands in the catalogue and could not be put onto the base."""


@dataclass(frozen=True)
class CatalogueEntry:
    """Where an expert is read."""

    name: str  # By which it is asked for
    folder: str  # Its artefact, under the same path on every machine
    original: str  # Its name there
    since: int  # The version of the catalogue that it came with: files that are read anew are another expert
    kind: str = ""  # See `domain_experts.expert.DomainExpert`


@dataclass(frozen=True)
class ExpertCatalogue:
    """Experts that can be asked for, loaded or not."""

    version: int = 0  # Nanoseconds since 1970, or one more than the version before where the clock stands behind it
    entries: Mapping[str, CatalogueEntry] = field(default_factory=dict)  # By name, in the order of their coming
    # Of experts that were dropped, by name, the version since which they are gone
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def expert_names(self) -> list[str]:
        """Names of all experts, in the catalogue's order."""
        return list(self.entries)

    @property
    def rejected_experts(self) -> list[str]:
        """Names of those that were rejected."""
        return [name for name, entry in self.entries.items() if entry.kind == BASE]

    def with_artefact(self, folder: Path, prefix: str = "") -> ExpertCatalogue:
        """The next catalogue, with all experts of an artefact.

        Raises:
            DataError: A name is taken or cannot be one, or there are too many experts.
            ArtifactError: There is no artefact.
        """
        version = self._next_version()
        new = [
            CatalogueEntry(
                f"{prefix}{expert['name']}", str(folder), str(expert["name"]), version, str(expert.get("kind"))
            )
            for expert in read_manifest(folder, check=False).get("experts", ())
        ]
        require_new_names([entry.name for entry in new], self.expert_names)
        return ExpertCatalogue(version, {**self.entries, **{entry.name: entry for entry in new}}, self.dropped)

    def without_expert(self, name: str) -> ExpertCatalogue:
        """The next catalogue, without an expert."""
        version = self._next_version()
        left = {other: entry for other, entry in self.entries.items() if other != name}
        return ExpertCatalogue(version, left, {**self.dropped, name: version})

    def merge(self, other: ExpertCatalogue) -> ExpertCatalogue:
        """What both say together: of each name what was done last, in whichever order catalogues are merged."""
        dropped = {
            name: max(self.dropped.get(name, 0), other.dropped.get(name, 0))
            for name in {**self.dropped, **other.dropped}
        }
        both = sorted([*self.entries.values(), *other.entries.values()], key=lambda entry: entry.since)
        newest = {entry.name: entry for entry in both if entry.since > dropped.get(entry.name, 0)}
        return ExpertCatalogue(max(self.version, other.version), newest, dropped)

    def _next_version(self) -> int:
        return max(time.time_ns(), self.version + 1)


def model_names(experts: Sequence[str], has_router: bool) -> list[str]:
    """What ``model`` can be; unions ``base:a+b`` and intersections ``base:a&b`` of experts beside them."""
    return [BASE, *([AUTO] if has_router else []), *(PREFIX + name for name in experts)]


class ServedExperts:
    """Experts of a catalogue, each put onto the engine when it is first asked for; of no catalogue those that the engine has.

    Used on the server's event loop. ``announce`` lets others know the catalogue after a change.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        catalogue: ExpertCatalogue | None = None,
        announce: Callable[[ExpertCatalogue], Awaitable[None]] | None = None,
    ) -> None:
        rejected = getattr(engine.host, "rejected", ())
        here = {name: CatalogueEntry(name, "", name, 1, BASE if name in rejected else "") for name in engine.experts}
        self.catalogue = catalogue or ExpertCatalogue(entries=here)
        self.engine, self._announce = engine, announce
        self._loaded = {name: entry for name, entry in self.catalogue.entries.items() if name in engine.experts}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def update_catalogue(self, catalogue: ExpertCatalogue) -> None:
        """Take over what is newer in a catalogue; what was dropped, or is read elsewhere now, is let go of."""
        self.catalogue = self.catalogue.merge(catalogue)
        for name, entry in list(self._loaded.items()):
            if self.catalogue.entries.get(name) != entry:
                del self._loaded[name]
                self.engine.drop_expert(name)

    async def wait_dropped(self, *names: str) -> None:
        """Wait until these experts, where they were let go of, are gone; all that were if none is named."""
        leaving = self.engine.leaving.copy()
        await asyncio.gather(*(asyncio.wrap_future(leaving[name]) for name in names or leaving if name in leaving))

    async def ensure_loaded(self, name: str) -> None:
        """Have an expert, or all parts of a combination, on the engine."""
        for part in dict.fromkeys(ExpertRef.parse(name).names):
            async with self._locks[part]:
                await self._load_expert(part)

    async def _load_expert(self, name: str) -> None:
        entry = self.catalogue.entries.get(name)
        if entry is None or self._loaded.get(name) == entry:
            return
        await self.wait_dropped(name)
        host = self.engine.host
        try:
            await asyncio.wrap_future(
                self.engine.run_between_steps(
                    lambda: host.load_expert(entry.folder, entry.original, prefix=name.removesuffix(entry.original))
                )
            )
        except FreeMoEError as error:
            # The error names files, which is nobody's business over HTTP.
            log.error("The expert %r could not be loaded: %s", name, error)
            raise NotLoadedError(
                f"The expert {name!r} could not be loaded; the server's log says why. Others are not touched."
            ) from None
        self._mark_loaded(entry)

    def _mark_loaded(self, entry: CatalogueEntry) -> None:
        """Note that an expert is on the engine now; the catalogue may be another one meanwhile."""
        if self.catalogue.entries.get(entry.name) == entry:
            self._loaded[entry.name] = entry
        else:
            self.engine.drop_expert(entry.name)

    async def load_experts(self, folder: Path, prefix: str) -> list[str]:
        """Let the experts of an artefact be asked for too; they are put onto the engine at once, which shows that they belong there.

        Raises:
            FreeMoEError: As `FreeMoE.load_expert`; the catalogue is as it was.
        """
        # Refused before anything is read: a name that is taken by an expert that nobody has asked for yet.
        names = self.catalogue.with_artefact(folder, prefix).expert_names[len(self.catalogue.entries) :]
        await self.wait_dropped(*names)
        host = self.engine.host
        loaded = await asyncio.wrap_future(
            self.engine.run_between_steps(lambda: host.load_expert(folder, prefix=prefix))
        )
        self.catalogue = self.catalogue.with_artefact(folder, prefix)
        for name in loaded:
            self._mark_loaded(self.catalogue.entries[name])
        if self._announce is not None:
            await self._announce(self.catalogue)
        return loaded

    async def drop_expert(self, name: str) -> None:
        """Let nobody ask for an expert any more, and wait until it is gone."""
        if name not in self.catalogue.entries:
            raise unknown_name("expert", name, self.catalogue.expert_names)
        if isinstance(self.engine.host, VariantHost):
            self.engine.host.delete_expert(name)  # refused
        self.update_catalogue(self.catalogue.without_expert(name))
        if self._announce is not None:
            await self._announce(self.catalogue)
        await self.wait_dropped()
