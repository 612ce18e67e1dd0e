"""Bodies of requests, read within bounds of size, time, depth and shape before FastAPI takes their fields."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from freemoe.core.errors import DataError
from freemoe.core.neutral import one_line
from freemoe.core.numbers import format_bytes
from freemoe.core.untrusted import parse_json
from freemoe.serve.http.errors import ClientGoneError, RequestError
from freemoe.serve.settings import RequestLimits


class BoundedRoute(APIRoute):
    """A route whose body is an object of JSON within the app's bounds (``app.state.bounds``), which FastAPI would not hold to.

    Raises:
        RequestError: It is of another type, too large, too slow, or no JSON that is read here.
    """

    def get_route_handler(self) -> Callable[[Request], Any]:
        """FastAPI's own, for a request that has been read."""
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            if self.body_field is not None:
                request = _ReadRequest(request, await read_json_body(request, request.app.state.bounds))
            return await handle(request)

        return read_and_handle


class _ReadRequest(Request):
    """A request whose body has been read: FastAPI asks its bytes only whether there are any."""

    def __init__(self, request: Request, fields: dict[str, Any]) -> None:
        super().__init__(request.scope, request.receive)
        self._fields = fields

    async def body(self) -> bytes:
        return b"read"

    async def json(self) -> Any:
        return self._fields


async def read_json_body(request: Request, bounds: RequestLimits) -> dict[str, Any]:
    """The object that a body of JSON is."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            415,
            f"The body is {one_line(kind, 80) or 'of no type'!r}; send JSON with the header Content-Type: application/json.",
        )
    raw = await read_bytes(request, bounds)
    try:
        said = parse_json(raw.decode(), "the body")
    except UnicodeDecodeError as error:
        raise RequestError(400, f"The body is not UTF-8 at byte {error.start}.", code="invalid_json") from None
    except DataError as error:
        raise RequestError(400, str(error), code="invalid_json") from None
    if not isinstance(said, dict):
        raise RequestError(400, f"The body is {type(said).__name__}; an object is needed.", code="invalid_json")
    return said


async def read_bytes(request: Request, bounds: RequestLimits) -> bytes:
    """A body as it came."""
    too_large = RequestError(
        413, f"The body has more than {format_bytes(bounds.bytes)}, the most that is read.", code="body_too_large"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > bounds.bytes:
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(bounds.seconds):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > bounds.bytes:
                    raise too_large
    except TimeoutError:
        raise RequestError(
            408,
            f"The body was not there after {bounds.seconds:g} seconds.",
            code="body_too_slow",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(raw)


async def validation_error_response(request: Request, error: Exception) -> Response:
    """What is said of a body that has a field which is missing, unknown or of a wrong type or value; OpenAI's words for the first."""
    assert isinstance(error, RequestValidationError)
    # Of a union's alternatives, the one that fails furthest inside is the one that was meant.
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    kind, (_, *loc) = first["type"], first["loc"]
    # A union's alternatives stand in the path by their types, which are nobody's fields.
    steps = [part for part in loc if len(loc) == 1 or not (isinstance(part, str) and re.search(r"\[|^str$", part))]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in steps).removeprefix(".")
    param = one_line(path, 80)
    expected = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    value = one_line(repr(first["input"]), 80)
    match kind:
        case "missing":
            code, message = "missing_required_parameter", f"Missing required parameter: '{param}'."
        case "extra_forbidden":
            allowed = request.scope["route"].body_field.field_info.annotation.model_fields
            code, message = "unknown_parameter", f"Unknown parameter: '{param}'. Allowed: {', '.join(allowed)}."
        case "unsupported_parameter":
            why = f" ({expected})" if expected else ""
            code, message = kind, f"Unsupported parameter: '{param}' is not served here{why}. Leave it out."
        case _:
            what = "type" if kind.endswith("_type") else "value"
            code, message = f"invalid_{what}", f"Invalid {what} for '{param}': {expected}, but got {value} instead."
    return RequestError(400, message, param=param or None, code=code).to_response()
