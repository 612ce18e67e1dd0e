"""The body of a request, read within bounds of size, time, depth and shape."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from freemoe.core.errors import DataError
from freemoe.core.neutral import one_line
from freemoe.core.numbers import byte_text
from freemoe.core.untrusted import parse_json
from freemoe.serve.http.errors import RequestError
from freemoe.serve.settings import Bounds

Body = TypeVar("Body", bound=BaseModel)


async def read_json_body(request: Request, bounds: Bounds) -> Any:
    """What a body of JSON says.

    Raises:
        RequestError: It is of another type, too large, too slow, or no JSON that is read here.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            415,
            f"The body is {one_line(kind, 80) or 'of no type'!r}; send JSON with the header Content-Type: application/json.",
        )
    raw = await read_bytes(request, bounds)
    try:
        return parse_json(raw.decode(), "the body")
    except UnicodeDecodeError as error:
        raise RequestError(400, f"The body is not UTF-8 at byte {error.start}.", code="invalid_json") from None
    except DataError as error:
        raise RequestError(400, str(error), code="invalid_json") from None


async def read_bytes(request: Request, bounds: Bounds) -> bytes:
    """A body as it came.

    Raises:
        RequestError: It is too large or too slow.
    """
    too_large = RequestError(
        413, f"The body has more than {byte_text(bounds.bytes)}, the most that is read.", code="body_too_large"
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
        raise RequestError(499, "The client is gone.") from None
    return bytes(raw)


async def read_body(request: Request, shape: type[Body], bounds: Bounds) -> Body:
    """A body of a known shape.

    Raises:
        RequestError: As `read_json_body`; or a field is missing, unknown or of a wrong type or value.
    """
    said = await read_json_body(request, bounds)
    if not isinstance(said, dict):
        raise RequestError(400, f"The body is {type(said).__name__}; an object is needed.", code="invalid_json")
    try:
        return shape.model_validate(said)
    except ValidationError as error:
        raise _refusal(error, shape) from None


def _refusal(error: ValidationError, shape: type[BaseModel]) -> RequestError:
    """The first of what is wrong with a body, in OpenAI's words."""
    # Of a union's alternatives, the one that fails furthest inside is the one that was meant.
    first = max(error.errors(include_url=False, include_context=False), key=lambda one: len(one["loc"]))
    kind, loc = first["type"], first["loc"]
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
            code, message = (
                "unknown_parameter",
                f"Unknown parameter: '{param}'. Allowed: {', '.join(shape.model_fields)}.",
            )
        case "unsupported_parameter":
            why = f" ({expected})" if expected else ""
            code, message = kind, f"Unsupported parameter: '{param}' is not served here{why}. Leave it out."
        case _:
            what = "type" if kind.endswith("_type") else "value"
            code, message = f"invalid_{what}", f"Invalid {what} for '{param}': {expected}, but got {value} instead."
    return RequestError(400, message, param=param or None, code=code)
