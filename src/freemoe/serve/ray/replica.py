"""A replica: one base, its engine, and the app of the single server, to which Ray Serve's proxy brings requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import Gauge, generate_latest
from prometheus_client.core import Metric

from freemoe.core.environment import use_threads
from freemoe.core.errors import WorkerError
from freemoe.distributed.actor import require_alike
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.serve.catalogue import ExpertCatalogue, ServedExperts
from freemoe.serve.engine.engine import InferenceEngine
from freemoe.serve.http.app import make_app
from freemoe.serve.metrics import ServerMetrics
from freemoe.serve.served import ServeTarget

log = logging.getLogger(__name__)

_SECONDS = 5.0
"""In which the other replicas say what they know."""

_PERIOD = 30.0
"""Seconds after which they are asked again, should an announcement have been lost."""


class EngineReplica:
    """Answers as the single server does; experts are loaded when they are asked for, and all replicas know the same ones.

    Paths are the same on every machine; ``needs`` are those that are read.

    Raises:
        WorkerError: This machine lacks a file, or has other versions.
    """

    def __init__(
        self, served: ServeTarget, key: str | None, threads: int, needs: Sequence[str], versions: dict[str, str]
    ) -> None:
        require_alike(needs, versions)
        use_threads(threads)
        host, limits = served.load_host()
        settings, self._metrics = served.settings, ServerMetrics()
        catalogue = None
        if isinstance(host, FreeMoE):
            # Its experts, which have been read and fit, are put onto it when they are asked for.
            host, catalogue = FreeMoE(host.model, [], host.router, host.tokenizer), served.catalogue
        self._engine = InferenceEngine(host, limits, self._metrics).start()
        self._experts = ServedExperts(self._engine, catalogue, self._announce)
        asked = {"bounds": settings.request_limits, "roots": served.roots, "key": key, "host": settings.host}
        self._gate = make_app(self._experts, self._metrics, render=self.render_metrics, **asked)
        loaded = Gauge("freemoe_loaded_experts", "Experts on the base.", registry=self._metrics.registry)
        loaded.set_function(lambda: len(self._engine.experts))
        self._known, self._follower = asyncio.Event(), None

    def __serve_build_asgi_app__(self) -> Any:
        """What Ray Serve runs: the gate, which before the first request hears what was loaded and dropped elsewhere."""

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                self._follower = self._follower or asyncio.create_task(self._follow_catalogue())
                await self._known.wait()
            await self._gate(scope, receive, send)

        return answer

    def check_health(self) -> None:
        """Ray Serve asks, and replaces a replica that raises."""
        if not self._engine.is_alive:
            raise WorkerError("The engine has ended.")

    async def adopt(self, catalogue: ExpertCatalogue) -> None:
        """Learn what was loaded and dropped elsewhere; returns when what was dropped is gone."""
        self._experts.update_catalogue(catalogue)
        await self._experts.wait_dropped()

    def catalogue(self) -> ExpertCatalogue:
        """Which experts can be asked for."""
        return self._experts.catalogue

    def counts(self) -> tuple[str, list[Metric]]:
        """Its name, and what it has counted."""
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id, list(self._metrics.registry.collect())

    async def render_metrics(self) -> bytes:
        """What all replicas have counted, side by side."""
        return render_replica_metrics(dict(await self.call_replicas("counts", seconds=_SECONDS)))

    async def call_replicas(self, method: str, *arguments: Any, seconds: float | None = None) -> list[Any]:
        """What all replicas that answer say, this one too."""
        from ray import serve

        context = serve.get_replica_context()
        try:
            replicas = serve.get_deployment_handle(context.deployment, context.app_name)
            results = await replicas.broadcast(method, *arguments).results_async(
                timeout_s=seconds, return_exceptions=True
            )
        except Exception as error:
            log.warning("The replicas do not answer: %s", error)
            return []
        return [one for one in results if not isinstance(one, BaseException)]

    async def _announce(self, catalogue: ExpertCatalogue) -> None:
        await self.call_replicas("adopt", catalogue)

    async def _follow_catalogue(self) -> None:
        while True:
            try:
                for catalogue in await self.call_replicas("catalogue", seconds=_SECONDS):
                    self._experts.update_catalogue(catalogue)
            finally:
                self._known.set()
            await asyncio.sleep(_PERIOD)


def render_replica_metrics(counted: Mapping[str, Sequence[Metric]]) -> bytes:
    """Metrics by who counted them, as Prometheus reads them; each sample has the label ``replica``."""
    merged: dict[str, Metric] = {}
    for replica, metrics in counted.items():
        for metric in metrics:
            one = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                one.add_sample(sample.name, {"replica": replica, **sample.labels}, sample.value)
    # All that is asked of a registry.
    return generate_latest(SimpleNamespace(collect=merged.values))  # type: ignore[arg-type]
