"""A replica: one base, its engine, and the experts that somebody has asked it for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from prometheus_client import Gauge
from prometheus_client.core import Metric

from freemoe.core.environment import use_threads
from freemoe.core.errors import WorkerError
from freemoe.distributed.actor import require_alike
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.serve.catalogue import Catalogue, Experts, OnDemand
from freemoe.serve.engine.engine import Engine
from freemoe.serve.http.app import make_paths
from freemoe.serve.http.metrics import Metrics
from freemoe.serve.ray.passing import Asked, Message, answered
from freemoe.serve.served import Served


@dataclass(frozen=True)
class Setup:
    """What a replica is made of; it is sent to each of them.

    Attributes:
        served: What is served, by paths that are the same wherever a process works.
        threads: CPU threads.
        needs: Paths that it reads.
        versions: Of the packages that decide results.
    """

    served: Served
    threads: int
    needs: tuple[str, ...]
    versions: dict[str, str]


class Replica:
    """Answers requests that were read by the ingress; every request brings the catalogue that is in force.

    Args:
        setup: What it is made of.

    Raises:
        WorkerError: This machine lacks a file, or has other versions.
    """

    def __init__(self, setup: Setup) -> None:
        require_alike(setup.needs, setup.versions)
        use_threads(setup.threads)
        served = setup.served
        host, limits = served.open()
        can_load = isinstance(host, FreeMoE)
        if can_load:
            # Its experts, which have been read and fit, are put onto it when they are asked for.
            host = FreeMoE(host.model, [], host.router, host.tokenizer)
        self._metrics = Metrics()
        self._engine = Engine(host, limits, self._metrics).start()
        self._on_demand = OnDemand(self._engine, served.catalogue) if can_load else None
        experts = self._on_demand or Experts(self._engine)
        self._app = make_paths(self._engine, experts, self._metrics, served.settings.bounds, served.roots)
        loaded = Gauge("freemoe_loaded_experts", "Experts on the base.", registry=self._metrics.registry)
        loaded.set_function(lambda: len(self._engine.experts))

    def check_health(self) -> None:
        """Ray Serve asks, and replaces a replica that raises.

        Raises:
            WorkerError: The engine has ended.
        """
        if not self._engine.is_alive:
            raise WorkerError("The engine has ended.")

    async def answer(self, asked: Asked, catalogue: Catalogue) -> AsyncIterator[list[Message]]:
        """A request's answer, as it comes."""
        self._adopt(catalogue)
        async for messages in answered(self._app, asked):
            yield messages

    async def change(self, asked: Asked, catalogue: Catalogue) -> tuple[list[Message], Catalogue]:
        """The whole answer to a request after which other experts can be asked for, and the catalogue then."""
        self._adopt(catalogue)
        messages = [message async for some in answered(self._app, asked) for message in some]
        return messages, self.catalogue()

    async def adopt(self, catalogue: Catalogue) -> None:
        """Take over a newer catalogue; returns when what it has no longer is gone."""
        self._adopt(catalogue)
        if self._on_demand is not None:
            await self._on_demand.left()

    def _adopt(self, catalogue: Catalogue) -> None:
        if self._on_demand is not None:
            self._on_demand.adopt(catalogue)

    def catalogue(self) -> Catalogue:
        """The newest catalogue that it was told of."""
        return Catalogue() if self._on_demand is None else self._on_demand.catalogue

    def counts(self) -> tuple[str, list[Metric]]:
        """Its name, and what it has counted."""
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id, list(self._metrics.registry.collect())
