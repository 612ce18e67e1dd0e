"""A replica's answer on its way to the client, and what is said where there will be none."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.responses import Response

from freemoe.core.errors import FreeMoEError
from freemoe.serve.http.errors import RETRY, SERVER, ClientGoneError, ErrorBody, error_body_of
from freemoe.serve.http.streams import cancel_on_disconnect, event_line


def replica_error_body(error: BaseException) -> ErrorBody:
    """What is said of an answer that a replica did not give."""
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    match error:
        # What a replica raised is of Ray's and of its own class at once.
        case FreeMoEError():
            return error_body_of(error)
        case RayActorError():
            return ErrorBody(
                503,
                "The replica that was answering is gone: its process was killed, or its machine was lost. Other requests are not "
                "touched. Ask again.",
                SERVER,
                code="replica_lost",
                headers=RETRY,
            )
        case BackPressureError():
            return ErrorBody(429, "Too many requests wait. Ask again in a moment.", "rate_limit_error", code="queue_full",
                        headers=RETRY)  # fmt: skip
        case DeploymentUnavailableError():
            return ErrorBody(503, "No replica could be started.", SERVER, code="no_replica", headers=RETRY)
        case _:
            return error_body_of(error)


class ForwardedResponse(Response):
    """Passes a replica's answer on as it comes; a client that is gone ends it there too.

    Args:
        answer: Of Ray Serve: an asynchronous iterator of lists of ASGI's messages, with ``cancel``.
    """

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer as ASGI has it."""
        try:
            await cancel_on_disconnect(receive, self._forward_messages(scope, receive, send))
        except (ClientGoneError, asyncio.CancelledError) as error:
            self._answer.cancel()
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _forward_messages(self, scope: Any, receive: Any, send: Any) -> None:
        status, streamed = 0, False
        try:
            async for messages in self._answer:
                for message in messages:
                    if message["type"] == "http.response.start":
                        status, streamed = message["status"], _is_stream(message["headers"])
                    await send(message)
        except Exception as error:
            said = replica_error_body(error)
            if not status:
                await said.to_response()(scope, receive, send)
            elif streamed:
                with contextlib.suppress(OSError):
                    await send({"type": "http.response.body", "body": event_line(said.json_body), "more_body": False})
            else:
                # A whole answer comes in one piece; one that does not breaks off.
                raise


def _is_stream(headers: Any) -> bool:
    """Whether an answer is one of server-sent events."""
    return any(name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
