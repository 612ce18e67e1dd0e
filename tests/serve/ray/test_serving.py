"""`freemoe serve --on ray`: two replicas behind one address, one of them killed, and an end that lets answers finish."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import psutil
import pytest

from freemoe.serve.ray.launch import missing_packages
from tests.serve.conftest import alone, free_port, wait_until

pytestmark = [
    pytest.mark.skipif(bool(missing_packages()), reason="needs Ray Serve: pip install 'freemoe[serve-ray]'"),
    pytest.mark.slow,
]

TEXT, EXPERTS = "/v1/completions", "/v1/freemoe/experts"
KEY = "a-key-of-this-test"
NAMES = ("base", "a", "b")
TOKENS = 230


@pytest.fixture(scope="module")
def true(whole):
    return {name: alone(whole, "court?", name, TOKENS) for name in NAMES}


@pytest.fixture(scope="module")
def there(folders):
    """A server on a Ray of its own; it is ended by the last test."""
    port = free_port()
    line = f"serve {folders.own} --on ray --replicas 2 --threads 1 --expert-root {folders.root} --port {port}".split()
    # What a shell of this test's own may say of Ray is none of the server's.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    how = {"env": {**environ, "FREEMOE_API_KEY": KEY, "OMP_NUM_THREADS": "1"}, "stderr": subprocess.PIPE, "text": True}
    asking = {"base_url": f"http://127.0.0.1:{port}", "timeout": 120, "headers": {"authorization": f"Bearer {KEY}"}}
    with (
        subprocess.Popen([sys.executable, "-m", "freemoe", *line], **how) as process,
        httpx.Client(**asking) as client,
    ):
        found = SimpleNamespace(process=process, client=client)
        try:
            until(lambda: process.poll() is not None or ready(found) == 2, 300)
            assert process.poll() is None, process.stderr and process.stderr.read()
            yield found
        finally:
            process.kill()


def until(done, seconds=120):
    assert wait_until(done, seconds), "This took too long."


def ready(there):
    """Replicas that answer."""
    with contextlib.suppress(httpx.TransportError, ValueError):
        return len(counted(there, "freemoe_loaded_experts"))
    return 0


def replicas_of(there):
    """Their processes; Ray writes the deployment's name into theirs."""
    found = []
    for one in psutil.Process(there.process.pid).children(recursive=True):
        # One that was killed may be a zombie for a moment.
        with contextlib.suppress(psutil.NoSuchProcess):
            if "freemoe:Replica" in " ".join(one.cmdline()):
                found.append(one)
    return found


def counted(there, name, **labels):
    """Of each replica the sum of a metric."""
    sums = {}
    for line in there.client.get("/metrics").text.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            replica = line.partition('replica="')[2].partition('"')[0]
            sums[replica] = sums.get(replica, 0) + float(line.split()[-1])
    return sums


def body(name, **more):
    return {"model": name, "prompt": "court?", "max_tokens": TOKENS, "temperature": 0, **more}


class Stream(threading.Thread):
    """A client that reads a stream; ``events`` are what it has read."""

    def __init__(self, there, name):
        super().__init__(daemon=True)
        self.there, self.name_of_expert = there, name
        self.events = []
        self.broken = None
        self.start()

    def run(self):
        try:
            with self.there.client.stream("POST", TEXT, json=body(self.name_of_expert, stream=True)) as answer:
                for line in answer.iter_lines():
                    if line:
                        said = line.removeprefix("data: ")
                        self.events.append(said if said == "[DONE]" else json.loads(said))
        except httpx.TransportError as error:
            self.broken = error

    @property
    def text(self):
        return "".join(event["choices"][0]["text"] for event in self.events if "choices" in event)


