"""A server that is told to end lets those finish who have begun, and takes nobody else."""

import asyncio
import contextlib
import json
import signal
import threading
import time

import httpx
import pytest

from freemoe.core.errors import RecipeError
from freemoe.serve.catalogue import ServedExperts
from freemoe.serve.engine.engine import InferenceEngine
from freemoe.serve.http.app import make_app
from freemoe.serve.metrics import ServerMetrics
from freemoe.serve.settings import EngineLimits, require_free
from tests.serve.conftest import alone, served, wait_until
from tests.serve.http.test_hostile import GOOD, TEXT, error_of

LONG = {**GOOD, "prompt": "court?", "max_tokens": 60, "stream": True}


def slow(there, seconds):
    step = there.engine.runner.forward
    there.engine.runner.forward = lambda rows: time.sleep(seconds) or step(rows)


def streamed(lines):
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def test_running_answers_are_finished(moe):
    true = alone(moe, "court?", "base", 60)
    with served(moe, EngineLimits(128, batch=4)) as there:
        slow(there, 0.01)
        with there.client.stream("POST", TEXT, json=LONG) as answer:
            lines = answer.iter_lines()
            first = streamed([next(lines)])
            there.server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: there.client.get("/ready").status_code != 200, 10)
            assert error_of(there.client.get("/ready"), 503)["code"] == "stopping"
            assert there.client.get("/health").status_code == 200
            refused = there.client.post(TEXT, json=GOOD)
            assert error_of(refused, 503)["code"] == "stopping"
            assert refused.headers["retry-after"]
            chunks = first + streamed(lines)
        assert "".join(c["choices"][0]["text"] for c in chunks) == true
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert wait_until(lambda: not there.engine.is_alive, 10)


@pytest.mark.parametrize("twice", [False, True])
def test_what_takes_too_long_is_ended_with_an_error(moe, twice):
    with served(moe, EngineLimits(128, batch=4)) as there:
        there.server._drain_seconds = 60 if twice else 0.1
        slow(there, 0.1)
        with there.client.stream("POST", TEXT, json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            there.server.handle_exit(signal.SIGTERM, None)
            if twice:
                threading.Timer(0.1, there.server.handle_exit, (signal.SIGINT, None)).start()
                return
            chunks = streamed(lines)
        assert chunks[-1]["error"]["code"] == "stopping"


def test_a_server_whose_engine_fails_says_so_and_ends(moe):
    with served(moe, EngineLimits(128, batch=1)) as there:
        slow(there, 0.01)
        with there.client.stream("POST", TEXT, json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            there.engine._scheduler.step = lambda: 1 / 0
            assert streamed(lines)[-1]["error"]["code"] == "engine_failed"
        until = time.monotonic() + 20
        with contextlib.suppress(httpx.TransportError):
            while time.monotonic() < until:
                assert there.client.get("/health").status_code == 503
                assert error_of(there.client.post(TEXT, json=GOOD), 503)["code"] == "engine_failed"
        assert time.monotonic() < until


@pytest.mark.parametrize(("failure", "word"), [(None, "ended"), (RuntimeError(), "failed")])
def test_an_engine_that_does_not_work_is_not_healthy(moe, failure, word):
    engine = InferenceEngine(moe, EngineLimits(128)).start()
    transport = httpx.ASGITransport(make_app(ServedExperts(engine), ServerMetrics()))

    async def get(path):
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)

    assert asyncio.run(get("/health")).status_code == 200
    engine.stop()
    engine.failure = failure
    assert word in error_of(asyncio.run(get("/health")), 503)["message"]
    assert asyncio.run(get("/ready")).status_code == 503


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(there):
    port = there.server.port
    with pytest.raises(RecipeError, match=f"port {port}"):
        require_free("127.0.0.1", port)
    with pytest.raises(RecipeError, match=r"no\.such\.host"):
        require_free("no.such.host.invalid", 8000)
    require_free("127.0.0.1", 0)
