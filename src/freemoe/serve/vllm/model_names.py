"""Model names that name an expert: ``"model": "base:math"`` becomes vLLM's own way of saying it, before vLLM reads the request."""

from __future__ import annotations

import json
from typing import Any

from freemoe.core.errors import DataError
from freemoe.serve.vllm import requests

_SERVED = ("/v1/completions", "/v1/chat/completions")
_LARGEST = 32 << 20


class ModelNames:
    """ASGI middleware of vLLM's server (``--middleware``).

    ``base:NAME`` asks for an expert, ``base:a+b`` for the union of two; ``vllm_xargs: {"expert": NAME}`` says the same. Which expert
    answers stands in the header ``x-freemoe-expert``. An unknown expert is a 404 in OpenAI's shape, which names those that there are.

    Args:
        app: What it comes before.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _SERVED:
            await self.app(scope, receive, send)
            return
        raw = await _body(receive)
        if raw is None:
            await _refuse(send, 413, f"The body is larger than {_LARGEST:,} bytes.")
            return
        try:
            raw, expert = _named(raw)
        except DataError as error:
            await _refuse(send, 404, str(error))
            return
        except ValueError as error:
            await _refuse(send, 400, str(error))
            return
        await self.app(_with_length(scope, len(raw)), _once(raw, receive), _telling(send, expert))


def _named(raw: bytes) -> tuple[bytes, str]:
    """The body as vLLM is to read it, and the expert that it asks for.

    Raises:
        DataError: The expert is unknown.
        ValueError: It is asked for in a way that vLLM would pass over in silence.
    """
    try:
        asked = json.loads(raw)
    except (ValueError, RecursionError):
        return raw, requests.BASE  # vLLM says what is wrong with it
    if not isinstance(asked, dict):
        return raw, requests.BASE
    xargs = asked.get("vllm_xargs")
    if xargs is not None and not isinstance(xargs, dict):
        return raw, requests.BASE
    model, told = asked.get("model"), (xargs or {}).get(requests.EXPERT)
    name = told
    if isinstance(model, str) and model.startswith(f"{requests.BASE}:"):
        name = model.partition(":")[2]
        if told not in (None, name):
            raise ValueError(f"model asks for expert {name!r} and vllm_xargs for {told!r}: name one.")
        asked |= {"model": requests.BASE, "vllm_xargs": {**(xargs or {}), requests.EXPERT: name}}
        raw = json.dumps(asked).encode()
    if name is None:
        return raw, requests.BASE
    if not isinstance(name, str):
        raise ValueError(f"expert is {name!r:.80}; the name of an expert, as text, is needed.")
    requests.require_expert(name, requests.offered)
    if name != requests.BASE and asked.get("use_beam_search"):
        raise ValueError("A beam search of vLLM takes no expert: leave use_beam_search out, or ask for the base.")
    return raw, name


async def _body(receive: Any) -> bytes | None:
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


def _once(raw: bytes, receive: Any) -> Any:
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return again


def _with_length(scope: Any, length: int) -> Any:
    headers = [(k, v) for k, v in scope["headers"] if k.lower() not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _telling(send: Any, expert: str) -> Any:
    async def tell(message: Any) -> None:
        if message["type"] == "http.response.start":
            # Headers are Latin-1; a name may be any text.
            value = expert.encode("latin-1", "backslashreplace").replace(b"\r", b" ").replace(b"\n", b" ")
            message = {**message, "headers": [*message.get("headers", ()), (b"x-freemoe-expert", value)]}
        await send(message)

    return tell


async def _refuse(send: Any, status: int, what: str) -> None:
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    raw = json.dumps({"error": {"message": what, "type": kind, "param": "model", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