def test_two_replicas_answer_as_one_model_does(there, true):
    # Of a busy machine Ray Serve would take the start of its proxy for a failure, and end the server.
    assert replicas_of(there)[0].environ()["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] == "60"
    assert httpx.get(str(there.client.base_url) + "/v1/models").status_code == 401
    models = [row["id"] for row in there.client.get("/v1/models").json()["data"]]
    assert models == ["base", "auto", "base:a", "base:b"]
    # Nobody has asked for an expert yet.
    assert set(counted(there, "freemoe_loaded_experts").values()) == {0.0}
    streams = [Stream(there, NAMES[number % 3]) for number in range(12)]
    for stream in streams:
        stream.join()
        assert stream.events[-1] == "[DONE]"
        assert stream.text == true[stream.name_of_expert]
    written = counted(there, "freemoe_requests_total", how="length")
    assert sum(written.values()) == 12
    assert len(written) == 2
    found = there.client.post(TEXT, json=body("auto", max_tokens=8))
    assert float(found.headers["x-freemoe-confidence"]) > 0
    used = found.headers["x-freemoe-expert"]
    assert found.json()["choices"][0]["text"] == true[used][: len(found.json()["choices"][0]["text"])]


def test_a_client_that_is_gone_frees_its_slot(there):
    with there.client.stream("POST", TEXT, json=body("base", stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
    until(lambda: sum(counted(there, "freemoe_requests_total", how="gone").values()) == 1, 30)
    assert sum(counted(there, "freemoe_running_sequences").values()) == 0


@pytest.mark.hardening
def test_a_killed_replica_costs_its_open_requests_and_no_other(there, true):
    loaded = there.client.post(EXPERTS, json={"path": "more", "prefix": "x-"})
    assert loaded.json()["loaded"] == ["x-c", "x-d"]
    streams = [Stream(there, NAMES[number % 3]) for number in range(8)]
    pool = ThreadPoolExecutor(6)
    whole = [pool.submit(there.client.post, TEXT, json=body("base")) for _ in range(6)]
    until(lambda: all(len(stream.events) > 2 for stream in streams))
    [killed, kept] = replicas_of(there)
    # Others on this machine do not get the token from a file or a command line.
    assert kept.environ()["RAY_AUTH_MODE"] == "token"
    assert len(kept.environ()["RAY_AUTH_TOKEN"]) == 64
    killed.send_signal(signal.SIGKILL)
    for stream in streams:
        stream.join()
        assert true[stream.name_of_expert].startswith(stream.text.rstrip("\ufffd"))
        # What breaks off looks like nothing else.
        assert (stream.broken is None) == (stream.events[-1] == "[DONE]")
        assert stream.broken or stream.text == true[stream.name_of_expert]
    assert {stream.broken is None for stream in streams} == {True, False}
    # 500, after which OpenAI's client asks again, where one had not begun; all may be the other replica's, or done.
    answers = [answer.result() for answer in whole]
    assert {answer.status_code for answer in answers} <= {200, 500}
    assert {a.json()["choices"][0]["text"] for a in answers if a.status_code == 200} <= {true["base"]}
    # Nobody else notices, also before there are two again.
    # Connections of their own: one that lay idle may be closed by the server just as a request comes.
    for number in range(6):
        how = {"json": body(NAMES[number % 3]), "headers": there.client.headers, "timeout": 120}
        found = httpx.post(f"{there.client.base_url}{TEXT}", **how)
        assert found.json()["choices"][0]["text"] == true[NAMES[number % 3]]
    until(lambda: ready(there) == 2)
    assert kept.pid in {one.pid for one in replicas_of(there)}


@pytest.mark.hardening
def test_the_replica_that_took_its_place_knows_what_was_loaded_meanwhile(there, true):
    """``more`` holds the same two experts under other names."""

    def ask():
        for name, same in (("x-c", "a"), ("x-d", "b")):
            found = there.client.post(TEXT, json=body(name))
            assert found.json()["choices"][0]["text"] == true[same]
        return len(counted(there, "freemoe_requests_total", expert="x-c")) == 2

    until(ask)
    assert there.client.delete(f"{EXPERTS}/x-c").json()["deleted"] is True
    for _ in range(4):
        assert there.client.post(TEXT, json=body("x-c")).status_code == 404


def test_running_answers_are_finished_at_the_end(there, true):
    streams = [Stream(there, name) for name in NAMES]
    until(lambda: all(stream.events for stream in streams))
    there.process.send_signal(signal.SIGTERM)
    for stream in streams:
        stream.join()
        assert stream.text == true[stream.name_of_expert]
        assert stream.events[-1] == "[DONE]"
    assert there.process.wait(120) == 0
    assert "2 replicas" in there.process.stderr.read()
