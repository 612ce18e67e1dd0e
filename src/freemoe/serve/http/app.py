"""The server's routes, and its ASGI app."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from freemoe.core.errors import FreeMoEError
from freemoe.core.neutral import one_line
from freemoe.core.version import __version__
from freemoe.serve.catalogue import ServedExperts
from freemoe.serve.http.completing import CompletionService
from freemoe.serve.http.errors import SERVER, RequestError, request_error_of
from freemoe.serve.http.gate import AuthMiddleware
from freemoe.serve.http.managing import ExpertService
from freemoe.serve.http.preparing import RequestPreprocessor
from freemoe.serve.http.reading import BoundedRoute, validation_error_response
from freemoe.serve.metrics import CONTENT_TYPE, ServerMetrics
from freemoe.serve.page import load_page
from freemoe.serve.settings import RequestLimits


def make_app(
    experts: ServedExperts,
    metrics: ServerMetrics,
    *,
    bounds: RequestLimits | None = None,
    roots: Sequence[Path] = (),
    key: str | None = None,
    host: str = "127.0.0.1",
    render: Callable[[], Awaitable[bytes]] | None = None,
) -> AuthMiddleware:
    """The server as an ASGI app."""
    bounds = bounds or RequestLimits()
    engine, preparing = experts.engine, RequestPreprocessor(experts, bounds)
    completing, managing = CompletionService(preparing, metrics), ExpertService(preparing, roots)

    async def health() -> Response:
        what = "ended" if engine.failure is None else "failed: the log says why"
        fault = RequestError(503, f"The engine has {what}.", SERVER, code="not_alive")
        return JSONResponse({"status": "ok"}) if engine.is_alive else fault.to_response()

    async def ready() -> Response:
        if engine.is_alive and not engine.is_closed:
            return JSONResponse({"status": "ready"})
        return RequestError(503, "The server is about to end.", SERVER, code="stopping").to_response()

    async def numbers() -> Response:
        return Response(await render() if render else generate_latest(metrics.registry), media_type=CONTENT_TYPE)

    app = FastAPI(
        title="freemoe",
        version=__version__,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        exception_handlers=_FAILURES,
    )
    app.state.bounds = bounds
    app.router.route_class = BoundedRoute
    for method, path, answer in (
        ("POST", "/v1/completions", completing.completions),
        ("POST", "/v1/chat/completions", completing.chat),
        ("GET", "/v1/models", managing.models),
        ("GET", "/v1/models/{name:path}", managing.model),
        ("GET", "/v1/freemoe/experts", managing.experts),
        ("POST", "/v1/freemoe/experts", managing.load),
        ("DELETE", "/v1/freemoe/experts/{name:path}", managing.drop),
        ("POST", "/v1/freemoe/route", managing.route),
        ("GET", "/health", health),
        ("GET", "/ready", ready),
        ("GET", "/metrics", numbers),
        ("GET", "/", start_page),
    ):
        app.add_api_route(path, answer, methods=[method])
    return AuthMiddleware(app, metrics, bounds, key, host)


async def start_page() -> Response:
    """The page with which people chat, at ``/``."""
    html, headers = load_page()
    return Response(html, headers=headers)


async def error_response(request: Request, error: Exception) -> Response:
    """What is said of an error."""
    return request_error_of(error).to_response()


async def unknown_path_response(request: Request, error: Exception) -> Response:
    """What is said where nothing answers."""
    assert isinstance(error, HTTPException)
    shown = f"{request.method} {one_line(request.url.path, 80)}"
    return RequestError(error.status_code, f"{shown}: {error.detail}.", code="unknown_path").to_response()


_FAILURES: dict[Any, Any] = {
    HTTPException: unknown_path_response,
    RequestValidationError: validation_error_response,
    FreeMoEError: error_response,
    Exception: error_response,
}
