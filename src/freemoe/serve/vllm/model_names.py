"""Model names that name an expert: ``"model": "base:math"`` becomes vLLM's own way of saying it, before vLLM reads the request."""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse

from freemoe.core.errors import DataError, RecipeError
from freemoe.recipes.expert_names import BASE
from freemoe.serve.vllm import requests

_SERVED = ("/v1/completions", "/v1/chat/completions")
_LARGEST = 32 << 20


class ModelNames:
    """ASGI middleware of vLLM's server (``--middleware``).

    ``base:NAME`` asks for an expert, ``base:a+b`` for the union of two; ``vllm_xargs: {"expert": NAME}`` says the same. Which expert
    answers stands in the header ``x-freemoe-expert``. A request for an unknown one is left as it is: vLLM answers that there is no
    such model, once it knows that the client may ask at all.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass one request on, with its expert named in the way that the engine reads."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _SERVED:
            return await self.app(scope, receive, send)
        raw = await _read_body(receive)
        if raw is None:
            return await _error_response(413, f"The body is larger than {_LARGEST:,} bytes.")(scope, receive, send)
        try:
            raw, expert = _rewrite_body(raw)
        except RecipeError as error:
            return await _error_response(400, str(error))(scope, receive, send)
        body = iter([{"type": "http.request", "body": raw, "more_body": False}])

        async def replay_body() -> Any:
            return next(body, None) or await receive()

        async def send_with_expert(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                # Headers are Latin-1; a name may be any text.
                value = expert.encode("latin-1", "backslashreplace").decode("latin-1")
                MutableHeaders(scope=message)["x-freemoe-expert"] = value.replace("\r", " ").replace("\n", " ")
            await send(message)

        headers = MutableHeaders(raw=list(scope["headers"]))
        headers["content-length"] = str(len(raw))
        del headers["transfer-encoding"]
        return await self.app({**scope, "headers": headers.raw}, replay_body, send_with_expert)


def _rewrite_body(raw: bytes) -> tuple[bytes, str]:
    """The body as vLLM is to read it, and the expert that it asks for."""
    try:
        asked = json.loads(raw)
    except (ValueError, RecursionError):
        return raw, BASE  # vLLM says what is wrong with it
    xargs = asked.get("vllm_xargs") or {} if isinstance(asked, dict) else None
    if not isinstance(xargs, dict):
        return raw, BASE
    model, told = asked.get("model"), xargs.get(requests.EXPERT)
    prefix = f"{BASE}:"
    named = isinstance(model, str) and model.startswith(prefix)
    name = str(model).removeprefix(prefix) if named else told
    try:
        requests.require_expert(name if isinstance(name, str) else BASE, requests.offered)
    except DataError:
        return raw, BASE
    if named and told not in (None, name):
        raise RecipeError(f"model asks for expert {name!r} and vllm_xargs for {told!r:.80}: name one.")
    if name not in (None, BASE) and asked.get("use_beam_search"):
        raise RecipeError("A beam search of vLLM takes no expert: leave use_beam_search out, or ask for the base.")
    if named:
        asked |= {"model": BASE, "vllm_xargs": {**xargs, requests.EXPERT: name}}
        raw = json.dumps(asked).encode()
    return raw, name if isinstance(name, str) else BASE


async def _read_body(receive: Any) -> bytes | None:
    """The whole body; None where it is too large."""
    parts, size = [], 0
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _LARGEST:
            return None
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return b"".join(parts)


def _error_response(status: int, what: str) -> JSONResponse:
    return JSONResponse(
        {"error": {"message": what, "type": "BadRequestError", "param": "model", "code": status}}, status
    )
