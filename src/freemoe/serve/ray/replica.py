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
from freemoe.serve.catalogue import ExpertCatalogue, LoadedExperts, OnDemandExperts
from freemoe.serve.engine.engine import InferenceEngine
from freemoe.serve.http.app import make_paths
from freemoe.serve.http.metrics import ServerMetrics
from freemoe.serve.ray.passing import ForwardedRequest, Message, stream_answer
from freemoe.serve.served import ServeTarget


@dataclass(frozen=True)
class ReplicaSetup:
    """What a replica is made of; it is sent to each of them.

    Attributes:
        served: What is served, by paths that are the same wherever a process works.
        threads: CPU threads.
        needs: Paths that it reads.
        versions: Of the packages that decide results.
    """

    served: ServeTarget
    threads: int
    needs: tuple[str, ...]
    versions: dict[str, str]


class EngineReplica:
    """Answers requests that were read by the ingress; every request brings the catalogue that is in force.

    Args:
        setup: What it is made of.

    Raises:
        WorkerError: This machine lacks a file, or has other versions.
    """

    def __init__(self, setup: ReplicaSetup) -> None:
        require_alike(setup.needs, setup.versions)
        use_threads(setup.threads)
        served = setup.served
        host, limits = served.load_host()
        can_load = isinstance(host, FreeMoE)
        if can_load:
            # Its experts, which have been read and fit, are put onto it when they are asked for.
            host = FreeMoE(host.model, [], host.router, host.tokenizer)
        self._metrics = ServerMetrics()
        self._engine = InferenceEngine(host, limits, self._metrics).start()
        self._on_demand = OnDemandExperts(self._engine, served.catalogue) if can_load else None
        experts = self._on_demand or LoadedExperts(self._engine)
        self._app = make_paths(self._engine, experts, self._metrics, served.settings.request_limits, served.roots)
        loaded = Gauge("freemoe_loaded_experts", "Experts on the base.", registry=self._metrics.registry)
        loaded.set_function(lambda: len(self._engine.experts))

    def check_health(self) -> None:
        """Ray Serve asks, and replaces a replica that raises.

        Raises:
            WorkerError: The engine has ended.
        """
        if not self._engine.is_alive:
            raise WorkerError("The engine has ended.")

    async def answer(self, asked: ForwardedRequest, catalogue: ExpertCatalogue) -> AsyncIterator[list[Message]]:
        """A request's answer, as it comes."""
        self._update_catalogue(catalogue)
        async for messages in stream_answer(self._app, asked):
            yield messages

    async def change(
        self, asked: ForwardedRequest, catalogue: ExpertCatalogue
    ) -> tuple[list[Message], ExpertCatalogue]:
        """The whole answer to a request after which other experts can be asked for, and the catalogue then."""
        self._update_catalogue(catalogue)
        messages = [message async for some in stream_answer(self._app, asked) for message in some]
        return messages, self.catalogue()

    async def adopt(self, catalogue: ExpertCatalogue) -> None:
        """Take over a newer catalogue; returns when what it has no longer is gone."""
        self._update_catalogue(catalogue)
        if self._on_demand is not None:
            await self._on_demand.wait_all_dropped()

    def _update_catalogue(self, catalogue: ExpertCatalogue) -> None:
        if self._on_demand is not None:
            self._on_demand.update_catalogue(catalogue)

    def catalogue(self) -> ExpertCatalogue:
        """The newest catalogue that it was told of."""
        return ExpertCatalogue() if self._on_demand is None else self._on_demand.catalogue

    def counts(self) -> tuple[str, list[Metric]]:
        """Its name, and what it has counted."""
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id, list(self._metrics.registry.collect())
