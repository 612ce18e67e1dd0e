"""What clients get wrong, on purpose or not: an error in OpenAI's shape, and the next request is answered."""

import asyncio
import contextlib
import json
import socket
import time

import pytest

from freemoe import FreeMoE
from freemoe.core.errors import RecipeError
from freemoe.serve.http.streams import EventStream, merge_events
from freemoe.serve.settings import EngineLimits, RequestLimits, require_key
from tests.serve.conftest import NAN, alone, ask, idle, served, wait_events

GOOD = {"model": "base", "prompt": "x", "max_tokens": 2, "temperature": 0}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
TEXT, TALK = "/v1/completions", "/v1/chat/completions"


def error_of(done, status):
    assert done.status_code == status, done.text
    error = done.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


@pytest.mark.parametrize(
    ("path", "change", "status", "word"),
    [
        (TEXT, {"model": "nobody"}, 404, "base:d"),
        (TEXT, {"model": "base:a+nobody"}, 404, "base:a"),
        (TEXT, {"model": "../../etc/passwd"}, 404, "base"),
        (TEXT, {"model": None}, 400, "Invalid type for 'model': expected a valid string, but got None instead."),
        (TEXT, {"prompt": []}, 400, "0 prompts"),
        (TEXT, {"prompt": [[]]}, 400, "at least 1"),
        (TEXT, {"prompt": ""}, 400, "at least 1"),
        (TEXT, {"prompt": ["x"] * 200}, 400, "200 prompts"),
        (TEXT, {"prompt": ["x", 5]}, 400, "'prompt[1]': expected a valid string, but got 5"),
        (TEXT, {"prompt": [[5, "x"]]}, 400, "'prompt[0][1]'"),
        (TEXT, {"prompt": {"x": 1}}, 400, "'prompt'"),
        (TEXT, {"prompt": [5, -1]}, 400, "-1"),
        (TEXT, {"prompt": [5, 10**6]}, 400, "1000000"),
        (TEXT, {"prompt": [10**30]}, 400, "prompt"),
        (TEXT, {"prompt": "x" * 300}, 400, "maximum context length is 128 tokens. However, you requested 302 tokens (300 in"),
        (TEXT, {"prompt": "x" * 120, "max_tokens": 20}, 400, "context"),
        (TEXT, {"max_tokens": 50_000}, 400, "you requested 50001 tokens (1 in the prompt, 50000 in the completion)"),
        (TEXT, {"prompt": "x" * 128, "max_tokens": None}, 400, "(128 in the prompt, 1 in the completion)"),
        (TEXT, {"max_tokens": -1}, 400, "max_tokens"),
        (TEXT, {"max_tokens": "5"}, 400, "max_tokens"),
        (TEXT, {"temperature": 5}, 400, "temperature"),
        (TEXT, {"top_p": 0}, 400, "top_p"),
        (TEXT, {"n": 0}, 400, "'n'"),
        (TEXT, {"n": 10**9}, 400, "Invalid value for 'n': expected less than or equal to 128, but got 1000000000 instead."),
        (TEXT, {"min_p": 2}, 400, "'min_p'"),
        (TEXT, {"repetition_penalty": 0}, 400, "'repetition_penalty'"),
        (TEXT, {"seed": 2**80}, 400, "seed"),
        (TEXT, {"stop": ["s"] + [f"t{i}" for i in range(30)]}, 400, "stop"),
        (TEXT, {"stop": ["s" * 5000]}, 400, "stop"),
        (TEXT, {"logprobs": 100}, 400, "logprobs"),
        (TEXT, {"logit_bias": {"5": 100}}, 400, "logit_bias"),
        (TEXT, {"best_of": 5}, 400, "best_of"),
        (TEXT, {"suffix": "y"}, 400, "suffix"),
        (TALK, {"messages": []}, 400, "messages"),
        (TALK, {"messages": [{"content": "x"}]}, 400, "Missing required parameter: 'messages[0].role'."),
        (TALK, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, 400, "'messages[0].tool_calls' is not served"),
        (TALK, {"messages": [{"role": "king", "content": "x"}]}, 400, "role"),
        (TALK, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}]}, 400, "'messages[0].content[0].type': expected 'text'"),
        (TALK, {"tools": [{"type": "function"}]}, 400, "Unsupported parameter: 'tools' is not served here (the models answer in"),
        (TEXT, {"response_format": {"type": "json_object"}}, 400, "Unsupported parameter: 'response_format' is not served here (only text)"),
        (TALK, {"tool_choice": "required"}, 400, "Unsupported parameter: 'tool_choice'"),
        (TALK, {"response_format": {"type": "json_object"}}, 400, "response_format"),
        (TALK, {"top_logprobs": 2}, 400, "logprobs"),
        (TALK, {"messages": [{"role": "user", "content": "x" * 300}]}, 400, "context"),
        ("/v1/freemoe/route", {}, 400, "one of the two"),
        ("/v1/freemoe/experts", {}, 400, "path"),
        ("/v1/freemoe/experts", {"place": "x"}, 400, "Unknown parameter: 'place'. Allowed: path"),
    ],
)  # fmt: skip
def test_bodies_that_are_refused(there, path, change, status, word):
    good = {TEXT: GOOD, TALK: CHAT}.get(path, {})
    error = error_of(there.client.post(path, json={**good, **change}), status)
    assert word in error["message"]
    if "context" in word or "in the completion" in word:
        assert error["code"] == "context_length_exceeded"
    assert there.client.post(TEXT, json=GOOD).status_code == 200


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "list"),
        (b"null", "NoneType"),
        (b'"text"', "str"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"model": "base", "model": "a", "prompt": "x"}', "twice"),
        (b'{"model": "base", "prompt": NaN}', "NaN"),
        (b'{"model": "base", "prompt": "x", "temperature": 1e999}', "too large"),
        (b'{"model": "base", "prompt": "\\u0000"}', "NUL"),
        (b'{"model": "base", "prompt": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "deep"),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, "deep"),
    ],
)
def test_json_that_is_none(there, body, word):
    error = error_of(there.client.post(TEXT, content=body, headers={"content-type": "application/json"}), 400)
    assert word in error["message"]


