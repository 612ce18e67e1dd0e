"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import JSONResponse

from freemoe.core.errors import ArtifactError, BusyError, DataError, FreeMoEError, NumericError, UnknownNameError
from freemoe.serve.engine.requests import ContextError, EngineError, QueueFullError, SlowReaderError, StoppingError

log = logging.getLogger(__name__)

INVALID, SERVER = "invalid_request_error", "server_error"


class RequestError(FreeMoEError):
    """An error as it is said over HTTP; raised where a request is refused.

    ``kind`` is OpenAI's ``type``, ``code`` a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.json_body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def to_response(self) -> JSONResponse:
        """The HTTP response with this error's status and headers."""
        return JSONResponse(self.json_body, self.status, self.headers)


class ClientGoneError(RequestError):
    """A request whose client has gone: nobody hears what is said of it."""

    def __init__(self) -> None:
        super().__init__(499, "The client is gone.")


RETRY = {"Retry-After": "1"}

# Of an error's classes the first in here says status, type, code and the field that is wrong.
_SAID: tuple[tuple[type[Exception], int, str, str | None, str | None], ...] = (
    (ContextError, 400, INVALID, "context_length_exceeded", None),
    (UnknownNameError, 404, INVALID, "model_not_found", "model"),
    (QueueFullError, 429, "rate_limit_error", "queue_full", None),
    (StoppingError, 503, SERVER, "stopping", None),
    (EngineError, 503, SERVER, "engine_failed", None),
    (SlowReaderError, 408, INVALID, "slow_reader", None),
    (BusyError, 503, SERVER, "busy", None),
    (NumericError, 500, SERVER, "nan_logits", None),
    (ArtifactError, 400, INVALID, "bad_artefact", "path"),
    (DataError, 400, INVALID, None, None),
    (FreeMoEError, 500, SERVER, None, None),
)


def request_error_of(error: BaseException) -> RequestError:
    """What is said of an error; of one that is not ours no more than that there was one, the log has the rest."""
    if isinstance(error, RequestError):
        return error
    for kind, status, word, code, param in _SAID:
        if isinstance(error, kind):
            return RequestError(status, str(error), word, param, code, RETRY if status in (429, 503) else None)
    log.error("A request failed.", exc_info=error)
    return RequestError(
        500, "The server failed at this request; its log says more. Other requests are not touched.", SERVER
    )
