"""A stand-in for the server: the page's paths, answered from a script, so that a test says when each piece comes."""

import asyncio
import contextlib
import json
import threading
import time
from collections import namedtuple
from types import SimpleNamespace
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.serve.material import run_in_thread
from freemoe.serve.http.server import EngineServer
from freemoe.serve.page import load_page

PATIENCE = 30.0
CHAT = "/v1/chat/completions"
CUT = object()
"""A step: the connection breaks."""
QUIET = object()
"""A step: the response ends as if all were well, but for the last event."""
UNTIL_GONE = object()
"""A step: pieces go on until the reader has gone."""
Asked = namedtuple("Asked", ("path", "key", "body"))
"""A request as it came."""


def refusal(status, message, headers=None):
    """An answer that is none; without a message it is no JSON."""
    if message is None:
        return HTMLResponse("<h1>no</h1>", status, headers)
    error = {"message": message, "type": "invalid_request_error", "code": None}
    return JSONResponse({"error": error}, status, headers)


class StandIn:
    """What it answers may be changed at any time."""

    def __init__(self):
        self.models, self.rejected = ["base", "base:law", "base:math", "auto"], ()
        # Model -> steps: text is a piece, a dict an event, bytes are sent as they are, a `threading.Event` is waited for.
        self.says = {}
        # Model or path -> refusals, each given once, before anything else.
        self.refuses = {}
        subdomains = [{"name": "law", "probability": 0.166}, {"name": "math", "probability": 0.834}]
        self.route = {"expert": "math", "confidence": 0.834, "subdomains": subdomains}
        self.key = None  # Asked of every request where there is one
        self.template = True  # Whether the base has one for chats
        self.html, headers = load_page()
        self.headers, self.address = dict(headers), ""
        self.asked = []  # All requests with a body
        self.gone = threading.Event()  # Set when a reader left in the middle

    def bodies(self, path=CHAT):
        """What was asked of a path, in order."""
        return [asked.body for asked in self.asked if asked.path == path]

    async def page(self, request):
        return Response(self.html, headers=self.headers)

    async def list_models(self, request):
        rows = [{"id": n, "object": "model"} | ({"rejected": True} if n in self.rejected else {}) for n in self.models]
        return self.turned_away(request, "/v1/models") or JSONResponse({"object": "list", "data": rows})

    async def answer(self, request):
        body, path = await request.json(), request.url.path
        self.asked.append(Asked(path, request.headers.get("authorization"), body))
        model = body.get("model", "")
        if refused := self.turned_away(request, path, model):
            return refused
        if path == "/v1/freemoe/route":
            return JSONResponse(self.route)
        if path == CHAT and not self.template:
            return refusal(400, "This base has no chat template; ask /v1/completions.")
        expert = self.route["expert"] if model == "auto" else model.removeprefix("base:")
        headers = {"x-freemoe-expert": quote(expert, safe="/+&:-_.~ ")}
        headers |= {"x-freemoe-confidence": str(self.route["confidence"])} if model == "auto" else {}
        steps = self.says.get(model, [f"I am {expert}."])
        return StreamingResponse(self.pieces(steps, path == CHAT), headers=headers, media_type="text/event-stream")

    def turned_away(self, request, *what):
        """What a request gets that is not let through."""
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return refusal(401, "Wrong or missing API key.")
        return next((self.refuses[one].pop(0) for one in what if self.refuses.get(one)), None)

    async def pieces(self, steps, chat):
        def event(told):
            piece = {"choices": [{"delta": {"content": told}} if chat else {"text": told}]}
            return f"data: {json.dumps(piece if isinstance(told, str) else told)}\n\n".encode()

        for step in steps:
            if step is CUT:
                raise ConnectionError("planted")
            if step is QUIET:
                return
            if isinstance(step, threading.Event):
                until = time.monotonic() + PATIENCE
                while not step.is_set():
                    assert time.monotonic() < until, "the test has not let the next piece go"
                    await asyncio.sleep(0.01)
            elif step is UNTIL_GONE:
                try:
                    while True:
                        yield event("more ")
                        await asyncio.sleep(0.02)
                finally:
                    self.gone.set()
            else:
                yield step if isinstance(step, bytes) else event(step)
        if pieces := sum(isinstance(step, str) for step in steps):
            yield event({"choices": [], "usage": {"completion_tokens": pieces}})
        yield b"data: [DONE]\n\n"


@contextlib.contextmanager
def standing_in(told, port=0):
    """Serve what is told on the loopback until the block ends, and fill in its address; port 0 takes a free one."""
    routes = [Route("/", told.page), Route("/v1/models", told.list_models)]
    app = Starlette(routes=[*routes, Route("/{path:path}", told.answer, methods=["POST"])])
    no_engine = SimpleNamespace(failure=None, stop=lambda: None)
    with run_in_thread(EngineServer(app, no_engine, "127.0.0.1", port)) as url:
        told.address = f"{url}/"
        yield told
