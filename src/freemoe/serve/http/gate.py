"""Who may come in: the key, the host that was meant, and how many at once."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.datastructures import Headers

from freemoe.core.neutral import one_line
from freemoe.serve.http.errors import RETRY, RequestError
from freemoe.serve.metrics import ServerMetrics
from freemoe.serve.settings import LOOPBACK, RequestLimits

OPEN = ("/", "/health", "/ready")
"""Paths that need no key: they say nothing but that the server is there."""


class AuthMiddleware:
    """Stands before the app: every answer that is not the app's own has OpenAI's shape.

    Where the server listens on the loopback alone, the ``Host`` header has to say so too: a web page that makes its own name
    mean this machine gets nothing.
    """

    def __init__(self, app: Any, metrics: ServerMetrics, bounds: RequestLimits, key: str | None, host: str) -> None:
        self._app, self._metrics, self._bounds = app, metrics, bounds
        self._key = None if key is None else key.encode()
        self._local = host in LOOPBACK
        self._inside = 0
        self._paths = {route.path for route in app.routes}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        self._inside += 1
        try:
            refused = self._check_access(scope)
            if refused is None:
                await self._app(scope, receive, counted_send)
            else:
                await refused.to_response()(scope, receive, counted_send)
        finally:
            self._inside -= 1

    def _check_access(self, scope: Any) -> RequestError | None:
        headers = Headers(scope=scope)
        named = headers.get("host", "")
        # Without its port.
        named = named[1:].partition("]")[0] if named.startswith("[") else named.partition(":")[0].lower()
        if self._local and named not in LOOPBACK:
            return RequestError(
                403, f"This server answers on {', '.join(LOOPBACK)}, and was asked as {one_line(named, 80)!r}."
            )
        if self._key is not None and scope["path"] not in OPEN:
            shown = headers.get("authorization", "").encode("latin-1")
            scheme, _, key = shown.partition(b" ")
            if not hmac.compare_digest(key.strip(), self._key) or scheme.lower() != b"bearer":
                return RequestError(
                    401,
                    "A key is needed: send the header Authorization: Bearer KEY with the key that the server was started with.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if self._inside > self._bounds.at_once and scope["path"] not in OPEN:
            return RequestError(
                429,
                f"{self._bounds.at_once} requests are open, the most at once. Ask again in a moment.",
                "rate_limit_error",
                code="too_many_requests",
                headers=RETRY,
            )
        return None
