"""`freemoe serve`: what it refuses before anything is loaded, what it would do, and that it serves and ends."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import typer.main

from freemoe import FreeMoE
from freemoe.cli import app
from freemoe.cli.serve import require_serve
from freemoe.core.errors import RecipeError
from freemoe.evals.engine.answering import Answering
from freemoe.serve.engine.engine import InferenceEngine
from freemoe.serve.engine.hosts import VariantHost
from freemoe.serve.served import resolve_settings
from freemoe.serve.settings import ServeSettings
from tests.serve.conftest import alone, ask, engine_on, free_port, read, wait_until

pytestmark = pytest.mark.usefixtures("no_key")


def test_a_dry_run_names_models_and_memory(folders, freemoe):
    line = ["serve", str(folders.base), "--experts", str(folders.own), "--experts", f"x-={folders.more}", "--dry-run"]
    found = freemoe(*line, "--json", "--context", "100", "--max-batch", "3").json
    assert found["models"] == ["base", "auto", "base:a", "base:b", "base:x-c", "base:x-d"]
    # One layer, keys and values, 2 heads of 8 numbers of 4 bytes.
    assert found["slot_bytes"] == 2 * 2 * 8 * 4 * 100
    assert found["cache_bytes"] == 3 * found["slot_bytes"]
    alone = freemoe("serve", str(folders.own), "--dry-run", "--json").json
    assert alone["models"] == ["base", "auto", "base:a", "base:b"]
    assert alone["context_tokens"] == 256
    assert "slot: 32.0 KiB" in freemoe("serve", str(folders.own), "--dry-run").out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["{own}", "--host", "0.0.0.0"], "FREEMOE_API_KEY"),
        (["{own}", "--api-key", "short"], "8 or more"),
        (["{own}", "--experts", "{own}"], "'a', 'b' already"),
        (["{own}", "--experts", "{base}"], "not an artefact"),
        (["{own}", "--experts", "nothing-here"], "nothing of that name"),
        (["{own}", "--expert-root", "nothing-here"], "no folder"),
        (["{own}", "--context", "10000", "--dry-run"], "at most 256"),
        (["{own}", "--device", "split"], "one device"),
        (["{base}", "--experts", "x-={own}", "--port", "{port}"], "router"),
        (["{own}", "--port", "{taken}"], "can listen"),
        (["{own}", "--on", "local", "--replicas", "2"], "needs a Ray"),
        (["{own}", "--on", "local:2"], "one process or replicas"),
        (["{own}", "--on", "kubernetes"], "ray://HOST:PORT"),
        (["{own}", "--on", "ray", "--replicas", "0"], "--replicas"),
        (["{own}", "--on", "ray", "--device", "cuda:0"], "a device of one machine"),
        (["{own}", "--on", "ray://127.0.0.1:{port}"], "FREEMOE_API_KEY"),
        (["{own}", "--on", "ray://127.0.0.1:{port}", "--api-key", "long-enough"], "Nobody answers"),
    ],
)
def test_what_is_refused(folders, freemoe, line, words):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        ports = {"taken": listening.getsockname()[1], "port": free_port()}
        places = {"own": folders.own, "base": folders.base, **ports}
        done = freemoe("serve", *(part.format(**places) for part in line))
    assert done.code == 2, done.out
    assert words in done.err.replace("\n", " ")


def test_what_stands_in_the_examples_is_known_to_the_command():
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    folder = Path(__file__).resolve().parents[2] / "examples" / "serve"
    docker = (folder / "Dockerfile").read_text()
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", docker, re.MULTILINE)[0])
    started = json.loads(re.findall(r"^CMD (\[\"freemoe.*)$", docker, re.MULTILINE)[0])
    unit = shlex.split(re.findall(r"^ExecStart=(.*)$", (folder / "freemoe.service").read_text(), re.MULTILINE)[0])
    for line in ([*entry, *started], unit):
        assert Path(line[0]).name == "freemoe"
        assert line[1] == "serve"
        command.make_context("serve", line[2:])
    assert "FREEMOE_API_KEY" in docker


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(RecipeError, match=r"uvicorn: pip install 'freemoe\[serve\]'"):
        require_serve()


def test_replicas_without_ray_serve_name_what_to_install(folders, freemoe, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else found(name, *more))
    done = freemoe("serve", str(folders.own), "--on", "ray")
    assert done.code != 0
    assert "pip install 'freemoe[serve-ray]'. Not found: ray" in " ".join(done.err.split())


def test_a_plain_model_and_other_kinds_can_be_hosts(folders):
    host, _ = resolve_settings(ServeSettings(base=str(folders.base), device="cpu"), None).load_host()
    assert isinstance(host, FreeMoE)
    assert host.experts == []
    ways = VariantHost(Answering(host.model, host.tokenizer, {"converted": host.disable_expert}))
    with engine_on(ways) as engine:
        for name in ("converted", "base"):
            assert read(engine.submit([ask(host, "court?", name)])[0]).text == alone(host, "court?")


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_requests_are_logged_and_an_engine_that_fails_ends_the_command(folders, freemoe, monkeypatch, caplog, quiet):
    port = free_port()

    def fail(engine):
        while True:
            with contextlib.suppress(httpx.ConnectError):
                httpx.get(f"http://127.0.0.1:{port}/health")
                raise RuntimeError("planted")

    monkeypatch.setattr(InferenceEngine, "_wait_for_work", fail)
    done = freemoe("serve", str(folders.own), "--port", str(port), *quiet, faults=True)
    assert done.code == 70
    assert ('"GET /health HTTP/1.1" 200' in caplog.text) is not bool(quiet)
    assert "RuntimeError: planted" in " ".join(done.err.split())


def is_ready(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready").status_code == 200
    return False


def test_it_serves_and_ends_at_a_signal(folders, tmp_path):
    port = free_port()
    line = [sys.executable, "-m", "freemoe", "serve", str(folders.own), "--port", str(port)]
    with subprocess.Popen(
        line, cwd=tmp_path, env={**os.environ, "FREEMOE_API_KEY": "from-outside"}, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            assert wait_until(lambda: process.poll() is not None or is_ready(url), 120)
            assert httpx.get(f"{url}/v1/models").status_code == 401
            done = httpx.post(
                f"{url}/v1/completions",
                json={"model": "base:a", "prompt": "x", "max_tokens": 2},
                headers={"authorization": "Bearer from-outside"},
                timeout=60,
            )
            assert done.status_code == 200, done.text
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
        assert process.stderr is not None
        said = process.stderr.read()
        assert f"serving on http://127.0.0.1:{port}" in said
        assert '"POST /v1/completions HTTP/1.1" 200' in said
