"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse

from freemoe.core.errors import ArtifactError, BusyError, DataError, FreeMoEError, NumericError, UnknownNameError
from freemoe.serve.engine.requests import ContextError, EngineError, QueueFullError, SlowReaderError, StoppingError

log = logging.getLogger(__name__)

INVALID, SERVER = "invalid_request_error", "server_error"


@dataclass(frozen=True)
class Said:
    """An error as it is said over HTTP.

    Attributes:
        status: Of the response.
        message: For people.
        kind: OpenAI's ``type``.
        param: The field that is wrong.
        code: A word for programs.
        headers: More headers.
    """

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The document."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response."""
        return JSONResponse(self.body, self.status, self.headers)


class RequestError(FreeMoEError):
    """A request that is refused, with what is said of it."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.said = Said(status, message, **more)


_RETRY = {"Retry-After": "1"}


def said_of(error: BaseException) -> Said:
    """What is said of an error; of one that is not ours no more than that there was one, the log has the rest."""
    match error:
        case RequestError():
            return error.said
        case ContextError():
            return Said(400, str(error), code="context_length_exceeded")
        case UnknownNameError():
            return Said(404, str(error), param="model", code="model_not_found")
        case QueueFullError():
            return Said(429, str(error), "rate_limit_error", code="queue_full", headers=_RETRY)
        case StoppingError():
            return Said(503, str(error), SERVER, code="stopping", headers=_RETRY)
        case EngineError():
            return Said(503, str(error), SERVER, code="engine_failed", headers=_RETRY)
        case SlowReaderError():
            return Said(408, str(error), code="slow_reader")
        case BusyError():
            return Said(503, str(error), SERVER, code="busy", headers=_RETRY)
        case NumericError():
            return Said(500, str(error), SERVER, code="nan_logits")
        case ArtifactError():
            return Said(400, str(error), param="path", code="bad_artefact")
        case DataError():
            return Said(400, str(error))
        case FreeMoEError():
            return Said(500, str(error), SERVER)
        case _:
            log.error("A request failed.", exc_info=error)
            return Said(
                500, "The server failed at this request; its log says more. Other requests are not touched.", SERVER
            )