def test_paths_methods_and_types(there):
    assert error_of(there.client.get("/nothing"), 404)["code"] == "unknown_path"
    for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/x", "/v1/models/../../pyproject.toml"):
        error_of(there.client.get(path), 404)
    error_of(there.client.get(TEXT), 405)
    error_of(there.client.delete("/v1/freemoe/experts/nobody"), 404)
    error_of(there.client.post(TEXT, content=json.dumps(GOOD), headers={"content-type": "text/plain"}), 415)
    # A web page that has its own name lead to this machine is refused.
    error_of(there.client.get("/v1/models", headers={"host": "evil.example:80"}), 403)
    assert there.client.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200


def test_nan_ends_the_one_request(there, moe):
    assert error_of(there.client.post(TEXT, json={**GOOD, "prompt": [5, NAN]}), 500)["code"] == "nan_logits"
    streamed = there.client.post(TEXT, json={**GOOD, "prompt": [5, NAN], "stream": True})
    assert json.loads(streamed.text.removeprefix("data: "))["error"]["code"] == "nan_logits"
    assert there.client.post(TEXT, json=GOOD).json()["choices"][0]["text"] == alone(moe, "x", tokens=2)


def connect(there, wait=None):
    return socket.create_connection(("127.0.0.1", there.server.port), timeout=wait)


def raw(there, text, wait=20.0):
    """Send bytes as they are; what comes back until the server closes or is silent."""
    with connect(there, wait) as line:
        line.sendall(text)
        found = b""
        with contextlib.suppress(TimeoutError):
            while b"}}" not in found and (part := line.recv(65536)):
                found += part
    return found


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_bodies_that_are_enormous_or_trickle(moe):
    with served(moe, bounds=RequestLimits(bytes=2000, seconds=0.5)) as there:
        error_of(there.client.post(TEXT, json={**GOOD, "prompt": "x" * 3000}), 413)
        # Without a length, in pieces.
        chunks = (b"x" * 500 for _ in range(10))
        error_of(there.client.post(TEXT, content=chunks, headers={"content-type": "application/json"}), 413)
        began = time.monotonic()
        assert b" 408 " in raw(there, HEAD + b"Content-Length: 1000\r\n\r\n{").splitlines()[0]
        assert time.monotonic() - began < 10
        assert b" 413 " in raw(there, HEAD + b"Content-Length: 99999999999\r\n\r\n{").splitlines()[0]
        assert b" 400 " in raw(there, b"NONSENSE\r\n\r\n", 2).splitlines()[0]
        assert there.client.post(TEXT, json=GOOD).status_code == 200


