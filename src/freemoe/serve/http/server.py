"""The server itself: uvicorn, and an end that lets running requests finish."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn

from freemoe.core.environment import use_threads
from freemoe.serve.catalogue import ServedExperts
from freemoe.serve.engine.engine import InferenceEngine
from freemoe.serve.http.app import make_app
from freemoe.serve.metrics import ServerMetrics
from freemoe.serve.served import ServeTarget
from freemoe.serve.settings import address_of

_LAST_WORDS = 5
"""Seconds in which answers that are written get out, after the engine's end."""


class EngineServer(uvicorn.Server):
    """Listens until a signal; then it takes no more requests, and ends when those that run have their answers.

    Meanwhile ``/ready`` says 503, so that a load balancer goes elsewhere. A second signal ends it at once. Where the engine has
    failed it ends too, once those who wait have been told.

    Port 0 takes a free one; the engine ends with the server.
    """

    def __init__(self, app: Any, engine: InferenceEngine, host: str, port: int, drain_seconds: float = 30.0) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                # Its lines go where this process's go: those of uvicorn.access, one per request, are information.
                log_config=None,
                log_level=None,
                server_header=False,
                # Not whichever is installed: limits on headers are h11's.
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                timeout_graceful_shutdown=_LAST_WORDS,
                timeout_keep_alive=30,
                h11_max_incomplete_event_size=1 << 16,
            )
        )
        self.engine, self._drain_seconds = engine, drain_seconds
        self._draining = False

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return self.servers[0].sockets[0].getsockname()[1]

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; whether to end."""
        self.should_exit = self.should_exit or self.engine.failure is not None
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Drain requests on the first signal, stop at once on the second."""
        if self._draining:
            self.should_exit = self.force_exit = True
            return
        self._draining = True
        threading.Thread(target=self.drain_requests, name="freemoe drain", daemon=True).start()

    def drain_requests(self) -> None:
        """Take no more requests, wait for those that run, and end."""
        self.engine.close()
        until = time.monotonic() + self._drain_seconds
        while self.engine.num_unfinished and time.monotonic() < until and not self.should_exit:
            time.sleep(0.02)
        self.engine.stop()
        self.should_exit = True


def serve_here(served: ServeTarget, key: str | None, port: int, tell: Callable[[str], None]) -> None:
    """Open what is served, and answer as this process until a signal."""
    settings = served.settings
    use_threads(settings.threads)
    host, limits = served.load_host()
    metrics = ServerMetrics()
    engine = InferenceEngine(host, limits, metrics).start()
    experts = ServedExperts(engine)
    app = make_app(experts, metrics, bounds=settings.request_limits, roots=served.roots, key=key, host=settings.host)
    tell(f"serving on {address_of(settings.host, port)}")
    try:
        EngineServer(app, engine, settings.host, port, settings.drain_seconds).run()
    finally:
        engine.stop()
    if engine.failure is not None:
        raise engine.failure
