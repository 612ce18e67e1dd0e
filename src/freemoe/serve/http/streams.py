"""From the engine's outboxes to a response: whole, or as server-sent events that end when the reader does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.responses import Response

from freemoe.serve.engine.outbox import EventQueue
from freemoe.serve.engine.requests import Event, SequenceEnd
from freemoe.serve.http.errors import ClientGoneError

Found = TypeVar("Found")


async def merge_events(outboxes: Sequence[EventQueue]) -> AsyncIterator[tuple[int, Event]]:
    """What several sequences say, with the number of each, as it comes, until all have ended."""
    loop, wake = asyncio.get_running_loop(), asyncio.Event()

    def wake_up() -> None:
        loop.call_soon_threadsafe(wake.set)

    for outbox in outboxes:
        outbox.set_listener(wake_up)
    left = set(range(len(outboxes)))
    while left:
        wake.clear()
        found = [(number, event) for number in sorted(left) for event in outboxes[number].poll_events()]
        for number, event in found:
            if isinstance(event, SequenceEnd):
                left.discard(number)
            yield number, event
        if left and not found:
            await wake.wait()


async def cancel_on_disconnect(receive: Callable[[], Any], work: Coroutine[Any, Any, Found]) -> Found:
    """What some work returns; it is ended where the client is gone before. The request's body must have been read."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving, working = asyncio.create_task(wait_for_disconnect()), asyncio.create_task(work)
    try:
        await asyncio.wait([leaving, working], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


def event_line(document: Any) -> bytes:
    """One server-sent event; all in ASCII, as some clients take more characters than two for the end of a line."""
    said = document if isinstance(document, str) else json.dumps(document, separators=(",", ":"))
    return b"data: " + said.encode() + b"\n\n"


class EventStream(Response):
    """Server-sent events. It ends when they do, when the client is gone, or when it takes nothing for too long.

    ``close`` is called once at the end, whichever it is; ``patience``: seconds in which the client has to make room for the
    next bytes.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], close: Callable[[], None], patience: float, headers: Mapping[str, str]
    ) -> None:
        # No proxy may keep parts back.
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._chunks, self._close, self._patience = chunks, close, patience

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer as ASGI has it."""
        try:
            with contextlib.suppress(ClientGoneError, TimeoutError):
                await cancel_on_disconnect(receive, self._send_chunks(send))
        finally:
            self._close()

    async def _send_chunks(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            async with asyncio.timeout(self._patience):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
