"""A stand-in for the server: the page's paths, answered from a script, so that a test says when each piece comes."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

from freemoe.serve.page import load_page

PATIENCE = 30.0
CUT = object()
"""A step: the connection breaks."""
QUIET = object()
"""A step: the response ends as if all were well, but for the last event."""
UNTIL_GONE = object()
"""A step: pieces go on until the reader has gone."""


@dataclass(frozen=True)
class Refusal:
    """An answer that is none."""

    status: int
    message: str | None
    headers: dict[str, str] = field(default_factory=dict)
    code: str | None = None


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    path: str
    key: str | None
    body: dict[str, Any]


Step = str | dict[str, Any] | threading.Event | object


class StandIn:
    """What it answers may be changed at any time.

    Attributes:
        models: What ``/v1/models`` lists.
        rejected: Those of them that are marked.
        says: Model -> steps: text is a piece, a dict an event, bytes are sent as they are, an `threading.Event` is waited for.
        refuses: Model or path -> refusals, each given once, before anything else.
        route: The router's view.
        key: Asked of every request where there is one.
        template: Whether the base has a chat template.
        html: The page.
        headers: Its headers.
        asked: All requests with a body.
        gone: Set when a reader left in the middle.
    """

    def __init__(self) -> None:
        self.models = ["base", "base:law", "base:math", "auto"]
        self.rejected: Sequence[str] = ()
        self.says: dict[str, Sequence[Step]] = {}
        self.refuses: dict[str, list[Refusal]] = {}
        self.route: dict[str, Any] = {
            "expert": "math",
            "confidence": 0.834,
            "subdomains": [{"name": "law", "probability": 0.166}, {"name": "math", "probability": 0.834}],
        }
        self.key: str | None = None
        self.template = True
        self.html, headers = load_page()
        self.headers = dict(headers)
        self.asked: list[Asked] = []
        self.gone = threading.Event()
        self.address = ""

    def bodies(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        """What was asked of a path, in order."""
        return [asked.body for asked in self.asked if asked.path == path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stand_in: StandIn

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        told = self.stand_in
        if self.path == "/":
            self.whole(200, told.html, told.headers)
        elif self.path == "/v1/models" and self.may("/v1/models"):
            rows = [
                {"id": n, "object": "model"} | ({"rejected": True} if n in told.rejected else {}) for n in told.models
            ]
            self.document({"object": "list", "data": rows})
        elif self.path != "/v1/models":
            self.refuse(Refusal(404, None))

    def do_POST(self) -> None:
        told = self.stand_in
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        told.asked.append(Asked(self.path, self.headers["authorization"], body))
        if not (self.may(self.path) and self.may(body.get("model", ""))):
            return
        if self.path == "/v1/freemoe/route":
            self.document(told.route)
        elif self.path == "/v1/chat/completions" and not told.template:
            self.refuse(Refusal(400, "This base has no chat template; ask /v1/completions."))
        else:
            with contextlib.suppress(ConnectionError):
                self.stream(body["model"], chat=self.path == "/v1/chat/completions")

    def may(self, what: str) -> bool:
        """Whether a request is let through; where not it has been refused."""
        told = self.stand_in
        if told.key is not None and self.headers["authorization"] != f"Bearer {told.key}":
            self.refuse(Refusal(401, "Wrong or missing API key."))
        elif told.refuses.get(what):
            self.refuse(told.refuses[what].pop(0))
        else:
            return True
        return False

    def refuse(self, refusal: Refusal) -> None:
        error = {"message": refusal.message, "type": "invalid_request_error", "code": refusal.code}
        body = b"<h1>no</h1>" if refusal.message is None else json.dumps({"error": error}).encode()
        self.whole(refusal.status, body, refusal.headers)

    def document(self, told: Any) -> None:
        self.whole(200, json.dumps(told).encode(), {"content-type": "application/json"})

    def whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body)), "connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def stream(self, model: str, chat: bool) -> None:
        told = self.stand_in
        expert = told.route["expert"] if model == "auto" else model.removeprefix("base:")
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.send_header("connection", "close")
        self.send_header("x-freemoe-expert", quote(expert, safe="/+&:-_.~ "))
        if model == "auto":
            self.send_header("x-freemoe-confidence", str(told.route["confidence"]))
        self.end_headers()
        self.close_connection = True
        steps = told.says.get(model, [f"I am {expert}."])
        for step in steps:
            if step is CUT:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if step is QUIET:
                self.chunk(b"")
                return
            self.carry_out(step, chat)
        if pieces := sum(isinstance(step, str) for step in steps):
            self.event({"choices": [], "usage": {"completion_tokens": pieces}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def carry_out(self, step: Step, chat: bool) -> None:
        if isinstance(step, str):
            self.event({"choices": [{"delta": {"content": step}} if chat else {"text": step}]})
        elif isinstance(step, dict):
            self.event(step)
        elif isinstance(step, bytes):
            self.chunk(step)
        elif isinstance(step, threading.Event):
            assert step.wait(PATIENCE), "the test has not let the next piece go"
        elif step is UNTIL_GONE:
            try:
                for _ in range(int(PATIENCE / 0.02)):
                    self.carry_out("more ", chat)
                    time.sleep(0.02)
            except ConnectionError:
                self.stand_in.gone.set()
                raise

    def event(self, told: dict[str, Any]) -> None:
        self.chunk(f"data: {json.dumps(told)}\n\n".encode())

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *args: Any) -> None:
        self.taken: list[socket.socket] = []
        super().__init__(*args)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.taken.append(connection)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def hang_up(self) -> None:
        """End all connections, those too that a browser opened in case it might need them."""
        for connection in self.taken:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def standing_in(told: StandIn, port: int = 0) -> Iterator[StandIn]:
    """Serve on the loopback until the block ends.

    Args:
        told: What to answer; its ``address`` is filled in.
        port: 0 takes a free one.
    """
    with _Server(("127.0.0.1", port), type("Handler", (_Handler,), {"stand_in": told})) as server:
        told.address = f"http://127.0.0.1:{server.server_address[1]}/"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield told
        finally:
            server.shutdown()
            thread.join()
            server.hang_up()
