"""A request that was read elsewhere: run by an ASGI app here, its messages handed back as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""Of ASGI: ``http.response.start`` or ``http.response.body``."""


@dataclass(frozen=True)
class ForwardedRequest:
    """A request, read to its end.

    Attributes:
        method: Of HTTP.
        path: Decoded.
        kind: Its ``Content-Type``.
        body: As it came.
    """

    method: str
    path: str
    kind: str = ""
    body: bytes = b""

    def asgi_scope(self) -> dict[str, Any]:
        """As ASGI has it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", self.kind.encode("latin-1", "replace"))],
            "client": None,
            "server": None,
        }


async def stream_answer(app: Any, asked: ForwardedRequest) -> AsyncIterator[list[Message]]:
    """What an app answers, as many messages at a time as there are; closed or cancelled, the app's client is gone.

    The first message never comes alone: an answer that is all there comes in one piece.

    Args:
        app: Of ASGI.
        asked: The request.
    """
    messages: list[Message] = []
    wake = asyncio.Event()
    parts = [{"type": "http.request", "body": asked.body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        # The client is there until the app is cancelled.
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        messages.append(message)
        if message["type"] != "http.response.start":
            wake.set()

    task = asyncio.create_task(app(asked.asgi_scope(), receive, send))
    task.add_done_callback(lambda _: wake.set())
    try:
        while True:
            await wake.wait()
            wake.clear()
            found, messages[:] = list(messages), []
            if found:
                yield found
            if task.done() and not messages:
                break
        # An app that failed has said so in its answer, or has not answered.
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
