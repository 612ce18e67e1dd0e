"""A request that was read elsewhere, and an app that answers it here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from freemoe.serve.ray.passing import ForwardedRequest, stream_answer

ASKED = ForwardedRequest("POST", "/echo", "application/json", b'{"a": [1, "\xc3\xa9"]}')


async def echo(request: Request) -> Response:
    return JSONResponse({"body": await request.json(), "kind": request.headers["content-type"]})


async def _all(app: Any, asked: ForwardedRequest) -> list[list[Any]]:
    return [some async for some in stream_answer(app, asked)]


def body(batches: list[list[Any]]) -> bytes:
    return b"".join(message.get("body", b"") for some in batches for message in some)


def test_an_app_sees_the_request_and_its_answer_comes_in_one_piece() -> None:
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    [[start, *rest]] = asyncio.run(_all(app, ASKED))
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert body([rest]) == '{"body":{"a":[1,"é"]},"kind":"application/json"}'.encode()
    assert asyncio.run(_all(app, ForwardedRequest("GET", "/nothing")))[0][0]["status"] == 404


def test_a_stream_comes_as_it_is_written_and_never_a_beginning_alone() -> None:
    async def stream(request: Request) -> Response:
        async def parts() -> Any:
            for number in range(5):
                yield str(number)
                await asyncio.sleep(0.01)

        return StreamingResponse(parts())

    batches = asyncio.run(_all(Starlette(routes=[Route("/echo", stream, methods=["POST"])]), ASKED))
    assert body(batches) == b"01234"
    assert len(batches) > 3
    assert [message["type"] for message in batches[0]][:2] == ["http.response.start", "http.response.body"]


def test_what_was_written_while_nobody_read_comes_together() -> None:
    async def scenario() -> list[list[Any]]:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for number in range(50):
                await send({"type": "http.response.body", "body": b"%d " % number, "more_body": number < 49})
                if number == 0:
                    await asyncio.sleep(0.01)

        found, slow = [], stream_answer(app, ASKED)
        async for some in slow:
            found.append(some)
            await asyncio.sleep(0.05)
        return found

    batches = asyncio.run(scenario())
    assert body(batches) == b"".join(b"%d " % n for n in range(50))
    assert len(batches) == 2


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_an_app_whose_client_is_gone_is_ended(how: str) -> None:
    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        try:
            # The body was read by the ingress; nothing more comes from the client.
            assert (await receive())["body"] == ASKED.body
            await receive()
        finally:
            ended.append(True)

    async def scenario() -> None:
        answer = stream_answer(app, ASKED)
        await anext(answer)
        await asyncio.sleep(0.01)
        assert not ended
        if how == "closed":
            await answer.aclose()  # type: ignore[attr-defined]
        else:
            waiting = asyncio.create_task(anext(answer))  # type: ignore[arg-type]
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(scenario())
    assert ended == [True]


def test_an_app_that_fails_is_an_error_here() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        asyncio.run(_all(app, ASKED))