def test_clients_that_go_free_their_slots(moe):
    with served(moe, EngineLimits(128, batch=1)) as there:
        long = {**GOOD, "max_tokens": 120, "stream": True}
        for _ in range(3):
            with there.client.stream("POST", TEXT, json=long) as answer:
                next(answer.iter_lines())
        body = json.dumps({**long, "stream": False}).encode()
        for _ in range(3):
            with connect(there) as line:
                line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                time.sleep(0.02)
        assert there.client.post(TEXT, json=GOOD).json()["choices"][0]["text"] == alone(moe, "x", tokens=2)
        assert idle(there.engine)
        assert 'how="gone"' in there.client.get("/metrics").text


def test_a_full_queue_says_when_to_come_again(moe):
    with served(moe, EngineLimits(128, batch=1, queue=2)) as there:
        step = there.engine.runner.forward
        there.engine.runner.forward = lambda rows: time.sleep(0.02) or step(rows)
        boxes = [there.engine.submit([ask(moe, "x", tokens=100)])[0]]
        wait_events(boxes[0])
        boxes += there.engine.submit([ask(moe, "x", tokens=100)] * 2)
        full = there.client.post(TEXT, json=GOOD)
        assert error_of(full, 429)["code"] == "queue_full"
        assert full.headers["retry-after"] == "1"
        for box in boxes:
            box.close()
        assert idle(there.engine)
        assert there.client.post(TEXT, json=GOOD).status_code == 200


def test_too_many_at_once(moe):
    with served(moe, bounds=RequestLimits(at_once=1, seconds=5)) as there, connect(there) as line:
        line.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
        time.sleep(0.3)
        assert error_of(there.client.post(TEXT, json=GOOD), 429)["code"] == "too_many_requests"
        assert there.client.get("/health").status_code == 200


def test_a_slow_reader_is_ended_and_others_do_not_wait(moe):
    async def stuck(message):
        # Nothing that is sent gets through: what a client with full buffers looks like to the server.
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def answer(box):
        async def chunks():
            async for _, event in merge_events([box]):
                yield repr(event).encode()

        await EventStream(chunks(), box.close, 0.3, {})({}, lambda: asyncio.sleep(60), stuck)

    with served(moe, EngineLimits(128, batch=4, pieces=8)) as there:
        [box] = there.engine.submit([ask(moe, "x", tokens=100)])
        began = time.monotonic()
        asyncio.run(answer(box))
        assert time.monotonic() - began < 10
        assert box.is_closed
        assert there.client.post(TEXT, json=GOOD).status_code == 200
        assert idle(there.engine)


def test_no_router(moe):
    bare = FreeMoE(moe.model, [], None, moe.tokenizer)
    with served(bare) as there:
        assert "router" in error_of(there.client.post(TEXT, json={**GOOD, "model": "auto"}), 400)["message"]
        error_of(there.client.post("/v1/freemoe/route", json={"prompt": "x"}), 400)
        assert [m["id"] for m in there.client.get("/v1/models").json()["data"]] == ["base"]


def test_keys(moe):
    with served(moe, key="a-secret-key") as there:
        for sent in (None, b"Bearer wrong", b"Basic a-secret-key", "é".encode("latin-1")):
            headers = {"authorization": sent} if sent else {}
            assert error_of(there.client.post(TEXT, json=GOOD, headers=headers), 401)["code"] == "invalid_api_key"
            assert there.client.get("/metrics", headers=headers).status_code == 401
            assert there.client.get("/ready", headers=headers).status_code == 200
        assert there.client.post(TEXT, json=GOOD, headers={"authorization": "Bearer a-secret-key"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "key", "ok"),
    [
        ("127.0.0.1", None, True),
        ("localhost", None, True),
        ("::1", None, True),
        ("0.0.0.0", None, False),
        ("192.168.1.5", None, False),
        ("0.0.0.0", "long-enough", True),
        ("127.0.0.1", "short", False),
        ("127.0.0.1", "with a space", False),
        ("127.0.0.1", "schlüssel", False),
    ],
)
def test_who_needs_a_key(host, key, ok):
    if ok:
        require_key(host, key)
        return
    with pytest.raises(RecipeError, match="key"):
        require_key(host, key)
