"""The ingress: it lets requests in, reads them, and passes them on to the replicas, with the catalogue of experts in force."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from freemoe.recipes.expert_names import PREFIX
from freemoe.serve.http.app import FAILURES, start_page
from freemoe.serve.http.errors import SERVER, ErrorBody
from freemoe.serve.http.gate import AuthMiddleware
from freemoe.serve.http.metrics import CONTENT_TYPE, ServerMetrics
from freemoe.serve.http.reading import read_bytes
from freemoe.serve.ray import counts
from freemoe.serve.ray.forwarding import ForwardedResponse, replica_error_body
from freemoe.serve.ray.passing import ForwardedRequest
from freemoe.serve.served import ServeTarget

log = logging.getLogger(__name__)

_SECONDS = 5.0
"""In which replicas say how they are."""


class IngressDeployment:
    """The one process behind the address. It has no model: replicas answer, and it has what they have in common.

    Args:
        replicas: A handle of Ray Serve to all of them.
        served: What is served.
        key: That requests have to show; None for none.
    """

    def __init__(self, replicas: Any, served: ServeTarget, key: str | None) -> None:
        self._replicas, self._bounds = replicas, served.settings.request_limits
        self._catalogue = served.catalogue
        self._changing = asyncio.Lock()
        self._remembers = False
        self._there = 0.0, 0
        self._metrics = ServerMetrics()
        routes = [
            Route("/", start_page),
            Route("/health", self.get_health),
            Route("/ready", self.get_readiness),
            Route("/metrics", self.get_metrics),
            Route("/docs", self.forward_request),
            Route("/openapi.json", self.forward_request),
            Route("/v1/models", self.forward_request),
            Route("/v1/models/{name:path}", self.forward_request),
            Route("/v1/completions", self.forward_request, methods=["POST"]),
            Route("/v1/chat/completions", self.forward_request, methods=["POST"]),
            Route("/v1/freemoe/route", self.forward_request, methods=["POST"]),
            Route("/v1/freemoe/experts", self.forward_request),
            Route("/v1/freemoe/experts", self.load_experts, methods=["POST"]),
            Route("/v1/freemoe/experts/{name:path}", self.drop_expert, methods=["DELETE"]),
        ]
        app = Starlette(routes=routes, exception_handlers=FAILURES)
        self._gate = AuthMiddleware(app, self._metrics, self._bounds, key, served.settings.host)

    def __serve_build_asgi_app__(self) -> AuthMiddleware:
        """What Ray Serve runs."""
        return self._gate

    async def forward_request(self, request: Request) -> Response:
        """Have a replica answer."""
        asked = await self._read_request(request)
        await self._recover_catalogue()
        return ForwardedResponse(self._replicas.options(stream=True).answer.remote(asked, self._catalogue))

    async def load_experts(self, request: Request) -> Response:
        """``POST /v1/freemoe/experts``: a replica loads them, the others when they are asked for them."""
        asked = await self._read_request(request)
        await self._recover_catalogue()
        async with self._changing:
            try:
                messages, catalogue = await self._replicas.change.remote(asked, self._catalogue)
            except Exception as error:
                return replica_error_body(error).to_response()
            if catalogue.version > self._catalogue.version:
                self._catalogue = catalogue
                await self._broadcast_catalogue(_SECONDS)
        return _build_response(messages)

    async def drop_expert(self, request: Request) -> Response:
        """``DELETE /v1/freemoe/experts/NAME``: nobody can ask for it any more; who did gets the answer."""
        await self._recover_catalogue()
        name = request.path_params["name"]
        async with self._changing:
            own = name.removeprefix(PREFIX).strip()
            known = self._catalogue.find_entry(own) is not None
            if known:
                self._catalogue = self._catalogue.without_expert(own)
        if not known:
            return await self.forward_request(request)
        await self._broadcast_catalogue(None)
        return JSONResponse({"object": "freemoe.expert", "name": name, "deleted": True})

    async def get_health(self, request: Request) -> Response:
        """Whether this process is there."""
        return JSONResponse({"status": "ok"})

    async def get_readiness(self, request: Request) -> Response:
        """Whether a replica is; needs no key, so that the replicas are asked once a second at most."""
        until, replicas = self._there
        if time.monotonic() > until:
            replicas = len(await self._call_replicas("catalogue"))
            self._there = time.monotonic() + 1, replicas
        if replicas:
            return JSONResponse({"status": "ready", "replicas": replicas})
        return ErrorBody(503, "No replica answers.", SERVER, code="no_replica").to_response()

    async def get_metrics(self, request: Request) -> Response:
        """What the replicas have counted, and what was answered here."""
        told = dict(await self._call_replicas("counts"))
        # Only responses are counted here; they have no second place.
        own = [one for one in self._metrics.registry.collect() if one.name == "freemoe_http_responses"]
        return Response(counts.render_replica_metrics({**told, "ingress": own}), media_type=CONTENT_TYPE)

    async def _read_request(self, request: Request) -> ForwardedRequest:
        body = await read_bytes(request, self._bounds) if request.method == "POST" else b""
        return ForwardedRequest(request.method, request.url.path, request.headers.get("content-type", ""), body)

    async def _call_replicas(self, method: str, *arguments: Any, seconds: float | None = _SECONDS) -> list[Any]:
        """What all replicas that answer say."""
        try:
            told = await self._replicas.broadcast(method, *arguments).results_async(
                timeout_s=seconds, return_exceptions=True
            )
        except Exception as error:
            log.warning("No replica answers: %s", error)
            return []
        return [one for one in told if not isinstance(one, BaseException)]

    async def _broadcast_catalogue(self, seconds: float | None) -> None:
        """Let all replicas know the catalogue; those that do not hear of it now do with their next request."""
        await self._call_replicas("adopt", self._catalogue, seconds=seconds)

    async def _recover_catalogue(self) -> None:
        """Where this process is not the first ingress, the replicas know what was changed meanwhile."""
        if not self._remembers:
            for catalogue in await self._call_replicas("catalogue"):
                if catalogue.version > self._catalogue.version:
                    self._catalogue = catalogue
            self._remembers = True


def _build_response(messages: list[Any]) -> Response:
    """Messages of ASGI as a response."""
    start, *rest = messages
    response = Response(b"".join(message.get("body", b"") for message in rest), start["status"])
    response.raw_headers = list(start["headers"])
    return response
